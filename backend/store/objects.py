"""Objects in an fsspec file system that writes objects atomically, as object stores do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

from fsspec import AbstractFileSystem

# A process has one fsspec memory file system. It checks before it writes, and lists a dict that threads may change.
MEMORY_LOCK = threading.Lock()


class ObjectBlobs:
    """`Blobs` in an fsspec file system whose `pipe_file(mode="create")` fails if the object exists."""

    def __init__(
        self, filesystem: AbstractFileSystem, root: str, *, guard: Callable[[str], AbstractContextManager[Any]]
    ) -> None:
        """Objects below `root`. guard: a context for all uses of the file system: a lock, or translation of errors."""
        self._fs = filesystem
        self._guard = guard
        self._root = root.rstrip("/")

    def expect(self, mark: str) -> None:
        """Do nothing: a bucket that is away has no empty folder in its place."""

    def create(self, key: str, data: bytes) -> None:
        """Write a new object. FileExistsError: the object exists with other bytes.

        An object with equal bytes counts as our own: if a response is lost, the retry finds the object from the first
        try. A caller that must be the only creator puts something unique into `data`.
        """
        try:
            with self._guard(key):
                self._fs.pipe_file(self._path(key), data, mode="create")
        except FileExistsError:
            if self.read(key) != data:
                raise

    def replace(self, key: str, old: bytes, new: bytes) -> bool:
        with self._guard(key):
            if not self._holds(key, old):
                return False
            self._fs.pipe_file(self._path(key), new, mode="overwrite")
            return True

    def read(self, key: str) -> bytes:
        with self._guard(key):
            return bytes(self._fs.cat_file(self._path(key)))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with self._guard(key):
            return bytes(self._fs.cat_file(self._path(key), start=start, end=start + length))

    def signed_url(self, key: str, seconds: int) -> str | None:
        """None, because these objects have no URLs. The API serves them."""
        return None

    def size(self, key: str) -> int:
        with self._guard(key):
            return int(self._fs.info(self._path(key))["size"])

    def remove(self, key: str, old: bytes | None = None) -> bool:
        try:
            with self._guard(key):
                if old is not None and not self._holds(key, old):
                    return False
                self._fs.rm_file(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def remove_folder(self, prefix: str) -> None:
        """Remove the objects directly below `prefix`, one by one."""
        for name in self.children(prefix):
            self.remove(f"{prefix}/{name}")

    def clear_drafts(self, prefix: str, before: datetime) -> int:
        """Return 0: objects are written in one step, so there are no drafts."""
        return 0

    def children(self, prefix: str) -> list[str]:
        try:
            with self._guard(prefix):
                paths = self._fs.ls(self._path(prefix), detail=False)
        except FileNotFoundError:
            return []
        own = self._path(prefix).strip("/")  # fsspec lists an object, and on some stores a folder, as its own child
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in paths if path.strip("/") != own)

    def written_at(self, prefix: str) -> datetime | None:
        times = []
        for name in self.children(prefix):
            try:
                with self._guard(prefix):
                    times.append(self._fs.modified(self._path(f"{prefix}/{name}")))
            except FileNotFoundError:
                continue  # removed since it was listed
        return max(times).astimezone(UTC) if times else None

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return bytes(self._fs.cat_file(self._path(key))) == data
        except FileNotFoundError:
            return False

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"
