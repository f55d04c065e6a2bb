"""Answers to polls while the service recovers."""

from __future__ import annotations

from tinkerflow.api.routes import futures


def test_a_reason_makes_the_wait_a_pause():
    plain = futures._not_yet("req-1", None).body
    assert plain == b'{"type":"try_again","request_id":"req-1","queue_state":"active"}'
    paused = futures._not_yet("req-1", "restoring model m: replaying 12 of 40").body
    assert b'"queue_state":"paused_capacity","queue_state_reason":"restoring model m: replaying 12 of 40"' in paused
