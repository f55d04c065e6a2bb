"""The operations of one model overlap, but send their commands and are answered in the order of their sequence ids.

Saves are the exception. A save is detached once its state is copied and every earlier operation is answered. Later
operations are then answered while the save is written. A later save, a load, the end of the model and the record of a
recovery snapshot depend on the stored state, so they wait until the save has ended. The life of a save, from the copy
of its state to the store:

                  every earlier operation is             the store
                  answered: later ones go first          has it
        COPYING ────────────────────────────▶ STORING ──────────────▶ STORED
           │                                    ▲   │
           │ the worker group ended        tried│   │the store
           │ before the copy was there     again│   │failed
           ▼                                    │   ▼
         LOST: the next group copies          RETRYING ─────────────▶ FAILED
         it again, in a replay                           given up

- A save under a name is answered when it is STORED, in the same transaction as the checkpoint's row, or when it FAILED.
- An unnamed save (a snapshot to sample from) is answered while it is COPYING, as soon as its weights are published in
  the worker group. Samplers do not wait for the store, unless a save of the model is RETRYING: the save then fails if
  the store fails. An answered save is retried until it is STORED or no sampler uses it.
- An answered save that is not STORED keeps its entry, because its weights must stay in the worker group. After a
  restart, `Recovery.unstored` of the journal lists such saves, and they begin again at COPYING.
- A save that is STORING or RETRYING is detached, and no longer depends on the worker group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType

from tinkerflow.backend.core.errors import GroupFailedError

MOST_DETACHED = 4  # saves of one model that are written at the same time; each keeps a copy of the model in memory


# ------------------------------------------------------------------ the progress of saves
class SaveState(Enum):
    """The progress of a save. The module's docstring contains the diagram."""

    COPYING = "copying"
    STORING = "storing"
    RETRYING = "retrying"
    STORED = "stored"
    FAILED = "failed"
    LOST = "lost"


_DETACHED = (SaveState.STORING, SaveState.RETRYING)


@dataclass
class Save:
    """One save of a model. `number`: its place among the operations of the model."""

    request_id: str
    model_id: str
    number: int
    state: SaveState = SaveState.COPYING
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Saves:
    """The saves of all models of one base model that have not ended in the store."""

    def __init__(self) -> None:
        self._saves: dict[str, Save] = {}

    def begin(self, request_id: str, model_id: str, number: int) -> Save:
        """Note that a save was dispatched, perhaps again. Returns its entry."""
        save = self._saves[request_id] = Save(request_id, model_id, number)
        return save

    def end(self, save: Save, state: SaveState, *, answered: bool) -> None:
        """Note that the save ended. answered: its client has an answer, so the save is kept until it is stored."""
        save.state = state
        if self._saves.get(save.request_id) is save and (state is SaveState.STORED or not answered):
            del self._saves[save.request_id]
        save.ended.set()

    def forget(self, model_id: str) -> None:
        """Drop the saves of a model that is no longer served."""
        self._saves = {key: save for key, save in self._saves.items() if save.model_id != model_id}

    def is_unstored(self, request_id: str) -> bool:
        """Whether this is a save whose state is not in the store yet."""
        return request_id in self._saves

    def is_being_stored(self, request_id: str) -> bool:
        """Whether this save is detached, and reaches the store even if the worker group ends."""
        save = self._saves.get(request_id)
        return save is not None and save.state in _DETACHED

    def detached(self, model_id: str) -> list[Save]:
        """The model's detached saves, the oldest first."""
        saves = [save for save in self._saves.values() if save.model_id == model_id and save.state in _DETACHED]
        return sorted(saves, key=lambda save: save.number)

    def store_fails(self, model_id: str) -> bool:
        """Whether the store refused a save of the model that is now retried."""
        return any(save.state is SaveState.RETRYING for save in self.detached(model_id))

    def store_failed(self, request_id: str) -> None:
        """Note that the store refused a detached save, which is retried."""
        self._saves[request_id].state = SaveState.RETRYING

    def store_works(self, model_id: str) -> None:
        """Note that the store accepted a save of the model. It is expected to accept retried saves, too."""
        for save in self.detached(model_id):
            save.state = SaveState.STORING


# ------------------------------------------------------------------ the order of operations
@dataclass
class _Sequence:
    """Slots that follow each other. broken: a slot was interrupted, so no later slot may be answered."""

    broken: bool = False


class Sequencer:
    """Hands out the slots of one model, in order."""

    def __init__(self, model_id: str, saves: Saves) -> None:
        """Begin without slots. saves: the list that gets the model's saves."""
        self.model_id = model_id
        self.saves = saves
        self.sequence = _Sequence()
        self.last: Slot | None = None
        self._count = 0

    def slot(self, save_id: str | None = None) -> Slot:
        """Create the next slot. save_id: the id of the request, if it is a save."""
        self._count += 1
        self.last = Slot(self, self._count, self.last, save_id)
        return self.last

    def restart(self) -> None:
        """Start a new sequence after an interruption, when all slots except those of detached saves have ended."""
        self.last, self.sequence = None, _Sequence()


class Slot:
    """The place of one operation in the order of its model.

        async with slot:                    # every earlier operation has sent its commands
            reply = execution.send(command)
        ... await reply                     # meanwhile the next operation sends

    `await slot.predecessors()` waits until every earlier operation is answered or detached. `end()` always releases the
    later operations. `detach()` releases them before this save has ended.
    """

    def __init__(self, sequencer: Sequencer, number: int, after: Slot | None, save_id: str | None) -> None:
        """after: the slot before this one; None for the first slot."""
        self.sequencer = sequencer
        self.number = number
        self.save: Save | None = None
        if save_id is not None:
            self.save = sequencer.saves.begin(save_id, sequencer.model_id, number)
        self._sequence = sequencer.sequence
        self._after = after
        self._sent = asyncio.Event()
        self._answered = asyncio.Event()

    async def __aenter__(self) -> None:
        """Wait until every earlier operation has sent its commands."""
        if self._after is not None:
            await self._after._sent.wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the next operation send."""
        self._sent.set()

    def interrupt(self) -> None:
        """Note that the worker group ended before this operation was done, so no later operation may be answered."""
        self._sequence.broken = True

    @property
    def interrupted(self) -> bool:
        """Whether this operation or another one of its sequence was interrupted."""
        return self._sequence.broken

    @property
    def detached(self) -> bool:
        """Whether this is a detached save."""
        return self.save is not None and self.save.state in _DETACHED

    async def predecessors(self) -> None:
        """Wait until every earlier operation is answered or detached. GroupFailedError: one of them was interrupted.

        A detached save has already waited, and interruptions of other operations do not affect it.
        """
        if self._after is not None:
            await self._after._answered.wait()
        if self._sequence.broken and not self.detached:
            raise GroupFailedError("an earlier operation was interrupted")

    async def detach(self) -> None:
        """Release later operations after this save has sent all its commands. Waits while too many are detached."""
        assert self.save is not None, "only saves are detached"
        await self.predecessors()
        while len(detached := self._detached()) >= MOST_DETACHED:
            await detached[0].ended.wait()
        self.save.state = SaveState.STORING
        self._sent.set()
        self._answered.set()

    async def released(self) -> None:
        """Wait until this operation is answered or detached."""
        await self._answered.wait()

    async def earlier_saves(self) -> None:
        """Wait until every earlier save has ended, detached saves included. Call `predecessors` first."""
        for save in self._detached():
            if save.number < self.number:
                await save.ended.wait()

    async def end(self) -> None:
        """Release the later operations in order. This operation sends no more commands, and is answered or failed."""
        if self._after is not None:
            await self._after._sent.wait()
        self._sent.set()
        if self._after is not None:
            await self._after._answered.wait()
        self._answered.set()
        self._after = None  # otherwise an answered operation would keep all earlier slots in memory

    def _detached(self) -> list[Save]:
        return self.sequencer.saves.detached(self.sequencer.model_id)


async def replay_in_order(model_id: str, works: Sequence[Callable[[Slot], Awaitable[None]]]) -> None:
    """Execute operations again, each in its own slot, so that they overlap in the pool and keep their order.

    model_id: the adapter's model. works: each gets its slot and must end this slot. The first failure is raised after
    the other operations are cancelled. They neither detach saves nor wait for any.
    """
    sequencer = Sequencer(model_id, Saves())
    running = [asyncio.ensure_future(work(sequencer.slot())) for work in works]
    try:
        for task in running:
            await task
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
