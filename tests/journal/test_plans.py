"""SQLite finds pending requests through the partial indexes, so the cost does not grow with the finished requests."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import sqlalchemy as sa

from tinkerflow.backend.journal import CheckpointQuery, Retention, SessionQuery

WAITING_OF_MODEL, WAITING_SAMPLES = "ix_request_pending_of_model", "ix_request_pending_samples"
WAITING_INTERACTIVE, OF_OWNER = "ix_request_pending_interactive", "ix_request_pending_of_owner"
OF_SAMPLER = "(sampler_id=?)"
LAST, FROM_LAST = (datetime(2026, 1, 1, tzinfo=UTC), "x"), "(owner=? AND created_at<?)"


def plan_of(statements, url):
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        plan = [
            row.detail
            for one in statements
            for row in connection.exec_driver_sql("EXPLAIN QUERY PLAN " + one, ("2026-01-01",) * one.count("?"))
        ]
    engine.dispose()
    return plan


def end_sessions(journal):
    for session in journal.sessions.ids("local", limit=9, offset=0):
        journal.sessions.finish(session, "local")


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("call", "index"),
    [
        (lambda journal, model: journal.queue.pending_models(), WAITING_OF_MODEL),
        (lambda journal, model: journal.requests.ready(model), WAITING_OF_MODEL),
        (lambda journal, model: journal.queue.gaps(1), WAITING_OF_MODEL),
        (lambda journal, model: journal.requests.pending_samples(10), WAITING_SAMPLES),
        (lambda journal, model: journal.requests.pending_samples(1), WAITING_INTERACTIVE),
        (lambda journal, model: journal.requests.pending_samples(10, owner="local"), f"{OF_OWNER} (owner=?)"),
        (lambda journal, model: journal.metrics.now(), WAITING_SAMPLES),
        (lambda journal, model: journal.results.expire(10), "ix_request_finished_with_bytes"),
        (lambda journal, model: journal.upkeep.unnoted(), "ix_checkpoint_to_note"),
        (lambda journal, model: journal.upkeep.unpurged(), "ix_checkpoint_to_purge"),
        (lambda journal, model: journal.samples.answers_of(f"tinker://{model}/weights/a", "local"), OF_SAMPLER),
        (lambda journal, model: end_sessions(journal), OF_OWNER),
        (lambda journal, model: journal.sessions.search(SessionQuery(after=LAST), "local"), FROM_LAST),
        (lambda journal, model: journal.checkpoint_search.search(CheckpointQuery(after=LAST), "local"), FROM_LAST),
    ],
    ids=[
        "pending_models",
        "ready",
        "gaps",
        "pending_samples",
        "interactive",
        "pending_samples_of_owner",
        "observed",
        "expire_results",
        "unnoted",
        "unpurged",
        "answers_of",
        "end_of_session",
        "next_page_of_sessions",
        "next_page_of_checkpoints",
    ],
)
def test_the_partial_index_is_used(scene, url, statements, call, index):
    model = scene.model()
    scene.sample(scene.sampler(scene.session()), 0)
    with statements() as made:
        call(scene.journal, model)
    plan = plan_of(made, url)
    assert any(index in line for line in plan), plan
    scans = [line for line in plan if line.startswith("SCAN request")]
    assert all(line.endswith((index, WAITING_SAMPLES, WAITING_INTERACTIVE)) for line in scans), plan
    assert not any("(sampler_id=?)" in line for line in plan if index != OF_SAMPLER), plan
    assert not any("ix_sampler_state" in line for line in plan), plan


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "call",
    [lambda journal: journal.recovery.superfluous(), lambda journal: journal.upkeep.delete_retired(Retention(1))],
    ids=["superfluous", "delete_retired"],
)
def test_live_samplers_are_read_once_and_not_for_each_row(journal, url, statements, call):
    """A run that samples each step has a live sampler and a snapshot for each: a sweep took minutes at 20,000 steps."""
    with statements() as made:
        call(journal)
    plan = plan_of(made, url)
    (place,) = (number for number, line in enumerate(plan) if "sampler" in line)
    assert plan[place - 1].startswith("LIST SUBQUERY"), plan
