"""Recovery snapshots in the store: committed like checkpoints, of a kind of their own that clients never see."""

from __future__ import annotations

import asyncio

from tinkerflow.backend.commands import AdapterState
from tinkerflow.backend.ids import new_id
from tinkerflow.backend.journal import SnapshotTaken
from tinkerflow.backend.store import RECOVERY, CheckpointMeta
from tinkerflow.tasks.execution.context import ExecutionContext


async def commit(
    context: ExecutionContext,
    model_id: str,
    owner: str,
    seq_id: int,
    state: AdapterState,
    snapshot_id: str | None = None,
) -> SnapshotTaken:
    """Write `state` in a thread, as the model after its request `seq_id`; the record for the journal.

    The name is new each time: an engine that was fenced off meanwhile cannot get in the way. snapshot_id: see
    SnapshotTaken. StoreError when the store fails.
    """
    name = new_id(f"seq-{seq_id}")
    meta = CheckpointMeta(
        base_model=context.card.name, owner=owner, request_id=snapshot_id or "", generation=context.pool.generation
    )
    saved = await asyncio.to_thread(context.store.save, model_id, RECOVERY, name, state, meta)
    return SnapshotTaken(saved.path, model_id, seq_id, saved.step, saved.size_bytes, snapshot_id)


async def record(context: ExecutionContext, taken: SnapshotTaken) -> bool:
    """Let the journal know of what was committed; False when it must not be used, and then it is deleted."""
    if await context.read(context.journal.recovery.snapshot_taken, taken):
        return True
    await asyncio.to_thread(context.store.delete, taken.path)
    return False
