"""The state machine of a model's runner, for every pair of a state and an event."""

from __future__ import annotations

from itertools import product

import pytest

from tinkerflow.flows.runner import RunnerEvent, RunnerState, next_state

S, E = RunnerState, RunnerEvent
PAUSED = {S.PAUSED, S.DRAINING_PAUSED}
DRAINING = {S.DRAINING, S.DRAINING_PAUSED}


@pytest.mark.parametrize(("state", "event"), [*product(S, E)])
def test_state_machine_handles_each_event_in_each_state(state: RunnerState, event: RunnerEvent) -> None:
    after = next_state(state, event)
    if state is S.ENDED or event is E.STOP:
        assert after is S.ENDED, "the end is final"
        return
    match event:
        case E.PAUSE:
            assert after in PAUSED and (after in DRAINING) == (state in DRAINING)
        case E.RESUME:
            assert after not in PAUSED and (after in DRAINING) == (state in DRAINING)
        case E.INTERRUPT:
            assert after in DRAINING and (after in PAUSED) == (state in PAUSED)
        case E.DRAINED if state in DRAINING:
            assert after is (S.PAUSED if state in PAUSED else S.IDLE)
        case E.RESTORE if state in (S.IDLE, S.SERVING):
            assert after is S.RESTORING
        case E.READY if state in (S.IDLE, S.RESTORING):
            assert after is S.SERVING
        case E.NOT_READY if state is S.RESTORING:
            assert after is S.IDLE
        case _:
            assert after is state, "a restore changes neither a pause nor what drains"
