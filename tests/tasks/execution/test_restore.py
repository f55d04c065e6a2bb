"""A model is restored in another worker group, with a real journal and store and the unigram model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.mounting import unmounted
from tests.waiting import until

from tinkerflow.backend.core.errors import (
    AllocationError,
    GroupFailedError,
    NotFoundError,
    ServerError,
    StoreAwayError,
    StoreError,
    TinkerflowError,
)
from tinkerflow.backend.journal import Kind, ModelState
from tinkerflow.backend.spec.commands import Command, CreateAdapter, Forward
from tinkerflow.tasks.execution.restore import restore
from tinkerflow.tasks.execution.sequencer import Sequencer
from tinkerflow.tasks.execution.state_transfers import take_snapshot
from tinkerflow.tasks.operations import OPERATIONS


def state(pool: Any, model: str) -> list[bytes]:
    adapter = pool.executor.adapters[model]
    return [array.tobytes() for array in (*adapter.weights.values(), *adapter.moments.values())]


@pytest.fixture
async def model(client: Any, execute: Any) -> str:
    """A model after two steps: requests 0 to 4."""
    model, _ = client.submit_create()
    for token in (5, 7):
        client.forward_backward(model, [token, token])
        client.optim_step(model)
    await execute(model)
    return str(model)


@pytest.mark.parametrize("snapshot", [False, True])
async def test_model_is_restored_as_its_answers_left_it(
    context: Any, client: Any, pool: Any, execute: Any, model: str, snapshot: bool
) -> None:
    if snapshot:
        assert await take_snapshot(context, model, 4, Sequencer(model, context.saves).slot()) is not None
    client.forward_backward(model, [9])
    await execute(model)
    before = state(pool, model)
    client.optim_step(model)  # never executed, so the restored model does not include it
    pool.die()
    restored = await restore(context.bound_to(pool.generation), model, OPERATIONS)
    assert state(pool, model) == before
    assert (restored.snapshot is not None) is snapshot
    assert (restored.requests, restored.steps, restored.last) == ((1, 0, 5) if snapshot else (6, 2, 5))
    assert restored.copies == {} and restored.unreadable == ()


@pytest.mark.parametrize("error", [StoreAwayError, StoreError, NotFoundError])
async def test_engine_reads_a_snapshot_that_a_process_cannot_read(
    context: Any, client: Any, pool: Any, model: str, error: type[TinkerflowError]
) -> None:
    async def transfer(job: Any, *, generation: int | None = None) -> None:
        raise error("rank 1 cannot read it")

    assert (taken := await take_snapshot(context, model, 4, Sequencer(model, context.saves).slot())) is not None
    before = state(pool, model)
    pool.die()
    pool.reaches_store, pool.transfer = True, transfer
    restored = await restore(context.bound_to(pool.generation), model, OPERATIONS)
    assert state(pool, model) == before and restored.unreadable == ()
    assert [one.path for one in client.journal.recovery.snapshots(model)] == [taken.path], "it is not forgotten"


async def test_a_restore_waits_until_its_store_is_mounted_again(
    context: Any, client: Any, pool: Any, execute: Any, model: str, tmp_path: Path
) -> None:
    context.store.mark()
    for seq_id in (5, 6):
        client.forward_backward(model, [9])
        await execute(model)
        assert await take_snapshot(context, model, seq_id, Sequencer(model, context.saves).slot()) is not None
    before, kept = state(pool, model), client.journal.recovery.snapshots(model)
    pool.die()
    with unmounted(tmp_path / "store"):
        restoring = asyncio.create_task(restore(context.bound_to(pool.generation), model, OPERATIONS))
        await until(lambda: "mount it" in str(client.journal.recovery.health().waits.get(model)))
    assert (await restoring).unreadable == ()
    assert state(pool, model) == before
    assert client.journal.recovery.snapshots(model) == kept


@pytest.mark.parametrize("short", [CreateAdapter, Forward])
async def test_a_restore_waits_for_memory_of_the_devices(
    context: Any, client: Any, pool: Any, model: str, monkeypatch: pytest.MonkeyPatch, short: type[Command]
) -> None:
    before = state(pool, model)
    pool.die()
    execute, failures = pool.executor.execute, iter([True, True])

    def crowded(command: Command) -> Any:
        if isinstance(command, short) and next(failures, False):
            raise AllocationError("the devices had no memory left")
        return execute(command)

    monkeypatch.setattr("tinkerflow.tasks.execution.restore._PAUSES", (0.01, 0.01))
    monkeypatch.setattr(pool.executor, "execute", crowded)
    await restore(context.bound_to(pool.generation), model, OPERATIONS)
    assert state(pool, model) == before
    assert pool.names.count("DropAdapter") == 2
    assert client.journal.models.get(model, None).state is ModelState.LIVE


async def test_saves_that_are_not_stored_are_copied_at_their_place(
    context: Any, client: Any, pool: Any, execute: Any, model: str
) -> None:
    weights = {name: array.copy() for name, array in pool.executor.adapters[model].weights.items()}
    saved = client.submit(model, Kind.SAVE_WEIGHTS, {"path": "named"})
    rows = context.journal.requests.ready(model, 1)
    assert [row.id for row in rows] == [saved]
    client.optim_step(model)
    later = context.journal.requests.ready(model, 2)[1]
    context.journal.results.finish(
        [later.done(b"{}", "json").__class__(**{**vars(later.done(b"{}", "json")), "replays": True})]
    )
    pool.die()
    restored = await restore(context.bound_to(pool.generation), model, OPERATIONS)
    assert set(restored.copies) == {saved}
    assert {name: array.tobytes() for name, array in restored.copies[saved].weights.items()} == {
        name: array.tobytes() for name, array in weights.items()
    }
    pool.die()
    again = await restore(context.bound_to(pool.generation), model, OPERATIONS, detached={saved})
    assert again.copies == {}, "it is being written already"


async def test_restore_on_an_ended_group_raises_group_failed_error(context: Any, pool: Any, model: str) -> None:
    pool.die()
    with pytest.raises(GroupFailedError):
        await restore(context.bound_to(pool.generation - 1), model, OPERATIONS)


async def test_model_without_a_readable_snapshot_cannot_be_restored(
    context: Any, client: Any, pool: Any, execute: Any, model: str
) -> None:
    slots = Sequencer(model, context.saves)
    for seq_id in (4, 5):
        taken = await take_snapshot(context, model, seq_id, slots.slot())
        assert taken is not None
        context.store.delete(taken.path)
        client.optim_step(model)
        await execute(model)
    pool.die()
    with pytest.raises(ServerError, match="none of its snapshots can be read"):
        await restore(context.bound_to(pool.generation), model, OPERATIONS)


async def test_snapshot_of_other_programs_is_named(
    context: Any, pool: Any, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    taken = await take_snapshot(context, model, 4, Sequencer(model, context.saves).slot())
    assert taken is not None and context.store.find(taken.path).meta.programs == pool.info.programs != ""
    for now, named in ((pool.info.programs, False), ("0123456789abcdef", True)):
        pool.info = replace(pool.info, programs=now)
        pool.die()
        await restore(context.bound_to(pool.generation), model, OPERATIONS)
        lines = [line for line in caplog.messages if "was computed by the programs" in line]
        assert [now in line and "may differ in the last bits" in line for line in lines] == [True] * named
