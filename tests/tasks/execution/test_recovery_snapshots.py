"""How a recovery snapshot is taken."""

from __future__ import annotations

from typing import Any

import pytest

from tinkerflow.backend.errors import StoreError
from tinkerflow.backend.journal import SnapshotTaken
from tinkerflow.tasks.execution.recovery_snapshots import take
from tinkerflow.tasks.execution.sequencer import Sequencer


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
