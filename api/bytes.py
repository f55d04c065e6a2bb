"""Large answers, sent piece by piece: all bytes or a Range, from a file or from a tar archive that is made on the fly.

A file is never held in memory as a whole. starlette's FileResponse needs a local path, but a store may be remote. Files
of a store are read in blocks, which are verified by their checksums.
"""

from __future__ import annotations

import asyncio
import re
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from fastapi import HTTPException, Request
from fastapi.responses import Response, StreamingResponse

from tinkerflow.backend.store import BLOCK

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_TAR_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class ByteSource:
    """A source of `size` bytes. read(start, length) returns at most `length` bytes from `start` on, and may block."""

    size: int
    read: Callable[[int, int], bytes]

    @classmethod
    def of(cls, data: bytes) -> ByteSource:
        """A source of bytes in memory."""
        return cls(len(data), lambda start, length: data[start : start + length])


def send(request: Request, sources: Sequence[ByteSource], headers: Mapping[str, str], etag: str) -> Response:
    """Answer a GET or HEAD request for the concatenated sources: 206 for a Range, 416 for a Range beyond the end.

    A list of ranges, or a range of another version (If-Range), is answered with all bytes, as RFC 9110 allows.
    headers: added to our headers. etag: must change with the content.
    """
    size = sum(source.size for source in sources)
    quoted = f'"{etag}"'
    chosen = _range(request.headers.get("range", ""), size)
    if request.headers.get("if-range", quoted) != quoted:
        chosen = None
    start, end = chosen or (0, size)
    more = {
        "accept-ranges": "bytes",
        "cache-control": "private, no-store",
        "content-length": str(end - start),
        "content-type": "application/octet-stream",
        "etag": quoted,
        **({"content-range": f"bytes {start}-{end - 1}/{size}"} if chosen else {}),
        **headers,
    }
    status = 206 if chosen else 200
    if request.method == "HEAD":
        return Response(status_code=status, headers=more)
    return StreamingResponse(_pieces(sources, start, end), status, more)


def _range(asked: str, size: int) -> tuple[int, int] | None:
    """The half-open range, or None for all bytes."""
    found = _RANGE.fullmatch(asked.replace(" ", ""))
    if found is None or found[1] == found[2] == "":
        return None
    if found[1]:
        start, end = int(found[1]), min(int(found[2]) + 1, size) if found[2] else size
        if found[2] and int(found[2]) < int(found[1]):
            return None
    else:
        start, end = max(size - int(found[2]), 0), size
    if start >= size:
        raise HTTPException(416, f"Range is {asked!r}: there are {size} bytes", {"content-range": f"bytes */{size}"})
    return start, end


async def _pieces(sources: Sequence[ByteSource], start: int, end: int) -> AsyncIterator[bytes]:
    at = 0  # the position of the source's first byte
    for source in sources:
        position, stop = max(start - at, 0), min(end - at, source.size)
        while position < stop:
            # whole blocks, because the store verifies whole blocks
            piece = await asyncio.to_thread(source.read, position, min(BLOCK - position % BLOCK, stop - position))
            if not piece:
                raise OSError(f"a file ended after {position} of {source.size} bytes")  # cuts the connection
            position += len(piece)
            yield piece
        at += source.size


def archive(files: Sequence[tuple[str, ByteSource]], modified_at: datetime) -> list[ByteSource]:
    """A tar archive of named files. Its headers are made immediately; the files are read as they are sent."""
    return [source for name, file in files for source in _member(name, file, modified_at)] + [
        ByteSource.of(bytes(2 * _TAR_BLOCK))
    ]


def _member(name: str, file: ByteSource, modified_at: datetime) -> Iterator[ByteSource]:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = file.size, 0o644, int(modified_at.timestamp())
    yield ByteSource.of(info.tobuf(tarfile.GNU_FORMAT))
    yield file
    yield ByteSource.of(bytes(-file.size % _TAR_BLOCK))
