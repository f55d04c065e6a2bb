"""Checkpoints that are over: marked in the journal first, so that nobody reads them; then their files go."""

from __future__ import annotations

import logging

from backend.errors import StoreError
from backend.journal import Journal
from backend.store import Store

log = logging.getLogger(__name__)


def delete_checkpoints(journal: Journal, store: Store) -> None:
    """Delete what has expired, and the files of all that is deleted, including what an earlier life left undone."""
    for path in journal.delete_expired_checkpoints():
        log.info("checkpoint %s expired", path)
    for path, attempt in journal.unpurged_checkpoints():
        try:
            store.delete(path, attempt)
        except StoreError:
            log.warning("checkpoint %s is deleted, but its files stay for now", path, exc_info=True)
        else:
            journal.checkpoint_purged(path, attempt)


def delete_snapshots(journal: Journal, store: Store) -> None:
    """Delete recovery snapshots that nothing needs any more: the files first, so that none is forgotten."""
    for path in journal.recovery.superfluous():
        try:
            store.delete(path)
        except StoreError:
            log.warning("recovery snapshot %s cannot be deleted now", path, exc_info=True)
        else:
            journal.recovery.forget_snapshot(path)
