"""The commit protocol: files are written under a new attempt, then the commit object makes them a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from tinkerflow.backend.core.errors import ConflictError, StoreError
from tinkerflow.backend.spec.checkpoint import CheckpointMeta, CheckpointPath, Saved
from tinkerflow.backend.store import commit
from tinkerflow.backend.store.blobs import Blobs, find, put

_log = logging.getLogger(__name__)


class CommitWriter:
    """Writes the files and commit objects of checkpoints. Methods raise OSError if the store fails."""

    def __init__(self, url: str, blobs: Blobs) -> None:
        """blobs: to write to. url: identifies the store in log lines."""
        self._url, self._blobs = url, blobs

    def save(
        self,
        path: CheckpointPath,
        meta: CheckpointMeta,
        make: Callable[[], tuple[Saved, Mapping[str, bytes]]],
        *,
        overwrite: bool,
    ) -> Saved:
        """Write the files of a checkpoint in parallel and commit them, unless the request of `meta` has saved it.

        make: makes the commit and the files; called only if they are needed. overwrite: replace the commit that exists
        now. A commit that appears meanwhile is kept, because another engine has taken over and saved later. Errors: see
        `commit_files`.
        """
        before = commit.find_commit(self._blobs, path)
        if before is not None and (_is_same_request(before, meta) or not overwrite):
            return _same_or_conflict(before, meta)
        saved, files = make()
        folder = path.attempt(saved.attempt)
        try:
            with ThreadPoolExecutor(len(files), thread_name_prefix="store") as threads:
                writes = [threads.submit(self._blobs.create, f"{folder}/{file}", data) for file, data in files.items()]
                for write in writes:
                    write.result()
        except BaseException:
            self._discard_unless_committed(path, saved)
            raise
        return self.commit_files(path, saved, replaces="" if before is None else before.attempt)

    def commit_files(self, path: CheckpointPath, saved: Saved, *, replaces: str = "") -> Saved:
        """Commit files that were written. Returns `saved`, or the earlier commit of the same request.

        replaces: the attempt whose commit may be replaced. StoreError: a file does not have the size in its digest.
        ConflictError: there is a commit of another attempt. A failure removes the files, unless it came after the
        commit.
        """
        try:
            for file, digest in saved.files.items():
                size = self._blobs.size(f"{path.attempt(saved.attempt)}/{file}")
                if size != digest.size:
                    raise StoreError(f"checkpoint {path}: {file} has {size} bytes after writing {digest.size}")
            return self._publish(path, saved, replaces)
        except BaseException:
            self._discard_unless_committed(path, saved)
            raise

    def delete(self, path: CheckpointPath, attempt: str) -> bool:
        """Remove a commit, then its files; see `Store.delete`. attempt: the only attempt to remove; "": any."""
        found, of = False, attempt
        # Remove the commit only if it still has these bytes, because another process may have replaced or amended it.
        while not found and (data := find(self._blobs, path.commit)) is not None:
            try:
                saved = commit.from_json(data, path)
            except StoreError as error:
                _log.warning("deleted although it cannot be read: %s", error)
            else:
                if attempt not in ("", saved.attempt):
                    break
                of = saved.attempt
            found = self._blobs.remove(path.commit, data)
        if of:
            self._blobs.remove_folder(path.attempt(of))
        return found

    def replace_commit(self, path: CheckpointPath, old: bytes | None, new: bytes) -> bool:
        """Create a commit (`old` None), or replace it. False: there is another one. A truncated commit is undone."""
        try:
            done = put(self._blobs, path.commit, old, new)
        except OSError:
            self._undo_truncated(path, old, new)
            raise
        if done and self._undo_truncated(path, old, new):
            raise OSError(f"{path.commit} was truncated while it was written")
        return done

    def remove_leftovers(self, prefix: str) -> None:
        """Remove files that no commit names. A failure is only logged, because such files only cost space."""
        try:
            self._blobs.remove_folder(prefix)
        except OSError as error:
            _log.warning("store %s: %s is left behind: %s", self._url, prefix, error)

    def _publish(self, path: CheckpointPath, saved: Saved, replaces: str) -> Saved:
        """Write the commit. Replace an existing commit only if it names the attempt `replaces`."""
        data = commit.to_json(saved)
        while True:
            if self.replace_commit(path, None, data):
                return saved
            existing = find(self._blobs, path.commit)
            if existing is None:
                continue  # it was deleted meanwhile
            before = commit.from_json(existing, path)
            if before.attempt != replaces:
                self.remove_leftovers(path.attempt(saved.attempt))
                return _same_or_conflict(before, saved.meta)
            if self.replace_commit(path, existing, data):
                self.remove_leftovers(path.attempt(before.attempt))
                return saved

    def _undo_truncated(self, path: CheckpointPath, old: bytes | None, new: bytes) -> bool:
        """If only the first bytes of `new` were stored, restore the previous bytes. Returns whether it did so."""
        stored = find(self._blobs, path.commit)
        if stored is None or stored == new or not new.startswith(stored):
            return False
        if old is None:
            return self._blobs.remove(path.commit, stored)
        return self._blobs.replace(path.commit, stored, old)

    def _discard_unless_committed(self, path: CheckpointPath, saved: Saved) -> None:
        """Remove the files of a failed save, unless it failed after the commit, which needs the files."""
        try:
            committed = commit.find_commit(self._blobs, path)
        except (OSError, StoreError) as error:
            _log.warning("attempt %s of %s is left behind: %s", saved.attempt, path, error)
            return
        if committed is None or committed.attempt != saved.attempt:
            self.remove_leftovers(path.attempt(saved.attempt))


def _is_same_request(saved: Saved, meta: CheckpointMeta) -> bool:
    return meta.request_id != "" and saved.meta.request_id == meta.request_id


def _same_or_conflict(saved: Saved, meta: CheckpointMeta) -> Saved:
    if _is_same_request(saved, meta):
        return saved
    # Clients can overwrite only saved states.
    remedy = "save with overwrite" if CheckpointPath.parse(saved.path).kind == "weights" else "delete it first"
    raise ConflictError(f"checkpoint {saved.path} exists already; choose another name, or {remedy}")
