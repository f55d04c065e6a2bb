"""Rebuilds lost rows of checkpoints in the journal from the store's commits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.core.ids import LOCAL_OWNER
from tinkerflow.backend.journal import CheckpointSaved, Journal
from tinkerflow.backend.store import RECOVERY, CheckpointPath, Store


@dataclass(frozen=True)
class Rebuilt:
    """The result of a rebuild. damaged: sentences that name the checkpoints with unreadable commits."""

    restored: tuple[str, ...]
    known: int
    damaged: tuple[str, ...]


def rebuild(journal: Journal, store: Store, project: str = LOCAL_OWNER) -> Rebuilt:
    """Insert rows for all committed checkpoints in the store. Existing rows do not change.

    Repeating the call after a crash continues the work. A running service may save meanwhile. Recovery snapshots are
    skipped, because they are useless without the later requests.

    project: the owner of the checkpoints that were saved without a key.
    """
    restored, known, damaged = [], 0, []
    for path in store.upkeep.paths():
        if CheckpointPath.parse(path).kind == RECOVERY:
            continue
        before = journal.imports.attempt_of(path)
        try:
            saved = store.find(path)
        except StoreError as error:
            damaged.append(error.message)
            continue
        if saved is None:
            continue
        row = CheckpointSaved.of(saved)
        row = replace(row, owner=project) if row.owner == LOCAL_OWNER else row
        if journal.imports.restore(row, saved.meta.public, saved.meta.run_metadata, before):
            restored.append(path)
        else:
            known += 1
    return Rebuilt(tuple(restored), known, tuple(damaged))
