"""API keys: each opens only its project's objects, and private routes refuse requests without one."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.manual_clock import ManualClock

from tinkerflow.api import identity
from tinkerflow.api.identity import LOCAL, REMEMBERED_SECONDS, Authenticator, Identity
from tinkerflow.api.links import linked
from tinkerflow.api.tokens import Claims, sign_token

FORGED = {
    "X-API-Key": sign_token(
        Claims("", "local", "local", datetime.now(UTC) + timedelta(hours=1)), b"0" * 32, datetime.now(UTC)
    )
}


def test_any_tml_key_works_on_loopback_until_one_is_created(server: Any, journal: Any) -> None:
    assert server.get("training_runs", key="tml-anything").status_code == 200
    assert server.get("training_runs", key="sk-other").status_code == 401
    assert server.http.get(f"{server.url}/api/v1/training_runs").status_code == 401
    _, secret = journal.keys.create("first", "team")
    server.clock.advance(1.0)
    assert server.get("training_runs", key="tml-anything").status_code == 401
    assert server.get("training_runs", key=secret).status_code == 200


def test_key_is_required_on_other_addresses_from_the_start(start: Any, journal: Any) -> None:
    server = start(host="0.0.0.0")
    refused = server.get("training_runs")
    assert refused.status_code == 401
    assert "tinkerflow key create" in refused.json()["detail"]
    _, secret = journal.keys.create("first", "team")
    assert server.get("training_runs", key=secret).status_code == 200


def test_a_revoked_key_stops_working(server: Any, journal: Any) -> None:
    key, secret = journal.keys.create("first", "team")
    assert server.get("training_runs", key=secret).status_code == 200
    journal.keys.revoke(key.id)
    server.clock.advance(REMEMBERED_SECONDS)
    assert server.get("training_runs", key=secret).status_code == 401


async def test_identity_has_the_project_key_and_admin_flag(journal: Any, settings_for: Any) -> None:
    clock = ManualClock()
    auth = Authenticator(settings_for(), journal, clock)
    assert await auth.identity("tml-anything") == LOCAL
    assert (LOCAL.key_id, LOCAL.admin) == ("", True)
    plain, secret = journal.keys.create("a", "team")
    boss, boss_secret = journal.keys.create("b", "ops", admin=True)
    clock.advance(1.0)
    assert await auth.identity(secret) == Identity("team", plain.id, admin=False, name="a")
    assert await auth.identity(boss_secret) == Identity("ops", boss.id, admin=True, name="b")


async def test_concurrent_checks_of_one_key_cost_one_query(journal: Any, settings_for: Any, statements: Any) -> None:
    clock = ManualClock()
    auth = Authenticator(settings_for(), journal, clock)
    _, secret = journal.keys.create("a", "team")
    for _ in range(2):
        clock.advance(10.0)
        with statements() as made:
            assert len({await one for one in [asyncio.create_task(auth.identity(secret)) for _ in range(500)]}) == 1
        assert len([one for one in made if one.startswith("SELECT")]) <= 2


def test_first_look_ups_of_keys_are_limited(start: Any, journal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(host="0.0.0.0")
    known, late = (journal.keys.create(name, "team")[1] for name in ("a", "b"))
    assert server.get("training_runs", key=known).status_code == 200
    monkeypatch.setattr(identity, "_MOST_ASKED", 0)
    server.clock.advance(REMEMBERED_SECONDS)
    refused = server.get("training_runs", key=late)
    assert refused.status_code == 429 and "are being looked up for the first time" in refused.json()["detail"]
    assert server.get("training_runs", key=known).status_code == 200, "it was looked up before"


def test_unknown_keys_are_rate_limited_and_valid_ones_are_not(start: Any, journal: Any) -> None:
    server = start(host="0.0.0.0")
    key, secret = journal.keys.create("a", "team")
    assert server.get("training_runs", key=secret).status_code == 200
    answers = [server.get("training_runs", key=f"tml-guess-{number}") for number in range(40)]
    assert [answer.status_code for answer in answers] == [401] * 30 + [429] * 10
    assert answers[-1].headers["Retry-After"] == "2" and "unknown keys" in answers[-1].json()["detail"]
    forged = {"Authorization": f"Bearer {FORGED['X-API-Key']}"}
    assert server.http.get(f"{server.url}/v1/models", headers=forged).json()["error"]["type"] == "rate_limit_error"
    _, late = journal.keys.create("b", "team")
    for valid in (secret, late):
        assert server.get("training_runs", key=valid).status_code == 200
    journal.keys.revoke(key.id)
    server.clock.advance(REMEMBERED_SECONDS)
    assert server.get("training_runs", key=secret).status_code == 401, "the key was revoked"
    assert [server.get("training_runs", key="tml-guess").status_code for _ in range(4)] == [401, 401, 429, 429]
    refused = [entry for entry in journal.audit.entries(None) if entry.event == "project_key_refused"]
    assert len(refused) == 32 and {entry.owner for entry in refused} == {"", "team"}
    assert refused[0].details["address"] == "127.0.0.1"


def test_another_key_of_the_project_may_poll_and_send_heartbeats(server: Any, engine: Any, journal: Any) -> None:
    """The SDK's shadow clients do so."""
    ours, colleague = (journal.keys.create(name, "team-a")[1] for name in "ab")
    model = server.model(ours)
    done = server.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}, ours).json()["request_id"]
    assert server.result(done, colleague).status_code == 200
    assert server.post("session_heartbeat", {"session_id": model.split(":")[0]}, colleague).status_code == 200


def routes_of(app: Any) -> list[tuple[str, str, bool]]:
    """Every route of the app: its method, its path, and whether a signed link opens it instead of a key."""
    found, waiting = [], [("", route) for route in app.routes]
    while waiting:
        prefix, route = waiting.pop()
        if hasattr(route, "methods"):
            calls = {one.call for one in route.dependant.dependencies} if hasattr(route, "dependant") else set()
            found += [(method, prefix + route.path, linked in calls) for method in route.methods]
        else:  # an included or mounted router
            inner = getattr(route, "original_router", route)
            within = getattr(getattr(route, "include_context", None), "prefix", getattr(route, "path", ""))
            waiting += [(prefix + within, one) for one in inner.routes]
    return found


def test_private_routes_refuse_requests_without_a_valid_key(server: Any, journal: Any) -> None:
    key, revoked = journal.keys.create("gone", "team")
    journal.keys.revoke(key.id)
    server.clock.advance(1.0)
    seen = routes_of(server.app)
    assert len(seen) > 40
    assert ("POST", "/api/v1/client/config", False) in seen
    opened = set()
    for method, path, by_link in seen:
        url = server.url + path.replace("{", "").replace("}", "").replace(":path", "")
        for headers in ({}, {"X-API-Key": "wrong"}, {"X-API-Key": "tml-wrong"}, {"X-API-Key": revoked}, FORGED):
            answer = server.http.request(method, url, headers=headers)
            if answer.status_code not in ((403,) if by_link else (401, 429)):
                opened.add((path, answer.status_code))
    website = {(path, status) for path, status in opened if path in ("/docs", "/docs/{page:path}")}
    assert website, "its pages are public, whether or not it has been built"
    assert opened - website == {("/api/v1/healthz", 200), ("/", 200), ("/openapi.json", 200), ("/console/{name}", 404)}
    assert server.http.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}
