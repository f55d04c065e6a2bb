"""Bodies are read whole, or refused by name: however they are compressed, cut, or blown up."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import zstandard
from fastapi import Request
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.api.conftest import KEY

from tinkerflow.api.call import read_body
from tinkerflow.backend.core.errors import BodyTooLargeError, UserError

LIMIT = 1000


def request(body: bytes, encoding: str | None, pieces: int = 1) -> Request:
    size = max(1, -(-len(body) // pieces))
    parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]

    async def receive() -> dict[str, object]:
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    headers = [(b"content-encoding", encoding.encode())] if encoding else []
    return Request({"type": "http", "headers": headers}, receive)


@given(st.binary(max_size=LIMIT), st.sampled_from([None, "identity", "zstd"]), st.integers(1, 5))
@settings(max_examples=50)
async def test_what_was_sent_is_read(body: bytes, encoding: str | None, pieces: int) -> None:
    sent = zstandard.ZstdCompressor().compress(body) if encoding == "zstd" else body
    assert await read_body(request(sent, encoding, pieces), 2 * LIMIT) == body


async def test_a_frame_cut_short_is_refused() -> None:
    content = bytes(range(200)) * 4
    whole = zstandard.ZstdCompressor().compress(content)
    for cut in range(len(whole)):
        with pytest.raises(UserError, match="one whole zstd frame"):
            await read_body(request(whole[:cut], "zstd"), LIMIT)
    with pytest.raises(UserError, match="one whole zstd frame"):
        await read_body(request(whole + whole, "zstd"), LIMIT)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(content)
    with pytest.raises(UserError, match="does not declare its content size"):
        await read_body(request(unsized, "zstd"), LIMIT)


async def test_too_large() -> None:
    with pytest.raises(BodyTooLargeError, match="more than 1000 bytes"):
        await read_body(request(bytes(LIMIT + 1), None, 3), LIMIT)
    with pytest.raises(BodyTooLargeError, match="more than 1000 bytes"):
        await read_body(request(bytes(LIMIT * 100), None, 100), LIMIT)
    bomb = zstandard.ZstdCompressor().compress(bytes(10**8))
    with pytest.raises(BodyTooLargeError, match="has 100000000 bytes when decompressed: must be at most 10000"):
        await read_body(request(bomb, "zstd"), 10000)


async def test_other_encodings() -> None:
    with pytest.raises(UserError, match="Content-Encoding is 'gzip': must be zstd or absent"):
        await read_body(request(b"", "gzip"), LIMIT)


def test_a_client_that_goes_away_is_no_error(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "tinkerflow.api.errors")
    port = int(server.url.rsplit(":", 1)[1])
    for path in ("optim_step", "forward_backward", "create_session"):
        head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nContent-Length: 1000\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head.encode() + b"half")
        said = f"POST /api/v1/{path}: the client went away"
        deadline = time.monotonic() + 30
        while said not in caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
        assert said in caplog.messages
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    assert server.get("training_runs").json()["training_runs"] == []
