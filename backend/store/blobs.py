"""Objects with a key, each written atomically: the interface of files or object storage to a store."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Protocol

from tinkerflow.backend.core.disk import folder_of_url
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.store.local import LocalBlobs

# Otherwise gcsfs first requests the bucket's kind from another API over gRPC, which takes 88 s with an emulator.
# gcsfs reads the variable on import. fsspec also imports gcsfs, for pipeline data and results of Prefect.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


class Blobs(Protocol):
    """Objects by key (`a/b/c`), written atomically. Safe for many threads and processes. Failures are OSErrors."""

    def expect(self, mark: str) -> None:
        """Fail from now on if another folder is in the place of these objects. mark: the content of the object MARK."""

    def create(self, key: str, data: bytes) -> None:
        """Write a new object. FileExistsError: it exists. Exactly one of several creators succeeds."""

    def replace(self, key: str, old: bytes, new: bytes) -> bool:
        """Replace `old` with `new`. False: the object is missing or has other bytes, and nothing was written.

        Exactly one of several writers that replace the same bytes succeeds. A reader sees the old or the new bytes.
        """

    def read(self, key: str) -> bytes:
        """An object's bytes. FileNotFoundError: there is no such object."""

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """At most `length` bytes of an object from `start` on. FileNotFoundError: there is no such object."""

    def signed_url(self, key: str, seconds: int) -> str | None:
        """A URL that lets anyone read the object for `seconds`; None if this kind of store has no such URLs."""

    def size(self, key: str) -> int:
        """An object's size in bytes. FileNotFoundError: there is no such object."""

    def remove(self, key: str, old: bytes | None = None) -> bool:
        """Remove an object. Returns whether it was removed. With `old`, remove it only if it has these bytes."""

    def remove_folder(self, prefix: str) -> None:
        """Remove all objects directly below `prefix`, if there are any."""

    def clear_drafts(self, prefix: str, before: datetime) -> int:
        """Remove unfinished files directly below `prefix` whose writers died before `before`. Returns their number."""

    def children(self, prefix: str) -> list[str]:
        """The next segments of the keys below `prefix`, sorted."""

    def written_at(self, prefix: str) -> datetime | None:
        """When the newest object directly below `prefix` was written, by the store's clock; None if there is none."""


def find(blobs: Blobs, key: str) -> bytes | None:
    """An object's bytes; None if there is no such object."""
    try:
        return blobs.read(key)
    except FileNotFoundError:
        return None


def put(blobs: Blobs, key: str, old: bytes | None, new: bytes) -> bool:
    """Create an object (`old` None), or replace `old`. False: there are other bytes, and nothing was written."""
    if old is not None:
        return blobs.replace(key, old, new)
    try:
        blobs.create(key, new)
    except FileExistsError:
        return False
    return True


def open_blobs(url: str) -> Blobs:
    """The objects at `file:///folder` (or a plain absolute folder), `memory://name` or `gs://bucket/prefix`.

    gs:// uses the machine's own Google credentials; STORAGE_EMULATOR_HOST redirects it to an emulator. UserError:
    any other URL, or gs:// without gcsfs.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "file", url
    if scheme == "file":
        folder = folder_of_url(url) if separator else Path(rest)
        if not folder.is_absolute():
            raise UserError(f"store {url!r}: the folder must be absolute, as in file:///var/lib/tinkerflow")
        return LocalBlobs(folder)
    if scheme == "memory":
        import fsspec  # not at the top, because worker processes only open local stores

        from tinkerflow.backend.store.objects import MEMORY_LOCK, ObjectBlobs

        return ObjectBlobs(fsspec.filesystem("memory"), rest, guard=lambda key: MEMORY_LOCK)
    if scheme == "gs":
        if not rest.partition("/")[0]:
            raise UserError(f"store {url!r}: the bucket is missing, as in gs://bucket/prefix")
        try:
            from tinkerflow.backend.store.gcs import GcsBlobs  # importing it costs 1.4 s of CPU
        except ModuleNotFoundError as error:  # in an environment without the extra `server`
            raise UserError(f"store {url!r}: a package is not installed: pip install {error.name}") from error
        return GcsBlobs(rest)
    raise UserError(f"store {url!r}: scheme {scheme!r} is not supported; supported: file://, gs://, memory://")
