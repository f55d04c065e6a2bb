"""The life of a save, from the copy of its state to the store. Whoever asks how far a save is asks here.

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
  saves, the end of the model and the record of a recovery snapshot wait for it (sequencer.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum


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
