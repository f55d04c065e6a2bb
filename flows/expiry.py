"""Apply the journal's decisions to the store.

Delete the files of expired checkpoints, and write changed expiry and publication into `commit.json`. The journal comes
first: a checkpoint that is marked as deleted there cannot be read, whether or not its files are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tinkerflow.backend.catalog.peft_import import import_path
from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.journal import Journal, Retention
from tinkerflow.backend.store import Store

log = logging.getLogger(__name__)


def delete_checkpoints(journal: Journal, store: Store, keep: Retention) -> None:
    """Delete what has expired or is not kept, and the files of all that is deleted, an earlier life's too."""
    for path in journal.upkeep.delete_expired():
        log.info("checkpoint %s expired", path)
    for path in journal.upkeep.delete_retired(keep):
        log.info("checkpoint %s is not kept: %s", path, keep)
    for path, attempt in journal.upkeep.unpurged():
        with _tried_again(f"checkpoint {path} is deleted, but its files cannot be removed now"):
            store.delete(path, attempt)
            journal.upkeep.purged(path, attempt)


def note_changes(journal: Journal, store: Store) -> None:
    """Write into the commits what was decided of checkpoints after their save, so that the store alone knows it."""
    for seen in journal.upkeep.unnoted():
        with _tried_again(f"checkpoint {seen.path}: its commit cannot be changed now"):
            store.amend(seen.path, seen.attempt, public=seen.public, expires_at=seen.expires_at)
            journal.upkeep.noted(seen)


def delete_snapshots(journal: Journal, store: Store) -> None:
    """Delete recovery snapshots that nothing needs any more: the files first, so that none is forgotten."""
    for path in journal.recovery.superfluous():
        with _tried_again(f"recovery snapshot {path} cannot be deleted now"):
            store.delete(path)
            journal.recovery.forget_snapshot(path)


def delete_uploads(journal: Journal, store: Store) -> None:
    """Remove what is left of uploads that are over. One that was committed without its rows is no checkpoint."""
    for upload in journal.uploads.over():
        with _tried_again(f"upload {upload.id} cannot be removed now"):
            store.remove_pieces(upload.id)
            if upload.path is None:
                store.delete(str(import_path(upload.id)))
            journal.uploads.forget(upload.id)


@contextmanager
def _tried_again(failed: str) -> Iterator[None]:
    """Inside, the store is changed, and then the journal. When the store fails, the log says what `failed`."""
    try:
        yield
    except StoreError:
        log.warning("%s; the next sweep tries again", failed, exc_info=True)
