"""Downloads: read piece by piece, and sent as a whole, in ranges or as archives."""

from __future__ import annotations

import tarfile
from datetime import UTC, datetime
from io import BytesIO
from typing import Any

import pytest
from fastapi import HTTPException, Request
from fastapi.responses import StreamingResponse
from hypothesis import given
from hypothesis import strategies as st

from tinkerflow.api.bytes import ByteSource, archive, send
from tinkerflow.backend.store import BLOCK


def request(method: str = "GET", **headers: str) -> Request:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": method, "headers": named})


async def content(answer: Any) -> bytes:
    assert isinstance(answer, StreamingResponse)
    pieces = [piece async for piece in answer.body_iterator]
    assert int(answer.headers["content-length"]) == sum(map(len, pieces))
    return b"".join(map(bytes, pieces))


@given(st.lists(st.binary(max_size=20), max_size=5), st.integers(0, 60), st.integers(0, 60))
async def test_part_equals_its_range_of_the_whole_file(parts: list[bytes], start: int, length: int) -> None:
    segments, whole = [ByteSource.of(part) for part in parts], b"".join(parts)
    assert await content(send(request(), segments, {}, "tag")) == whole
    asked = request(range=f"bytes={start}-{start + length}")
    if start >= len(whole):
        with pytest.raises(HTTPException) as refused:
            send(asked, segments, {}, "tag")
        assert refused.value.status_code == 416
    else:
        assert await content(send(asked, segments, {}, "tag")) == whole[start : start + length + 1]


@pytest.mark.parametrize("asked", ["bytes={}-", "bytes=1-{}", "bytes=-{}"])
async def test_a_range_with_too_many_digits_is_ignored(asked: str) -> None:
    asked = asked.format("9" * 5000)  # Python converts at most 4,300 digits
    answer = send(request(range=asked), [ByteSource.of(b"abc")], {}, "tag")
    assert (answer.status_code, await content(answer)) == (200, b"abc")


async def test_large_file_is_never_read_as_a_whole() -> None:
    size, reads = 5 * BLOCK + 3, []

    def read(start: int, length: int) -> bytes:
        reads.append((start, length))
        return bytes(length)

    answer = send(request(), [ByteSource(size, read)], {}, "tag")
    assert isinstance(answer, StreamingResponse) and reads == []
    first = await anext(aiter(answer.body_iterator))
    assert reads == [(0, BLOCK)] and len(first) == BLOCK
    assert send(request("HEAD"), [ByteSource(size, read)], {}, "tag").headers["content-length"] == str(size)
    assert len(reads) == 1


async def test_file_that_shrinks_ends_the_response_with_an_error() -> None:
    answer = send(request(), [ByteSource(10, lambda start, length: b"")], {}, "tag")
    with pytest.raises(OSError, match="ended after 0 of 10 bytes"):
        await content(answer)


@given(st.dictionaries(st.text("abc", min_size=1), st.binary(max_size=1500), max_size=4))
async def test_an_archive_opens_with_its_files(files: dict[str, bytes]) -> None:
    members = [(name, ByteSource.of(data)) for name, data in files.items()]
    data = await content(send(request(), archive(members, datetime(2026, 1, 2, tzinfo=UTC)), {}, "tag"))
    with tarfile.open(fileobj=BytesIO(data)) as tar:
        assert {m.name: (tar.extractfile(m) or BytesIO()).read() for m in tar.getmembers()} == files
