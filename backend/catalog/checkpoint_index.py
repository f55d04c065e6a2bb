"""The journal's rows of checkpoints are made again from the store's commits, when they are lost."""

from __future__ import annotations

from dataclasses import dataclass

from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.journal import CheckpointSaved, Journal
from tinkerflow.backend.store import RECOVERY, CheckpointPath, Store


@dataclass(frozen=True)
class Rebuilt:
    """What became of the checkpoints in a store. damaged: sentences that name those whose commit cannot be read."""

    restored: tuple[str, ...]
    known: int
    damaged: tuple[str, ...]


def rebuild(journal: Journal, store: Store) -> Rebuilt:
    """Make the journal know every checkpoint that is committed in the store; what it knows already stays as it is.

    Repeated after a crash it goes on. Recovery snapshots are left out: without the requests since, nothing can be
    continued from them.
    """
    restored, known, damaged = [], 0, []
    for path in store.upkeep.paths():
        if CheckpointPath.parse(path).kind == RECOVERY:
            continue
        try:
            saved = store.find(path)
        except StoreError as error:
            damaged.append(error.message)
            continue
        if saved is None:
            continue
        if journal.imports.restore(CheckpointSaved.of(saved), saved.meta.public, saved.meta.run_metadata):
            restored.append(path)
        else:
            known += 1
    return Rebuilt(tuple(restored), known, tuple(damaged))
