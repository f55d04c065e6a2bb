"""Maintenance of a store: damage in committed checkpoints, and files that interrupted saves left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.spec.checkpoint import KINDS, RECOVERY, CheckpointPath, Saved
from tinkerflow.backend.store import commit
from tinkerflow.backend.store.blobs import Blobs
from tinkerflow.backend.store.failures import store_errors

ALL_KINDS = (*KINDS, RECOVERY)


@dataclass(frozen=True)
class Orphan:
    """Files of an attempt of `path` that no commit names. written_at: when the newest file was written."""

    path: str
    attempt: str
    written_at: datetime


@dataclass(frozen=True)
class Snapshot:
    """A recovery snapshot of a run. written_at: when the newest object in its folder was written."""

    path: str
    run_id: str
    written_at: datetime


class StoreUpkeep:
    """Finds damage and leftovers in a store, and removes leftovers. StoreError: the store fails."""

    def __init__(self, url: str, blobs: Blobs) -> None:
        """blobs: contain the checkpoints. url: identifies the store in messages."""
        self._url, self._blobs = url, blobs

    def paths(self, run_id: str | None = None) -> list[str]:
        """The paths of all begun saves, including recovery snapshots. Some of them have no commit."""
        with store_errors(self._url, "list paths"):
            return [str(path) for path in commit.paths(self._blobs, run_id, ALL_KINDS)]

    def problems(self, path: str) -> list[str]:
        """Read the commit of `path` and all its files. Returns a sentence for each damaged, missing or foreign file.

        A path without a commit has no problems. A concurrent save or deletion is not mistaken for damage.
        """
        where = CheckpointPath.parse(path)
        with store_errors(self._url, f"verify {where}"):
            while True:
                try:
                    saved = commit.find_commit(self._blobs, where)
                    if saved is None:
                        return []
                    problems = list(_problems_of(self._blobs, where, saved))
                    after = commit.find_commit(self._blobs, where) if problems else saved
                except StoreError as error:
                    return [error.message]
                if after is not None and after.attempt == saved.attempt:
                    return problems

    def orphans(self, before: datetime) -> list[Orphan]:
        """Attempts that no commit names, and whose files were all written before `before`.

        A save is an orphan until its commit is written, so `before` must be earlier than the start of any running
        save. Attempts next to an unreadable commit are skipped, because the commit may name one of them.
        """
        with store_errors(self._url, "look for orphans"):
            return list(_orphans(self._blobs, before))

    def remove_orphan(self, orphan: Orphan) -> bool:
        """Remove the files of an orphan. Returns False if it was committed meanwhile."""
        path = CheckpointPath.parse(orphan.path)
        with store_errors(self._url, f"remove attempt {orphan.attempt} of {orphan.path}"):
            saved = commit.find_commit(self._blobs, path)
            if saved is not None and saved.attempt == orphan.attempt:
                return False
            self._blobs.remove_folder(path.attempt(orphan.attempt))
            return True

    def snapshots(self, before: datetime) -> list[Snapshot]:
        """Recovery snapshots committed before `before`, including damaged ones."""
        snapshots = []
        with store_errors(self._url, "look for recovery snapshots"):
            for path in commit.paths(self._blobs, kinds=(RECOVERY,)):
                if path.commit.rpartition("/")[2] not in self._blobs.children(path.folder):
                    continue  # an attempt without a commit is an orphan
                written_at = self._blobs.written_at(path.folder)
                if written_at is not None and written_at < before:
                    snapshots.append(Snapshot(str(path), path.run_id, written_at))
        return snapshots

    def clear_drafts(self, before: datetime) -> int:
        """Remove unfinished files whose writers died before `before`. Returns their number."""
        with store_errors(self._url, "clear drafts"):
            paths = commit.paths(self._blobs, kinds=ALL_KINDS)
            return sum(self._blobs.clear_drafts(path.folder, before) for path in paths)


def _problems_of(blobs: Blobs, path: CheckpointPath, saved: Saved) -> Iterator[str]:
    for file in saved.files:
        try:
            commit.read_file(blobs, path, saved, file)
        except StoreError as error:
            yield error.message
        except FileNotFoundError:
            yield f"checkpoint {path}: {file} of attempt {saved.attempt} is missing"
    for file in blobs.children(path.attempt(saved.attempt)):
        if file not in saved.files:
            yield f"checkpoint {path}: {file} of attempt {saved.attempt} is foreign: the commit does not name it"


def _orphans(blobs: Blobs, before: datetime) -> Iterator[Orphan]:
    for path in commit.paths(blobs, kinds=ALL_KINDS):
        attempts = [name for name in blobs.children(path.folder) if name.startswith("attempt-")]
        try:
            saved = commit.find_commit(blobs, path) if attempts else None
        except StoreError:
            continue
        for attempt in attempts:
            if saved is None or attempt != saved.attempt:
                written_at = blobs.written_at(path.attempt(attempt))
                if written_at is not None and written_at < before:
                    yield Orphan(str(path), attempt, written_at)
