"""Broken and generated requests to all endpoints: no 5xx, no hang, and nothing held afterwards."""

from __future__ import annotations

from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.api.fuzz import KEY, PROTO, Attack, Edit, Target, attacks

quick = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def attacked(server: Any, target: Target, endpoints: list[str], examples: int, *, proto: bool) -> None:
    """Send `examples` broken bodies, which must all be answered and leave nothing held. proto: also protobuf bodies."""

    @settings(quick, max_examples=examples)
    @given(attacks(endpoints).filter(lambda one: proto or one.endpoint != PROTO))
    def attack(one: Any) -> None:
        target.launch(one)

    attack()
    assert target.sent >= examples - 10
    assert {200, 400, 404} <= set(target.statuses), "some are good, some are not"
    assert not server.app.state.services.holds._held
    assert not server.app.state.services.subscriptions.waiting


def test_broken_bodies_are_answered_without_side_effects(start: Any, engine: Any, lettered: Any) -> None:
    server = start(poll_hold=0.2)
    target = Target(server.http, server.url)
    target.prepare()
    heartbeat = list(target.valid()).index("session_heartbeat")
    target.launch(Attack(str(heartbeat), edits=(Edit(0, "put", "sess-absent", ""),)))  # seldom drawn
    attacked(server, target, target.endpoints(), 150, proto=True)


def test_broken_bodies_of_other_clients_are_answered(start: Any, engine: Any, lettered: Any) -> None:
    server = start()
    target = Target(server.http, server.url)
    target.prepare()
    first = list(target.valid()).index("/v1/completions")
    theirs = [str(first + n) for n in range(len(target.of_other_clients()))]

    attacked(server, target, theirs, 300, proto=False)


def test_requests_generated_from_the_openapi_document_never_cause_a_500(start: Any, engine: Any, lettered: Any) -> None:
    server = start(poll_hold=0.2)
    schema = schemathesis.openapi.from_dict(server.app.openapi())
    # schemathesis writes no protobuf, and the test above attacks that endpoint
    operations = [one.ok() for one in schema.exclude(path_regex=PROTO).get_all_operations()]
    target = Target(server.http, server.url)

    @settings(quick, max_examples=150)
    @given(st.one_of([operation.as_strategy() for operation in operations]))
    def ask(case: Any) -> None:
        case.headers = {"X-API-Key": KEY}
        try:
            sent = case.call(base_url=server.url, timeout=60)
        except httpx.InvalidURL:
            return
        target.note(sent.status_code)
        assert sent.status_code < 500, (case.method, case.path, sent.status_code, sent.text)

    ask()
    assert target.sent >= 140
    assert {200, 404} <= set(target.statuses)
