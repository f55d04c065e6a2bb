"""A store that takes its time: what is on its way there holds up no training step. Told by order, not by the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from backend.journal import Kind
from flows.lane import Lane, Shared
from tasks.recovery import Policy


@pytest.fixture
def gate(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(arrived, opened): a write into the store says that it arrived, and waits until the gate is opened."""
    arrived, opened = threading.Event(), threading.Event()
    create = runtime.store._blobs.create

    def slow(key: str, data: bytes) -> None:
        arrived.set()
        assert opened.wait(120)
        create(key, data)

    monkeypatch.setattr(runtime.store._blobs, "create", slow)
    yield arrived, opened
    opened.set()


async def serve(stack: AsyncExitStack, running: Any, client: Any, runtime: Any, shared: Shared, number: int) -> str:
    """A model in a lane of its own."""
    name, request = client.submit_create(number)
    lane = Lane(runtime, shared, name, 0)

    async def wake() -> None:
        async with client.journal.bell.listen("model:") as topics:
            async for _ in topics:
                lane.wake()

    await stack.enter_async_context(running(lane.serve(2000)))
    await stack.enter_async_context(running(wake()))
    assert (await client.result(request)).error is None
    return name


async def test_steps_are_executed_while_a_save_is_uploaded_and_others_are_answered(
    runtime: Any, untracked: Shared, client: Any, running: Any, until: Callable[..., Any], gate: Any
) -> None:
    arrived, opened = gate
    async with AsyncExitStack() as stack:
        saving, other = [await serve(stack, running, client, runtime, untracked, n) for n in range(2)]
        await client.results(client.forward_backward(saving, [5, 5]), client.optim_step(saving))
        saved = client.submit(saving, Kind.SAVE_WEIGHTS, {"path": "slow"})
        await until(arrived.is_set)
        behind = [one for _ in range(3) for one in (client.forward_backward(saving, [6]), client.optim_step(saving))]
        await until(lambda: runtime.pool.executor.adapters[saving].step == 4)
        for _ in range(3):
            done = await client.results(client.forward_backward(other, [7]), client.optim_step(other))
            assert [one.error for one in done] == [None, None]
        assert client.journal.checkpoints("local").total == 0
        opened.set()
        assert [one.error for one in await client.results(saved, *behind)] == [None] * 7
    (row,) = client.journal.checkpoints("local").rows
    assert row.step == 1
    assert runtime.store.load(row.path)[0].step == 1


async def test_steps_are_answered_while_a_recovery_snapshot_is_uploaded(
    runtime: Any, untracked: Shared, client: Any, running: Any, until: Callable[..., Any], gate: Any
) -> None:
    arrived, opened = gate
    async with AsyncExitStack() as stack:
        shared = replace(untracked, snapshots=Policy(1, 1000.0))
        model = await serve(stack, running, client, runtime, shared, 0)
        await client.results(client.forward_backward(model, [5, 5]), client.optim_step(model))
        await client.results(client.forward_backward(model, [5, 5]), client.optim_step(model))
        await until(arrived.is_set)
        for _ in range(3):
            done = await client.results(client.forward_backward(model, [6]), client.optim_step(model))
            assert [one.error for one in done] == [None, None]
        assert client.journal.recovery.snapshots(model) == []
        opened.set()
        await until(lambda: bool(client.journal.recovery.snapshots(model)))
