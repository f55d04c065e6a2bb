"""Looking after a store: damage in committed checkpoints, and files that interrupted saves left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.spec.checkpoint import KINDS, RECOVERY, CheckpointPath
from tinkerflow.backend.store import commit
from tinkerflow.backend.store.blobs import Blobs

ALL_KINDS = (*KINDS, RECOVERY)


@dataclass(frozen=True)
class Orphan:
    """Files of an attempt of `path` that no commit names. written_at: of the newest file."""

    path: str
    attempt: str
    written_at: datetime


@dataclass(frozen=True)
class Snapshot:
    """A recovery snapshot of a run. written_at: when anything was last written beside its commit."""

    path: str
    run_id: str
    written_at: datetime


def problems(blobs: Blobs, path: CheckpointPath) -> list[str]:
    """Read the commit of `path` and all of its files; a sentence for each that is damaged, missing or foreign.

    A path without a commit has no problems. A save or deletion that happens meanwhile is not mistaken for damage.
    """
    try:
        saved = commit.find(blobs, path)
    except StoreError as error:
        return [error.message]
    if saved is None:
        return []
    found = []
    for file in saved.files:
        try:
            commit.file_of(blobs, path, saved, file)
        except StoreError as error:
            found.append(error.message)
        except FileNotFoundError:
            found.append(f"checkpoint {path}: {file} of attempt {saved.attempt} is missing")
    attempt = path.attempt(saved.attempt)
    found += [
        f"checkpoint {path}: {file} of attempt {saved.attempt} is foreign: the commit does not name it"
        for file in blobs.children(attempt)
        if file not in saved.files
    ]
    if not found:
        return []
    try:
        now = commit.find(blobs, path)
    except StoreError as error:
        return [error.message]
    if now is not None and now.attempt == saved.attempt:
        return found
    return problems(blobs, path)


def orphans(blobs: Blobs, before: datetime) -> Iterator[Orphan]:
    """Attempts that no commit names, and into which nothing was written since `before`.

    A save is an orphan until its commit is written, so `before` must be longer ago than any save takes. Attempts beside
    an unreadable commit are left alone: the commit may name one of them.
    """
    for path in commit.paths(blobs, kinds=ALL_KINDS):
        attempts = [name for name in blobs.children(path.folder) if name.startswith("attempt-")]
        if not attempts:
            continue
        try:
            saved = commit.find(blobs, path)
        except StoreError:
            continue
        for attempt in attempts:
            if saved is not None and attempt == saved.attempt:
                continue
            written_at = blobs.written_at(path.attempt(attempt))
            if written_at is not None and written_at < before:
                yield Orphan(str(path), attempt, written_at)


def snapshots(blobs: Blobs, before: datetime) -> Iterator[Snapshot]:
    """Recovery snapshots that were committed before `before`, damaged ones included."""
    for path in commit.paths(blobs, kinds=(RECOVERY,)):
        if path.commit.rpartition("/")[2] not in blobs.children(path.folder):
            continue  # an attempt without a commit is an orphan
        written_at = blobs.written_at(path.folder)
        if written_at is not None and written_at < before:
            yield Snapshot(str(path), path.run_id, written_at)


def remove(blobs: Blobs, orphan: Orphan) -> bool:
    """Remove the files of an orphan; False when a commit names its attempt by now."""
    path = CheckpointPath.parse(orphan.path)
    saved = commit.find(blobs, path)
    if saved is not None and saved.attempt == orphan.attempt:
        return False
    blobs.remove_folder(path.attempt(orphan.attempt))
    return True
