"""The operations of one model overlap, but send their commands and are answered in the order of their sequence ids.

Saves are the exception. Once its state is copied and every earlier operation is answered, a save is detached: later
operations are answered while it is written. What depends on the stored state waits until the save has ended: a later
save, a load, the end of the model, the record of a recovery snapshot. The life of a save, from the copy of its state to
the store:

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
  the worker group: a sampler does not wait for the store. While a save of its model is RETRYING, it does wait, and
  fails with the store. It is tried again until it is STORED or no sampler uses it.
- An answered save that did not come to STORED keeps its entry: its weights must stay in the worker group. After a
  restart the journal knows such saves (`Recovery.unstored`), and they begin again at COPYING.
- A save that is STORING or RETRYING is detached: nothing that happens to the worker group touches it. Loads, later
  saves, the end of the model and the record of a recovery snapshot wait for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType

from tinkerflow.backend.core.errors import GroupFailedError

MOST_DETACHED = 4  # saves of one model that are written at once: each holds a copy of the model


# ------------------------------------------------------------------ how far each save is
class SaveState(Enum):
    """How far a save is; the module's docstring has the diagram."""

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
        """None yet."""
        self._saves: dict[str, Save] = {}

    def begin(self, request_id: str, model_id: str, number: int) -> Save:
        """A save was dispatched, perhaps again."""
        save = self._saves[request_id] = Save(request_id, model_id, number)
        return save

    def end(self, save: Save, state: SaveState, *, answered: bool) -> None:
        """The save ended. answered: its client holds an answer, so it must be kept until the store has its weights."""
        save.state = state
        if self._saves.get(save.request_id) is save and (state is SaveState.STORED or not answered):
            del self._saves[save.request_id]
        save.ended.set()

    def forget(self, model_id: str) -> None:
        """Nobody serves the model any more."""
        self._saves = {key: save for key, save in self._saves.items() if save.model_id != model_id}

    def is_unstored(self, request_id: str) -> bool:
        """Whether this is a save whose state the store does not have yet."""
        return request_id in self._saves

    def is_being_stored(self, request_id: str) -> bool:
        """Whether this save is on its way to the store, whatever becomes of the worker group."""
        save = self._saves.get(request_id)
        return save is not None and save.state in _DETACHED

    def detached(self, model_id: str) -> list[Save]:
        """The model's saves that are on their way to the store, and hold up nobody; the oldest first."""
        saves = [save for save in self._saves.values() if save.model_id == model_id and save.state in _DETACHED]
        return sorted(saves, key=lambda save: save.number)

    def store_fails(self, model_id: str) -> bool:
        """Whether the store refused a save of the model, which is tried again."""
        return any(save.state is SaveState.RETRYING for save in self.detached(model_id))

    def store_failed(self, request_id: str) -> None:
        """The store refused a detached save, which is tried again."""
        self._saves[request_id].state = SaveState.RETRYING

    def store_works(self, model_id: str) -> None:
        """The store took a save of the model: whatever is tried again is expected to be taken, too."""
        for save in self.detached(model_id):
            save.state = SaveState.STORING


# ------------------------------------------------------------------ whose turn it is
@dataclass
class _Line:
    """Slots that follow each other. broken: one of them was interrupted, so no later one may be answered."""

    broken: bool = False


class Sequencer:
    """Hands out the slots of one model, in order."""

    def __init__(self, model_id: str, saves: Saves) -> None:
        """No slot yet. saves: where the model's saves are listed."""
        self.model_id = model_id
        self.saves = saves
        self.line = _Line()
        self.last: Slot | None = None
        self._count = 0

    def slot(self, save_id: str | None = None) -> Slot:
        """The next slot. save_id: the id of the request, if it is a save."""
        self._count += 1
        self.last = Slot(self, self._count, self.last, save_id)
        return self.last

    def restart(self) -> None:
        """Begin anew after an interruption, when all slots have ended but those of detached saves."""
        self.last, self.line = None, _Line()


class Slot:
    """The place of one operation in the order of its model.

        async with slot:                    # every earlier operation has sent its commands
            reply = execution.send(command)
        ... await reply                     # meanwhile the next operation sends

    `await slot.predecessors()` waits until every earlier operation is answered or detached. `end()` lets the later ones
    go in any case; `detach()` lets them go although this save has not ended.
    """

    def __init__(self, sequencer: Sequencer, number: int, after: Slot | None, save_id: str | None) -> None:
        """The slot that follows `after`; None: the first one."""
        self.sequencer = sequencer
        self.number = number
        self.save: Save | None = None
        if save_id is not None:
            self.save = sequencer.saves.begin(save_id, sequencer.model_id, number)
        self._line = sequencer.line
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
        """The next operation may send."""
        self._sent.set()

    def interrupt(self) -> None:
        """The worker group ended before this operation: no later one may be answered."""
        self._line.broken = True

    @property
    def interrupted(self) -> bool:
        """Whether this operation or another one of its line was interrupted."""
        return self._line.broken

    @property
    def detached(self) -> bool:
        """Whether this is a save on its way to the store."""
        return self.save is not None and self.save.state in _DETACHED

    async def predecessors(self) -> None:
        """Wait until every earlier operation is answered or detached; GroupFailedError when one was interrupted.

        A detached save has waited already. What happens to the other operations does not touch it.
        """
        if self._after is not None:
            await self._after._answered.wait()
        if self._line.broken and not self.detached:
            raise GroupFailedError("an earlier operation was interrupted")

    async def detach(self) -> None:
        """Let later operations go first: the save has sent all its commands. Waits while too many are detached."""
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
        """After `predecessors`: wait until every earlier save has ended, the detached ones too."""
        for save in self._detached():
            if save.number < self.number:
                await save.ended.wait()

    async def end(self) -> None:
        """Nothing more will be sent or answered: let the later operations go, in order."""
        if self._after is not None:
            await self._after._sent.wait()
        self._sent.set()
        if self._after is not None:
            await self._after._answered.wait()
        self._answered.set()
        self._after = None  # an answered operation must not keep all before it in memory

    def _detached(self) -> list[Save]:
        return self.sequencer.saves.detached(self.sequencer.model_id)
