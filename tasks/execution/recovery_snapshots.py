"""Recovery snapshots of a model: how one is taken, and how the journal learns of it (flows/runner.py says when).

They are committed like checkpoints, of a kind of their own that clients never see. `execution/__init__.py` says what
they are for.
"""

from __future__ import annotations

import asyncio
import logging

from tinkerflow.backend.commands import AdapterState
from tinkerflow.backend.errors import FencedError, GroupFailedError, TinkerflowError
from tinkerflow.backend.ids import new_id
from tinkerflow.backend.journal import AWAY, SnapshotTaken
from tinkerflow.backend.store import RECOVERY, CheckpointMeta
from tinkerflow.tasks.execution.context import ExecutionContext
from tinkerflow.tasks.execution.sequencer import Slot
from tinkerflow.tasks.execution.states import Copy

log = logging.getLogger(__name__)


async def take(context: ExecutionContext, model_id: str, seq_id: int, slot: Slot) -> SnapshotTaken | None:
    """Take a snapshot of the model at this slot. A failure is logged, and costs a longer replay."""
    began = context.clock.monotonic()
    try:
        try:
            async with slot:
                copy = Copy(context, model_id, new_id(f"seq-{seq_id}"))
            await copy.copied
            await slot.predecessors()
        finally:
            await slot.end()
        model = await context.read(context.journal.models.get, model_id, None)
        saved = await copy.commit(_meta(context, model.owner))
        taken = SnapshotTaken(saved.path, model_id, seq_id, saved.step, saved.size_bytes, None)
        await slot.earlier_saves()
        if not await record(context, taken):
            return None
        log.info(
            "snapshot of model %s at request %d: %.1f MiB, in %.2f s",
            model_id,
            seq_id,
            taken.size_bytes / 2**20,
            context.clock.monotonic() - began,
        )
        return taken
    except (GroupFailedError, FencedError) as error:
        log.info("no snapshot of model %s: %s", model_id, error)
    except (TinkerflowError, *AWAY):
        log.warning("no snapshot of model %s at request %d", model_id, seq_id, exc_info=True)
    return None


async def commit(
    context: ExecutionContext,
    model_id: str,
    owner: str,
    seq_id: int,
    state: AdapterState,
    snapshot_id: str | None = None,
) -> SnapshotTaken:
    """Write `state` in a thread, as the model after its request `seq_id`; the record for the journal.

    The name is new each time: an engine that was fenced off meanwhile cannot get in the way. context: the engine's
    parts. model_id, owner: of the model. snapshot_id: see SnapshotTaken. StoreError when the store fails.
    """
    name, meta = new_id(f"seq-{seq_id}"), _meta(context, owner, snapshot_id or "")
    saved = await asyncio.to_thread(context.store.save, model_id, RECOVERY, name, state, meta)
    return SnapshotTaken(saved.path, model_id, seq_id, saved.step, saved.size_bytes, snapshot_id)


def _meta(context: ExecutionContext, owner: str, request_id: str = "") -> CheckpointMeta:
    return CheckpointMeta(
        base_model=context.card.name, owner=owner, request_id=request_id, generation=context.pool.generation
    )


async def record(context: ExecutionContext, taken: SnapshotTaken) -> bool:
    """Let the journal know of what was committed; False when it must not be used, and then it is deleted."""
    if await context.read(context.journal.recovery.snapshot_taken, taken):
        return True
    await asyncio.to_thread(context.store.delete, taken.path)
    return False
