"""Objects as files that survive a power cut: written as a draft, flushed, then linked or renamed into place.

The folder of a disk that is not mounted exists, but is empty. Before a file is written, and before it counts as
missing, the mark of the folder is therefore compared with the mark that was read before.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from tinkerflow.backend.core.disk import flush, locked, make_folder, make_private, open_private

MARK = "store-id"  # an object with a random text, which distinguishes folders with the same URL


class LocalBlobs:
    """`Blobs` in a folder. Files whose names begin with '.' are drafts: no method reads or lists them."""

    def __init__(self, root: Path) -> None:
        """Objects below the folder `root`, which only the owner can read. The first write creates it."""
        self._root = root
        self._mark: str | None = None
        make_private(root)

    def expect(self, mark: str) -> None:
        """Fail from now on while the folder does not have this mark. By default, the first mark that is found counts.

        OSError: an earlier mark differs.
        """
        self._mark = self._mark or mark
        if mark != self._mark:
            self._check_mark()

    def create(self, key: str, data: bytes) -> None:
        """Write a new file. FileExistsError: the file exists. `link`, unlike rename, never replaces a file."""
        self._check_mark()
        with self._draft(key, data) as (draft, target):
            os.link(draft, target)

    def replace(self, key: str, old: bytes, new: bytes) -> bool:
        with self._changing():
            if not self._holds(key, old):
                return False
            with self._draft(key, new) as (draft, target):
                draft.replace(target)
            return True

    def read(self, key: str) -> bytes:
        with self._missing_is_certain():
            return (self._root / key).read_bytes()

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with self._missing_is_certain(), (self._root / key).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def signed_url(self, key: str, seconds: int) -> None:
        """Return None, because local files have no URLs. The API serves them."""

    def size(self, key: str) -> int:
        with self._missing_is_certain():
            return (self._root / key).stat().st_size

    def remove(self, key: str, old: bytes | None = None) -> bool:
        """Remove a file, and flush its folder."""
        path = self._root / key
        if not path.exists():
            self._check_mark()
            return False
        with self._changing():
            if old is not None and not self._holds(key, old):
                return False
            try:
                path.unlink()
            except FileNotFoundError:
                return False
        with suppress(FileNotFoundError):  # another process may have removed the folder
            flush(path.parent)
        self._prune(path.parent)
        return True

    def remove_folder(self, prefix: str) -> None:
        folder = self._root / prefix
        self._check_mark()
        with suppress(FileNotFoundError):  # another process may also be removing it
            for path in folder.iterdir():
                path.unlink(missing_ok=True)
        self._prune(folder)

    def clear_drafts(self, prefix: str, before: datetime) -> int:
        """Remove drafts from before `before`, whose writers must have died."""
        cleared = 0
        for path in self._paths(prefix):
            with suppress(FileNotFoundError):
                if path.name[0] == "." and path.stat().st_mtime < before.timestamp():
                    path.unlink()
                    cleared += 1
        self._prune(self._root / prefix)
        return cleared

    def children(self, prefix: str) -> list[str]:
        """The names in a folder, without drafts."""
        return sorted(path.name for path in self._paths(prefix) if path.name[0] != ".")

    def written_at(self, prefix: str) -> datetime | None:
        """When a file or draft in the folder was last written; if there is none, when the folder was written."""
        times = []
        for path in self._paths(prefix) or [self._root / prefix]:
            with suppress(FileNotFoundError):  # a draft that has just been renamed, or no folder
                times.append(path.stat().st_mtime)
        return datetime.fromtimestamp(max(times), UTC) if times else None

    def _paths(self, prefix: str) -> list[Path]:
        """The files in a folder, drafts included; none if there is no folder, or if another process removes it."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return list((self._root / prefix).iterdir())
        self._check_mark()
        return []

    def _check_mark(self) -> None:
        """OSError: the folder does not have the expected mark."""
        try:
            found: str | None = mark_of((self._root / MARK).read_bytes())
        except FileNotFoundError:
            found = None
        if self._mark is None:
            self._mark = found
        elif found != self._mark:
            text = f"not the store: mount it (if it was emptied on purpose, write {self._mark} into {MARK} there)"
            raise OSError(errno.ENODEV, text, str(self._root))

    @contextmanager
    def _missing_is_certain(self) -> Iterator[None]:
        """Raise a FileNotFoundError of the block only if the folder has the expected mark."""
        try:
            yield
        except FileNotFoundError:
            self._check_mark()
            raise

    def _prune(self, folder: Path) -> None:
        """Remove a folder, and its parents below the root, as long as they are empty."""
        with suppress(OSError):  # not empty, or another process has removed it
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.read(key) == data
        except FileNotFoundError:
            return False

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock shared by all processes that compare and then change a file. It ends with its process."""
        self._check_mark()
        make_folder(self._root)
        with locked(self._root / ".lock"):
            yield

    @contextmanager
    def _draft(self, key: str, data: bytes) -> Iterator[tuple[Path, Path]]:
        """Yield a flushed draft next to its target, and the target. Then flush the folder and remove the draft."""
        target = self._root / key
        draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            with self._new_file(draft) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield draft, target
            with suppress(FileNotFoundError):  # another process has removed the object and its folder
                flush(target.parent)
        finally:
            draft.unlink(missing_ok=True)
            self._prune(target.parent)

    def _new_file(self, path: Path) -> IO[bytes]:
        """Create a file and its folder, even if other processes remove empty folders at the same time."""
        for _ in range(20):
            with suppress(FileNotFoundError):
                make_folder(path.parent)
                return open_private(path, "xb")
        return open_private(path, "xb")


def mark_of(data: bytes) -> str:
    """The mark in an object. A person may have written it, with a newline at the end."""
    return data.decode(errors="replace").strip()
