"""Errors name the parameter of a URL. In OpenAI's form, `param` is the field that the message names."""

from __future__ import annotations

import httpx
import pytest
import sqlalchemy as sa
from tests.api.conftest import KEY, Running
from tests.waiting import wait_for

from tinkerflow.api.errors import openai_error


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("max_tokens is 0: must be at least 1", "max_tokens"),
        ("messages[0].content is 3: must be a string", "messages"),
        ("messages[1].tool_call_id is None: must be the id", "messages"),
        ("model 'a b' does not exist", "model"),
        ("reward, label and text are all absent", None),
        ("a" * 1_000_000 + "! is not supported by this endpoint", None),
        ("a.b" * 1_000_000 + "!", None),
    ],
)
def test_openai_error_param_is_the_field_at_the_start_of_the_message(message: str, field: str | None) -> None:
    assert openai_error(400, message)["error"]["param"] == field


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("training_runs?limit=0", "limit is '0': must be greater than or equal to 1"),
        ("checkpoints?offset=1.5", "offset is '1.5': must be a whole number"),
        ("sessions?access_scope=all", "access_scope is 'all': must be 'owned' or 'accessible'"),
        ("audit?day=2026-02-30", "day is '2026-02-30': must be a date, such as 2026-01-31"),
        ("billing/usage/events?ending_before=2026-01-01", "starting_on is missing: must be given"),
        ("billing/usage/events?starting_on=x", "starting_on is 'x': must be a time, such as 2026-01-31T12:00:00Z"),
    ],
)
def test_errors_of_parameters_have_the_form_of_other_errors(server: Running, path: str, reason: str) -> None:
    answer = httpx.get(f"{server.url}/api/v1/{path}", headers={"X-API-Key": KEY})
    assert (answer.status_code, answer.json()) == (400, {"detail": reason})


def test_times_in_bodies_have_a_time_zone(server: Running) -> None:
    for endpoint, last in (("sessions", "last_session_id"), ("checkpoints", "last_checkpoint_uuid")):
        refused = server.post(f"{endpoint}/search", {"cursor": {"last_created_at": "2026-01-31T12:00:00", last: "x"}})
        rule = "must be a time with a time zone, such as 2026-01-31T12:00:00Z"
        assert refused.json() == {"detail": f"cursor.last_created_at is '2026-01-31T12:00:00': {rule}"}


def test_a_fault_in_our_statements_is_no_outage(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """SQLite reports a missing table like a full disk."""
    with server.journal.models._write() as connection:
        connection.execute(sa.text("ALTER TABLE model RENAME TO renamed"))
    answer = httpx.get(f"{server.url}/api/v1/training_runs", headers={"X-API-Key": KEY})
    assert (answer.status_code, answer.json()) == (500, {"detail": "the service failed: ProgrammingError"})
    wait_for(lambda: any("no such table" in (record.exc_text or "") for record in caplog.records))  # with a traceback
