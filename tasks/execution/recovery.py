"""How a model survives the worker group that holds it: snapshots in the background, and replay after the last one.

What must hold: the weights, gradients and moments after a recovery are those of an undisturbed run, bit for bit.

- The record. Every request becomes commands of its own (forward.py sends one Forward per request; batching.py only
  gives neighbours a common task run), and micro-batches are a pure function of the request, the settings and the size
  of the devices (backend/compute/packing.py and memory.py). So the journal's order of seq_id is all there is to record;
  see journal/history.py.
- Snapshots. After so many steps or seconds, and before a planned stop, the lane gives a slot to `take`: the export is
  a command in the model's line; encoding, writing and committing happen in a thread while the model trains on. The
  journal learns of it after the commit, and only when every request in it is answered: a request is either in the
  snapshot or executed again, never both. What came after the snapshot before the newest one stays in the journal, so a
  newest one that cannot be read costs a longer replay (restore.py).
- Saves. A save under a name steps aside when its state is copied (turns.py), and those behind it are answered while it
  is written. Until it is answered itself no snapshot that is past it is recorded, and so a replay passes its place in
  the line: there the state is copied again, and the save is begun anew with that.
- Loading. A load (create-via-load too) commits the state it loaded as a snapshot before it is answered, so no replay
  depends on a checkpoint that was deleted or overwritten since: one that begins before the load, because that snapshot
  cannot be read, takes the checkpoint only if it is the one of then.
- Samplers. An unnamed save is answered when it has published, and steps aside while that is stored. Until then no
  snapshot that is past it is recorded, and a replay passes its place: there the weights are copied again, and stored
  by the lane, which looks for such saves when it begins. (A model that somebody cancels in that moment is not replayed:
  if the engine dies too before the weights are written, they are lost.) An inflight one is stored before it is
  answered; named ones are in the store by nature. So samplers come back by themselves, when they are next used.
- Death. What was in flight is not answered (operation.py): its effects ended with the group. The lane waits until the
  next group serves, has restore.py make the model again, and takes from the journal again. All commands of a lane are
  bound to the group that the model was restored in; an older or newer one refuses them. A restarted engine does the
  same, from nothing.
- Failure. A model that cannot be restored is failed by name; the others never notice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tinkerflow.backend.commands import AdapterState, ExportAdapter
from tinkerflow.backend.errors import FencedError, GroupFailedError, TinkerflowError
from tinkerflow.backend.journal import AWAY, SnapshotTaken
from tinkerflow.tasks.execution.commit import commit, record
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
    """Take a snapshot of the model at this slot of its line. A failure is logged, and costs a longer replay."""
    began = context.clock.monotonic()
    try:
        try:
            async with slot:
                reply = context.send(ExportAdapter(model_id, optimizer=True), AdapterState)
            state = await reply
            await slot.to_answer()
        finally:
            await slot.end()
        model = await context.read(context.journal.models.get, model_id, None)
        taken = await commit(context, model_id, model.owner, seq_id, state)
        await slot.settled()
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
