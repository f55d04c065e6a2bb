"""Saves into a slow store delay no training step. The tests check order, not times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from tinkerflow.backend.journal import Kind
from tinkerflow.backend.spec.commands import ExportAdapter
from tinkerflow.flows.runner import IN_FLIGHT
from tinkerflow.flows.snapshots import SnapshotPolicy
from tinkerflow.tasks.operations import SAVES


@dataclass
class Gate:
    """Blocks writes into the store: each sets `arrived` and waits for `opened`. broken: the write then fails."""

    arrived: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    broken: bool = False
    failed: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def gate(context: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, create = Gate(), context.store.blobs.create

    def slow(key: str, data: bytes) -> None:
        gate.arrived.set()
        assert gate.opened.wait(120)
        if gate.broken:
            gate.failed.set()
            raise OSError("the writer is no more")
        create(key, data)

    monkeypatch.setattr(context.store.blobs, "create", slow)
    yield gate
    gate.opened.set()


@pytest.fixture
def serve(make_runner: Any, client: Any, running: Any) -> Callable[..., Any]:
    """`await serve(stack, model, snapshots)`: run the model's runner until the stack ends."""

    async def serve(stack: AsyncExitStack, model: str, snapshots: SnapshotPolicy | None = None) -> None:
        runner = make_runner(model, client.journal.models.get(model, None).step, snapshots)
        await stack.enter_async_context(running(runner.serve()))
        await stack.enter_async_context(running(client.ring("model:", runner)))

    return serve


@pytest.fixture
def create(serve: Any, client: Any) -> Callable[..., Any]:
    """`await create(stack, snapshots)`: a served model after its first step."""

    async def create(stack: AsyncExitStack, snapshots: SnapshotPolicy | None = None) -> str:
        name, request = client.submit_create(0)
        await serve(stack, name, snapshots)
        assert (await client.result(request)).error is None
        await done(client, *step(client, name, 5))
        return str(name)

    return create


def step(client: Any, model: str, token: int) -> list[str]:
    return [client.forward_backward(model, [token, token]), client.optim_step(model)]


async def done(client: Any, *requests: str) -> None:
    assert [one.error for one in await client.results(*requests)] == [None] * len(requests)


def weights(pool: Any, model: str) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in pool.executor.adapters[model].weights.items()}


async def test_steps_are_answered_while_saves_are_uploaded(
    context: Any, client: Any, create: Any, serve: Any, gate: Gate
) -> None:
    async with AsyncExitStack() as stack:
        model = await create(stack)
        saves = [client.submit(model, kind, {"path": "slow", "name": "slow"}) for kind in sorted(SAVES)]
        for _ in range(IN_FLIGHT):
            await done(client, *step(client, model, 6))
        assert gate.arrived.is_set() and client.journal.checkpoints.page("local").total == 0
        load = client.submit(model, Kind.LOAD_WEIGHTS, {"path": f"tinker://{model}/weights/slow"})
        gate.opened.set()
        await done(client, *saves)
        assert (await client.result(load)).error is not None, "when it was executed there was no such checkpoint"
    rows = client.journal.checkpoints.page("local").rows
    assert sorted(row.kind for row in rows) == ["external_weights", "sampler_weights", "weights"]
    assert [row.step for row in rows] == [1, 1, 1]


async def test_unload_and_snapshots_wait_for_the_saves_before_them(
    context: Any, client: Any, create: Any, serve: Any, gate: Gate, until: Callable[..., Any]
) -> None:
    async with AsyncExitStack() as stack:
        model = await create(stack, SnapshotPolicy(1, 1000.0))
        saves = [client.submit(model, Kind.SAVE_WEIGHTS, {"path": f"slow-{number}"}) for number in range(6)]
        await until(gate.arrived.is_set)
        assert client.journal.recovery.snapshots(model) == []
        unload = client.journal.models.request_unload(model, "over")
        gate.opened.set()
        await done(client, *saves)
        await client.result(unload)
    assert {row.name for row in client.journal.checkpoints.page("local").rows} == {f"slow-{n}" for n in range(6)}


async def test_overtaken_save_is_repeated_after_its_group_ended(
    context: Any, client: Any, create: Any, serve: Any, gate: Gate, until: Callable[..., Any]
) -> None:
    pool = context.pool
    async with AsyncExitStack() as stack:
        model = await create(stack, SnapshotPolicy(1, 1000.0))
        expected = weights(pool, model)
        saved = client.submit(model, Kind.SAVE_WEIGHTS, {"path": "slow"})
        await done(client, *step(client, model, 6), *step(client, model, 7))
        await until(gate.arrived.is_set)
        after = weights(pool, model)
        pool.die()
        first = len(pool.log)
        await done(client, client.forward_backward(model, [6], forward_only=True))
        assert weights(pool, model) == after
        assert not any(isinstance(command, ExportAdapter) for command in pool.log[first:])
        gate.opened.set()
        await done(client, saved, *step(client, model, 8))
        await until(lambda: bool(client.journal.recovery.snapshots(model)))
    assert stored(context, model, "slow") == expected


async def test_next_engine_makes_an_overtaken_save_at_its_place(
    context: Any, client: Any, create: Any, serve: Any, gate: Gate, until: Callable[..., Any]
) -> None:
    pool = context.pool
    async with AsyncExitStack() as stack:
        model = await create(stack, SnapshotPolicy(1, 1000.0))
        expected = weights(pool, model)
        saves = [client.submit(model, Kind.SAVE_WEIGHTS, {"path": "first"})]
        await done(client, *step(client, model, 6))
        saves.append(client.submit(model, Kind.SAVE_WEIGHTS, {"path": "second"}))
        middle = weights(pool, model)
        await done(client, *step(client, model, 7))
        await until(gate.arrived.is_set)
        after = weights(pool, model)
        gate.broken = True
    assert client.journal.recovery.snapshots(model) == [], "none may be past a save that is not answered"
    pool.die()
    gate.opened.set()
    await until(gate.failed.is_set)
    gate.broken = False
    assert client.journal.queue.pending_models() == [model]
    replayed = client.seqs[model] - 1
    async with AsyncExitStack() as stack:
        await serve(stack, model, SnapshotPolicy(1, 1000.0))
        await done(client, *saves)
        assert weights(pool, model) == after
        await done(client, *step(client, model, 8))
        await until(lambda: bool(client.journal.recovery.snapshots(model)))
        assert weights(pool, model) != after
        final, (snapshot, *_) = weights(pool, model), client.journal.recovery.snapshots(model)
        assert snapshot.seq_id >= replayed, "it holds what the replay passed, though the saves were begun after that"
        pool.die()
        await done(client, client.forward_backward(model, [6], forward_only=True))
        assert weights(pool, model) == final
    assert stored(context, model, "first") == expected
    assert stored(context, model, "second") == middle


async def test_overtaken_save_is_made_after_a_hold_with_a_later_save(
    client: Any, create: Any, make_runner: Any, running: Any, pool: Any, gate: Gate, until: Callable[..., Any]
) -> None:
    async with AsyncExitStack() as stack:
        model = await create(stack)
        named = client.submit(model, Kind.SAVE_WEIGHTS, {"path": "first"})
        await done(client, client.submit(model, Kind.SAVE_FOR_SAMPLER, {"sampling_session_seq_id": 4}))
        await until(gate.arrived.is_set)
        gate.broken = True
    assert client.journal.recovery.unstored(model)
    pool.die()
    gate.opened.set()
    await until(gate.failed.is_set)
    gate.broken = False
    runner = make_runner(model, 1)
    runner.pause(True)
    async with running(runner.serve()):
        await until(lambda: not client.journal.recovery.unstored(model))
        assert client.journal.results.get(named, "local") is None
        runner.pause(False)
        await done(client, named)


def stored(context: Any, model: str, name: str) -> dict[str, bytes]:
    state, _ = context.store.load(f"tinker://{model}/weights/{name}")
    return {name: array.tobytes() for name, array in state.weights.items()}


async def test_steps_are_answered_while_a_recovery_snapshot_is_uploaded(
    context: Any, client: Any, create: Any, serve: Any, until: Callable[..., Any], gate: Gate
) -> None:
    async with AsyncExitStack() as stack:
        model = await create(stack, SnapshotPolicy(1, 1000.0))
        await done(client, *step(client, model, 5))
        await until(gate.arrived.is_set)
        for _ in range(3):
            await done(client, *step(client, model, 6))
        assert client.journal.recovery.snapshots(model) == []
        gate.opened.set()
        await until(lambda: bool(client.journal.recovery.snapshots(model)))
