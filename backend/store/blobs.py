"""Whole named objects, the only thing that a store needs of a file system or an object store."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Protocol

import fsspec

from tinkerflow.backend.errors import UserError
from tinkerflow.backend.store.local import LocalBlobs
from tinkerflow.backend.store.objects import MEMORY_LOCK, ObjectBlobs

# Else gcsfs asks another API over gRPC what kind of bucket it is (FINDINGS.md, 2). It looks at import, and not only we
# import it: data of pipelines and the results that Prefect keeps go through fsspec.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


class Blobs(Protocol):
    """Objects by key (`a/b/c`), each written whole; safe from many threads and processes. Failures are OSErrors."""

    def create(self, key: str, data: bytes) -> None:
        """Write an object that does not exist; FileExistsError when it does: of many creators exactly one succeeds."""
        ...

    def replace(self, key: str, old: bytes, new: bytes) -> bool:
        """Write `new` over `old`, whether it did: False when the object holds other bytes by now, or is gone.

        Of many who replace the same bytes exactly one succeeds; a reader sees the old bytes or the new ones.
        """
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

    def remove(self, key: str, old: bytes | None = None) -> bool:
        """Remove an object, with `old` only while it holds these bytes; whether it was there."""
        ...

    def remove_folder(self, prefix: str) -> None:
        """Remove all objects directly below `prefix`; none is fine."""
        ...

    def clear_drafts(self, prefix: str, before: datetime) -> int:
        """Remove what writers that died before then left directly below `prefix` of their own; how many."""
        ...

    def children(self, prefix: str) -> list[str]:
        """The next segments of the keys below `prefix`, sorted."""
        ...

    def written_at(self, prefix: str) -> datetime | None:
        """When the newest object directly below `prefix` was written (by its keeper's clock), None when none is."""
        ...


def open_blobs(url: str) -> Blobs:
    """The objects at `file:///folder` (or a plain absolute folder), `memory://name` or `gs://bucket/prefix`.

    gs:// takes the machine's own Google credentials; STORAGE_EMULATOR_HOST sends it to an emulator. UserError for
    anything else.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "file", url
    if scheme == "file":
        if not Path(rest).is_absolute():
            raise UserError(f"store {url!r}: the folder must be absolute, as in file:///var/lib/tinkerflow")
        return LocalBlobs(Path(rest))
    if scheme == "memory":
        return ObjectBlobs(fsspec.filesystem("memory"), rest, lock=MEMORY_LOCK)
    if scheme == "gs":
        if not rest.partition("/")[0]:
            raise UserError(f"store {url!r}: the bucket is missing, as in gs://bucket/prefix")
        from tinkerflow.backend.store.gcs import GcsBlobs  # costs 1.4 s of CPU, so only those pay who use it

        return GcsBlobs(rest)
    raise UserError(f"store {url!r}: scheme {scheme!r} is not supported; supported: file://, gs://, memory://")
