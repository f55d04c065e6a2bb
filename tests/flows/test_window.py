from __future__ import annotations

import asyncio

from prefect.client.schemas.objects import State

from tinkerflow.backend.journal import Kind, Outcome, Pending
from tinkerflow.flows.prefect.window import SINGLE, Window, window_size, windows_of
from tinkerflow.tasks.execution.operation import Operation


def operation(kind: Kind, until: asyncio.Event | None = None, error: str | None = None) -> Operation:
    request = Pending(f"req-{kind}", kind, "o", "s", "m", None, 1, b"")

    async def perform() -> Outcome:
        if until is not None:
            await until.wait()
        return request.failed(error) if error else request.done(b"{}", "json")

    return Operation(request, asyncio.create_task(perform()))


class Ended(asyncio.Future[tuple[str | None, str | None]]):
    """Receives the final state of a window."""

    def __call__(self, state: State[None]) -> None:
        self.set_result((state.name, state.message))


async def test_window_ends_after_its_operations_and_counts_them_by_kind() -> None:
    ended, go = Ended(), asyncio.Event()
    window = Window(ended)
    for kind in (Kind.FORWARD_BACKWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP):
        window.add(operation(kind, go))
    window.close()
    assert not ended.done()
    go.set()
    assert await ended == ("Completed", "forward_backward x2, optim_step")


async def test_failed_operations_are_shown() -> None:
    ended = Ended()
    window = Window(ended)
    window.add(operation(Kind.OPTIM_STEP))
    window.add(operation(Kind.FORWARD, error="data[0]: bad"))
    window.close()
    assert await ended == ("Failed", "optim_step, forward; 1 failed: data[0]: bad")


async def test_a_shared_window_waits_for_more_and_closes_itself_when_idle() -> None:
    linger, ended, go = 600.0, Ended(), asyncio.Event()
    window = Window(ended, size=3, linger=lambda: linger)
    for full in (False, False, True):
        shown = operation(Kind.OPTIM_STEP)
        window.add(shown)
        await shown.answered
        await asyncio.sleep(0)
        assert (window.open, window.full) == (True, full)
    linger = 0.01
    window.add(operation(Kind.OPTIM_STEP, go))
    assert window.open and not ended.done()
    go.set()
    assert await ended == ("Completed", "optim_step x4")
    assert not window.open


def test_five_million_operations_are_two_hundred_task_runs() -> None:
    sizes = [window_size(number) for number in range(250)]
    assert sizes[: SINGLE + 1] == [1] * (SINGLE + 1) and sizes == sorted(sizes)
    assert windows_of(0) == 0 and windows_of(1) == 1 and windows_of(SINGLE) == SINGLE
    assert windows_of(5_000_000) <= 200
    for operations in (7, 500, 12_345):
        number = windows_of(operations)
        assert sum(sizes[: number - 1]) < operations <= sum(sizes[:number])
