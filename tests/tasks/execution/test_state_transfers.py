"""Transfers of states, with commands or by processes that read and write their own parts, and recovery snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tinkerflow.backend.core.errors import GroupFailedError, StoreError
from tinkerflow.backend.journal import SnapshotTaken
from tinkerflow.backend.spec.checkpoint import RECOVERY
from tinkerflow.backend.spec.commands import (
    AdapterKept,
    AdapterState,
    ExportAdapter,
    FetchState,
    StoredState,
    WriteState,
)
from tinkerflow.backend.store import CheckpointMeta
from tinkerflow.tasks.execution.sequencer import Sequencer
from tinkerflow.tasks.execution.state_transfers import Copy, bring, take_snapshot


class ReachingPool:
    """A group whose processes reach the store. fails: the group ends during a write."""

    reaches_store = True

    def __init__(self, shape: AdapterState, *, fails: bool = False) -> None:
        self.shape, self.fails = shape, fails
        self.commands: list[Any] = []

    def submit(self, command: Any, owner: str = "", generation: int | None = None) -> Any:
        self.commands.append(command)
        return _Now(AdapterKept(self.shape.spec, self.shape.step, self.shape.optimizer))

    async def transfer(self, command: Any, *, generation: int | None = None) -> dict[str, Any]:
        self.commands.append(command)
        if self.fails:
            raise GroupFailedError("the group ended")
        return {}


class _Now:
    def __init__(self, reply: Any) -> None:
        self.reply = reply

    def __await__(self) -> Any:
        return self.reply
        yield


@pytest.fixture
async def model(client: Any, execute: Any) -> str:
    """A model after one step."""
    model, _ = client.submit_create()
    client.optim_step(model)
    await execute(model)
    return str(model)


@pytest.fixture
async def saved(context: Any, model: str) -> str:
    """The path of a recovery snapshot of the model."""
    taken = await take_snapshot(context, model, 1, Sequencer(model, context.saves).slot())
    assert taken is not None
    return str(taken.path)


async def test_a_group_that_does_not_reach_the_store_gets_the_whole_state(context: Any, saved: str) -> None:
    assert not context.pool.reaches_store
    state, _ = await bring(context, "adapter", saved)
    assert isinstance(state, AdapterState) and state.moments
    assert not (await bring(context, "adapter", saved, optimizer=False))[0].moments  # type: ignore[union-attr]


async def test_group_that_reaches_the_store_gets_names_and_reads_ahead(context: Any, saved: str) -> None:
    whole, _ = context.store.load(saved)
    pool = ReachingPool(whole)
    state, _ = await bring(replace(context, pool=pool), "adapter", saved)
    assert isinstance(state, StoredState) and state.spec == whole.spec and state.step == whole.step
    assert pool.commands == [FetchState("adapter", state)]
    assert set(context.store.stored(saved, optimizer=False)[0].files) < set(state.files)


async def test_copy_is_discarded_if_its_group_ends_during_the_write(context: Any, saved: str) -> None:
    whole, _ = context.store.load(saved)
    pool = ReachingPool(whole, fails=True)
    copy = Copy(replace(context, pool=pool), "model", "s1")
    with pytest.raises(GroupFailedError):
        await copy.commit(CheckpointMeta(base_model="m", owner="o"))
    export, write = pool.commands
    assert isinstance(export, ExportAdapter) and isinstance(write, WriteState) and export.keep == write.folder
    assert context.store.find(f"tinker://model/{RECOVERY}/s1") is None


async def test_a_snapshot_is_in_the_store_and_in_the_journal(context: Any, client: Any, pool: Any, model: str) -> None:
    taken = await take_snapshot(context, model, 1, Sequencer(model, context.saves).slot())
    assert isinstance(taken, SnapshotTaken) and (taken.model_id, taken.seq_id, taken.step) == (model, 1, 1)
    (view,) = client.journal.recovery.snapshots(model)
    assert view.path == taken.path
    state, _ = context.store.load(taken.path)
    adapter = pool.executor.adapters[model]
    assert {name: array.tobytes() for name, array in state.weights.items()} == {
        name: array.tobytes() for name, array in adapter.weights.items()
    }


async def test_failed_snapshot_only_lengthens_the_replay(
    context: Any, client: Any, pool: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequencer = Sequencer(model, context.saves)

    def full(*_: Any) -> None:
        raise StoreError("no space is left")

    with monkeypatch.context() as patch:
        patch.setattr(type(context.store), "save", full)
        assert await take_snapshot(context, model, 1, sequencer.slot()) is None
    pool.die()
    assert await take_snapshot(context.bound_to(1), model, 1, sequencer.slot()) is None
    assert client.journal.recovery.snapshots(model) == []
