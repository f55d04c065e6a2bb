"""Whole named objects, the only thing that a store needs of a file system or an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import fsspec

from backend.errors import UserError
from backend.store.local import LocalBlobs
from backend.store.objects import MEMORY_LOCK, ObjectBlobs


class Blobs(Protocol):
    """Objects by key (`a/b/c`), each written whole; safe from many threads and processes. Failures are OSErrors."""

    def create(self, key: str, data: bytes) -> None:
        """Write an object that does not exist; FileExistsError when it does: of many creators exactly one succeeds."""
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Write an object over whatever was there; a reader sees the old bytes or the new ones."""
        ...

    def read(self, key: str) -> bytes:
        """An object's bytes; FileNotFoundError when there is none."""
        ...

    def part(self, key: str, start: int, length: int) -> bytes:
        """At most `length` bytes of an object from `start` on; FileNotFoundError when there is none."""
        ...

    def signed_url(self, key: str, seconds: int) -> str | None:
        """A URL by which anybody can read the object for so long, or None where there are no such URLs."""
        ...

    def size(self, key: str) -> int:
        """An object's size in bytes; FileNotFoundError when there is none."""
        ...

    def remove(self, key: str) -> bool:
        """Remove an object; whether there was one."""
        ...

    def remove_folder(self, prefix: str) -> None:
        """Remove all objects directly below `prefix`; none is fine."""
        ...

    def children(self, prefix: str) -> list[str]:
        """The next segments of the keys below `prefix`, sorted."""
        ...


def open_blobs(url: str) -> Blobs:
    """The objects at `file:///folder` (or a plain absolute folder) or `memory://name`; UserError for anything else."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "file", url
    if scheme == "file":
        if not Path(rest).is_absolute():
            raise UserError(f"store {url!r}: the folder must be absolute, as in file:///var/lib/tinkerflow")
        return LocalBlobs(Path(rest))
    if scheme == "memory":
        return ObjectBlobs(fsspec.filesystem("memory"), rest, lock=MEMORY_LOCK)
    raise UserError(f"store {url!r}: scheme {scheme!r} is not supported; supported: file://, memory://")
