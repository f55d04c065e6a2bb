from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.manual_clock import ManualClock

from tinkerflow.flows.prefect.pacing import BURST, CREDIT_SECONDS, Pacing


def test_runs_are_shared_after_a_burst_until_half_the_credit_returns() -> None:
    clock = ManualClock()
    pacing = Pacing(10.0, clock)
    for _ in range(19):
        pacing.open()
        assert not pacing.sharing
    pacing.open()
    assert pacing.sharing
    clock.advance(0.9)
    assert pacing.sharing and pacing.seconds == 0
    clock.advance(0.2)
    assert not pacing.sharing


def test_pacing_gives_the_seconds_until_the_next_run() -> None:
    clock = ManualClock()
    pacing = Pacing(4.0, clock)
    while pacing.seconds == 0:
        pacing.open()
    clock.advance(pacing.seconds)
    assert pacing.seconds == 0


@given(st.lists(st.floats(0.0, 3.0), max_size=60), st.floats(0.5, 50.0))
def test_caller_that_waits_as_instructed_stays_below_the_rate(pauses: list[float], rate: float) -> None:
    clock = ManualClock()
    pacing = Pacing(rate, clock)
    opened = 0
    for pause in pauses:
        clock.advance(pause)
        if pacing.seconds == 0:
            pacing.open()
            opened += 1
    assert opened <= BURST + rate * clock.monotonic() + 1e-6


def test_pacing_wait_is_bounded_by_the_credit_limit() -> None:
    clock = ManualClock()
    pacing = Pacing(10.0, clock)
    for _ in range(1000):
        pacing.open()
    assert pacing.seconds <= CREDIT_SECONDS + 0.2
