"""Recovery snapshots of a model: when one is due, how it is taken, and how the journal learns of it.

They are committed like checkpoints, of a kind of their own that clients never see. `execution/__init__.py` says what
they are for.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from tinkerflow.backend.commands import AdapterState, ExportAdapter
from tinkerflow.backend.errors import FencedError, GroupFailedError, TinkerflowError
from tinkerflow.backend.ids import new_id
from tinkerflow.backend.journal import AWAY, SnapshotTaken
from tinkerflow.backend.store import RECOVERY, CheckpointMeta
from tinkerflow.tasks.execution.context import ExecutionContext
from tinkerflow.tasks.execution.sequencer import Slot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SnapshotPolicy:
    """When a model's snapshot is due: after `steps` optimizer steps or `seconds` since the last one, if it changed."""

    steps: int = 50
    seconds: float = 60.0


class SnapshotSchedule:
    """How far a model has come since its last snapshot."""

    def __init__(self, policy: SnapshotPolicy, now: float) -> None:
        """Nothing has happened; `now` is monotonic."""
        self._policy = policy
        self._since = now
        self._steps = 0
        self._last = -1  # the last request that the model in the group has seen
        self.seq_id: int | None = None  # the last request that was dispatched, if none of the snapshots covers it
        self.taking = False

    def went(self, seq_id: int, *, step: bool) -> None:
        """A request was dispatched; a save whose place in the line a replay has passed comes after later ones."""
        self.seq_id = self._last = max(seq_id, self._last)
        self._steps += step

    def interrupted(self) -> None:
        """Some of what was dispatched was not executed."""
        self.seq_id, self._last = None, -1

    def restored(self, replayed: int, last: int) -> None:
        """So many steps were replayed after the last snapshot: they count, lest deaths in a row replay ever more.

        last: the last request that was replayed.
        """
        self._steps, self._last = replayed, last

    def due(self, now: float) -> bool:
        """Whether a snapshot should be taken now."""
        late = self._steps >= self._policy.steps or now - self._since >= self._policy.seconds
        return late and not self.taking and self.seq_id is not None

    def begin(self, now: float) -> int:
        """A snapshot is being taken; the last request in it."""
        assert self.seq_id is not None
        seq_id, self.seq_id = self.seq_id, None
        self._since, self._steps, self.taking = now, 0, True
        return seq_id


async def take(context: ExecutionContext, model_id: str, seq_id: int, slot: Slot) -> SnapshotTaken | None:
    """Take a snapshot of the model at this slot. A failure is logged, and costs a longer replay."""
    began = context.clock.monotonic()
    try:
        try:
            async with slot:
                reply = context.send(ExportAdapter(model_id, optimizer=True), AdapterState)
            state = await reply
            await slot.predecessors()
        finally:
            await slot.end()
        model = await context.read(context.journal.models.get, model_id, None)
        taken = await commit(context, model_id, model.owner, seq_id, state)
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
