"""When a recovery snapshot is due, and how it is taken."""

from __future__ import annotations

from typing import Any

import pytest

from tinkerflow.backend.errors import StoreError
from tinkerflow.backend.journal import SnapshotTaken
from tinkerflow.tasks.execution.recovery_snapshots import SnapshotPolicy, SnapshotSchedule, take
from tinkerflow.tasks.execution.sequencer import Sequencer


def test_a_snapshot_is_due_after_so_many_steps_or_seconds_if_the_model_changed() -> None:
    schedule = SnapshotSchedule(SnapshotPolicy(steps=2, seconds=60.0), now=0.0)
    assert not schedule.due(1000.0), "nothing happened"
    schedule.went(0, step=False)
    assert schedule.due(60.0) and not schedule.due(59.0)
    schedule.went(1, step=True)
    schedule.went(2, step=True)
    assert schedule.due(1.0)
    assert schedule.begin(1.0) == 2
    schedule.went(3, step=True)
    assert not schedule.due(1000.0), "one is being taken"
    schedule.taking = False
    assert schedule.due(61.0) and not schedule.due(60.0)


def test_what_was_interrupted_is_in_no_snapshot_and_replayed_steps_count() -> None:
    schedule = SnapshotSchedule(SnapshotPolicy(steps=3, seconds=1000.0), now=0.0)
    schedule.went(5, step=True)
    schedule.interrupted()
    assert schedule.seq_id is None and not schedule.due(2000.0)
    schedule.restored(2, 4)
    schedule.went(3, step=True)  # a save whose place the replay has passed
    assert schedule.due(0.0) and schedule.begin(0.0) == 4


@pytest.fixture
async def model(client: Any, execute: Any) -> str:
    """A model after one step."""
    model, _ = client.submit_create()
    client.optim_step(model)
    await execute(model)
    return str(model)


async def test_a_snapshot_is_in_the_store_and_in_the_journal(context: Any, client: Any, pool: Any, model: str) -> None:
    taken = await take(context, model, 1, Sequencer(model, context.saves).slot())
    assert isinstance(taken, SnapshotTaken) and (taken.model_id, taken.seq_id, taken.step) == (model, 1, 1)
    (view,) = client.journal.recovery.snapshots(model)
    assert view.path == taken.path
    state, _ = context.store.load(taken.path)
    adapter = pool.executor.adapters[model]
    assert {name: array.tobytes() for name, array in state.weights.items()} == {
        name: array.tobytes() for name, array in adapter.weights.items()
    }


async def test_a_snapshot_that_fails_costs_a_longer_replay_and_nothing_else(
    context: Any, client: Any, pool: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequencer = Sequencer(model, context.saves)

    def full(*_: Any) -> None:
        raise StoreError("no space is left")

    with monkeypatch.context() as patch:
        patch.setattr(type(context.store), "save", full)
        assert await take(context, model, 1, sequencer.slot()) is None
    pool.die()
    assert await take(context.bound_to(1), model, 1, sequencer.slot()) is None
    assert client.journal.recovery.snapshots(model) == []
