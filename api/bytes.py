"""Answers of many bytes, sent piece by piece: the whole or the part that was asked for, without holding it all."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from fastapi import HTTPException, Request
from fastapi.responses import Response, StreamingResponse

from tinkerflow.backend.store import BLOCK

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass(frozen=True)
class Segment:
    """`size` bytes; read(start, length) gives at most `length` of them from `start` on, and may block."""

    size: int
    read: Callable[[int, int], bytes]

    @classmethod
    def of(cls, data: bytes) -> Segment:
        """Bytes that are there already."""
        return cls(len(data), lambda start, length: data[start : start + length])


def send(request: Request, segments: Sequence[Segment], headers: Mapping[str, str], etag: str) -> Response:
    """The segments one after the other, to GET and to HEAD; a Range is answered 206, one beyond the end 416.

    A list of ranges, or one for another version (If-Range), gets the whole, as RFC 9110 allows.
    """
    size = sum(segment.size for segment in segments)
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
    return StreamingResponse(_pieces(segments, start, end), status, more)


def _range(asked: str, size: int) -> tuple[int, int] | None:
    """The half-open range, or None for the whole."""
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


async def _pieces(segments: Sequence[Segment], start: int, end: int) -> AsyncIterator[bytes]:
    at = 0  # where the segment begins
    for segment in segments:
        position, stop = max(start - at, 0), min(end - at, segment.size)
        while position < stop:
            # whole blocks, because the store compares whole blocks
            piece = await asyncio.to_thread(segment.read, position, min(BLOCK - position % BLOCK, stop - position))
            if not piece:
                raise OSError(f"a file ended after {position} of {segment.size} bytes")  # cuts the connection
            position += len(piece)
            yield piece
        at += segment.size
