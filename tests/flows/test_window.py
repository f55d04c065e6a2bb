from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from tinkerflow.backend.journal import Kind, Outcome, Pending
from tinkerflow.flows.prefect.window import TASKS, Window
from tinkerflow.tasks.execution.operation import Operation

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def operation(kind: Kind, seconds: float = 0.0, error: str | None = None) -> Operation:
    request = Pending(f"req-{kind}", kind, "o", "s", "m", None, 1, b"", "json", NOW)

    async def perform() -> Outcome:
        await asyncio.sleep(seconds)
        return request.failed(error) if error else request.done(b"{}", "json")

    return Operation(request, asyncio.create_task(perform()))


async def test_a_window_ends_with_its_operations_and_says_what_they_were() -> None:
    window = Window("w")
    for kind in (Kind.FORWARD_BACKWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP):
        window.add(operation(kind, 0.01))
    window.close()
    state = await window.follow()
    assert state.is_completed() and state.message == "forward_backward x2, optim_step"


async def test_failures_are_shown() -> None:
    window = Window("w")
    window.add(operation(Kind.OPTIM_STEP))
    window.add(operation(Kind.FORWARD, error="data[0]: bad"))
    window.close()
    state = await window.follow()
    assert state.is_failed() and state.message == "optim_step, forward; 1 failed: data[0]: bad"


async def test_a_shared_window_waits_for_more_and_closes_itself_when_idle() -> None:
    linger = 600.0
    window = Window("w", linger=lambda: linger)
    window.add(operation(Kind.OPTIM_STEP))
    following = asyncio.create_task(window.follow())
    await asyncio.sleep(0.05)
    assert window.open
    linger = 0.01
    window.add(operation(Kind.OPTIM_STEP, 0.2))
    assert window.open and not following.done()
    state = await following
    assert not window.open and state.message == "optim_step x2"


def test_every_kind_that_a_lane_executes_has_a_task_that_is_never_retried_cached_or_tagged() -> None:
    assert set(TASKS) == set(Kind) - {Kind.SAMPLE}
    for tracked in TASKS.values():
        assert (tracked.retries, tracked.persist_result, tracked.tags) == (0, False, set())
