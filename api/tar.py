"""A tar archive made while it is sent: its headers are worked out, its files are read when their turn comes."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from datetime import datetime

from tinkerflow.api.bytes import Segment

_BLOCK = tarfile.BLOCKSIZE


def archive(files: Sequence[tuple[str, Segment]], modified_at: datetime) -> list[Segment]:
    """The archive that holds these files under these names."""
    return [segment for name, file in files for segment in _member(name, file, modified_at)] + [
        Segment.of(bytes(2 * _BLOCK))
    ]


def _member(name: str, file: Segment, modified_at: datetime) -> Iterator[Segment]:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = file.size, 0o644, int(modified_at.timestamp())
    yield Segment.of(info.tobuf(tarfile.GNU_FORMAT))
    yield file
    yield Segment.of(bytes(-file.size % _BLOCK))
