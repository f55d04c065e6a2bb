"""Apply the journal's decisions to the store.

Delete the files of expired checkpoints, and write changed expiry and publication into `commit.json`. The journal comes
first: a checkpoint that is marked as deleted there cannot be read, whether or not its files are gone.
"""

from __future__ import annotations

import logging

from tinkerflow.backend.errors import StoreError
from tinkerflow.backend.journal import Journal, Retention
from tinkerflow.backend.peft_import import import_path
from tinkerflow.backend.store import Store

log = logging.getLogger(__name__)


def delete_checkpoints(journal: Journal, store: Store, keep: Retention) -> None:
    """Delete what has expired or is not kept, and the files of all that is deleted, an earlier life's too."""
    for path in journal.upkeep.delete_expired():
        log.info("checkpoint %s expired", path)
    for path in journal.upkeep.delete_retired(keep):
        log.info("checkpoint %s is not kept: %s", path, keep)
    for path, attempt in journal.upkeep.unpurged():
        try:
            store.delete(path, attempt)
        except StoreError:
            log.warning(
                "checkpoint %s is deleted, but its files cannot be removed now; the next sweep tries again",
                path,
                exc_info=True,
            )
        else:
            journal.upkeep.purged(path, attempt)


def note_changes(journal: Journal, store: Store) -> None:
    """Write into the commits what was decided of checkpoints after their save, so that the store alone knows it."""
    for seen in journal.upkeep.unnoted():
        try:
            store.amend(seen.path, seen.attempt, public=seen.public, expires_at=seen.expires_at)
        except StoreError:
            log.warning(
                "checkpoint %s: its commit cannot be changed now; the next sweep tries again", seen.path, exc_info=True
            )
        else:
            journal.upkeep.noted(seen)


def delete_snapshots(journal: Journal, store: Store) -> None:
    """Delete recovery snapshots that nothing needs any more: the files first, so that none is forgotten."""
    for path in journal.recovery.superfluous():
        try:
            store.delete(path)
        except StoreError:
            log.warning("recovery snapshot %s cannot be deleted now; the next sweep tries again", path, exc_info=True)
        else:
            journal.recovery.forget_snapshot(path)


def delete_uploads(journal: Journal, store: Store) -> None:
    """Remove what is left of uploads that are over. One that was committed without its rows is no checkpoint."""
    for upload in journal.uploads.over():
        try:
            store.remove_pieces(upload.id)
            if upload.path is None:
                store.delete(str(import_path(upload.id)))
        except StoreError:
            log.warning("upload %s cannot be removed now; the next sweep tries again", upload.id, exc_info=True)
        else:
            journal.uploads.forget(upload.id)
