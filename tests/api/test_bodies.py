"""Bodies are read completely or refused, within bounds of size and memory that projects share fairly."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard
from fastapi import Request
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.api.conftest import KEY
from tests.waiting import wait_for

from tinkerflow.api import bodies
from tinkerflow.api.bodies import MEDIUM, SMALL, Body, BodyMemory, Memories, check_values, decompressed
from tinkerflow.backend.core.errors import BodyTooLargeError, TooManyError, UserError

LIMIT = 1000


def request(body: bytes, encoding: str | None = None, pieces: int = 1, *, length: int | None = None) -> Request:
    """A request with this body, and with a Content-Length if `length` is given."""
    size = max(1, -(-len(body) // pieces))
    parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]

    async def receive() -> dict[str, object]:
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    headers = [(b"content-encoding", encoding.encode())] if encoding else []
    headers += [] if length is None else [(b"content-length", str(length).encode())]
    return Request({"type": "http", "headers": headers}, receive)


async def read(asked: Request, most: int, memories: Memories | None = None, owner: str = "ann") -> bytes:
    async def decompress(frame: bytes, size: int) -> bytes:
        return await asyncio.to_thread(decompressed, frame, size)

    body = Body(asked, most, "a rule", owner, memories or Memories.for_bodies_of(most))
    try:
        return await body.read(decompress)
    finally:
        body.release()


@given(st.binary(max_size=LIMIT), st.sampled_from([None, "identity", "zstd"]), st.integers(1, 5))
@settings(max_examples=50)
async def test_body_is_read_as_it_was_sent(body: bytes, encoding: str | None, pieces: int) -> None:
    sent = zstandard.ZstdCompressor().compress(body) if encoding == "zstd" else body
    assert await read(request(sent, encoding, pieces), 2 * LIMIT) == body


@pytest.mark.parametrize("size", [SMALL, SMALL + 1, MEDIUM, MEDIUM + 1])
@pytest.mark.parametrize("encoding", [None, "zstd"])
@pytest.mark.parametrize("declared", [False, True])
async def test_bodies_of_every_size_release_their_memory(size: int, encoding: str | None, declared: bool) -> None:
    content = (bytes(range(256)) * (size // 256 + 1))[:size]
    sent = zstandard.ZstdCompressor().compress(content) if encoding == "zstd" else content
    memories = Memories.for_bodies_of(2 * MEDIUM)
    asked = request(sent, encoding, 50, length=len(sent) if declared else None)
    assert await read(asked, 2 * MEDIUM, memories) == content
    assert not memories.medium._held and not memories.large._held


async def test_truncated_frame_is_refused() -> None:
    content = bytes(range(200)) * 4
    whole = zstandard.ZstdCompressor().compress(content)
    for cut in range(len(whole)):
        with pytest.raises(UserError, match="one complete zstd frame"):
            await read(request(whole[:cut], "zstd"), LIMIT)
    with pytest.raises(UserError, match="one complete zstd frame"):
        await read(request(whole + whole, "zstd"), LIMIT)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(content)
    with pytest.raises(UserError, match="without a content size"):
        await read(request(unsized, "zstd"), LIMIT)


async def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    for asked in (request(bytes(LIMIT + 1), pieces=3), request(bytes(LIMIT * 100), pieces=100)):
        with pytest.raises(BodyTooLargeError, match=r"must have at most 1000 bytes \(a rule\)"):
            await read(asked, LIMIT)

    async def never() -> Any:
        raise AssertionError("read")

    with pytest.raises(BodyTooLargeError, match="at most 1000 bytes"):
        await read(Request({"type": "http", "headers": [(b"content-length", b"1001")]}, never), LIMIT)
    bomb = zstandard.ZstdCompressor().compress(bytes(10**8))
    with pytest.raises(BodyTooLargeError, match="has 100000000 bytes when decompressed: must have at most 10000"):
        await read(request(bomb, "zstd"), 10000)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd, zstd", "x"])
async def test_other_encodings_are_refused_before_the_body_is_read(encoding: str) -> None:
    async def never() -> Any:
        raise AssertionError("read")

    asked = Request({"type": "http", "headers": [(b"content-encoding", encoding.encode())]}, never)
    with pytest.raises(UserError, match=f"Content-Encoding is '{encoding}': must be zstd or absent"):
        await read(asked, LIMIT)


# ------------------------------------------------------------------ memory
@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bodies wait for tenths of seconds instead of seconds."""
    monkeypatch.setattr(bodies, "WAIT_SECONDS", 0.5)
    monkeypatch.setattr(bodies, "_PATIENCE_SECONDS", 0.1)
    yield


async def test_one_project_leaves_half_of_the_body_memory_to_other_projects() -> None:
    memory = BodyMemory(100)
    first = await memory.take("ann", 50)
    waiting = asyncio.create_task(memory.take("ann", 1))
    other = await asyncio.wait_for(memory.take("bob", 50), 5)
    assert not waiting.done()
    memory.give_back(first)
    memory.give_back(first)  # a second call changes nothing
    memory.give_back(await waiting)
    memory.give_back(other)
    assert (await asyncio.wait_for(memory.take("cat", 1000), 5)).size == 100, "alone, a body may have all"


async def test_bodies_wait_in_a_fair_queue_and_then_get_a_retry_answer(quick: None) -> None:
    memory, order = BodyMemory(100), list[str]()
    held = await memory.take("eve", 100)

    async def take(owner: str) -> None:
        share = await memory.take(owner, 40)
        order.append(owner)
        memory.give_back(share)

    tasks = [asyncio.create_task(take(owner)) for owner in ("ann", "ann", "ann", "bob")]
    await asyncio.sleep(0)
    memory.give_back(held)
    await asyncio.gather(*tasks)
    assert order.index("bob") < 2
    held = await memory.take("eve", 100)
    with pytest.raises(TooManyError, match="send this request again"):
        await memory.take("ann", 1)
    cancelled = asyncio.create_task(memory.take("ann", 1))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    memory.give_back(held)
    assert not memory._held and not len(memory._queue)


async def test_slow_body_yields_to_a_waiting_one(quick: None) -> None:
    memories = Memories.for_bodies_of(2 * MEDIUM)
    size = 16 * MEDIUM
    arriving = asyncio.Event()

    async def receive() -> dict[str, object]:
        if not arriving.is_set():
            arriving.set()
            return {"type": "http.request", "body": bytes(SMALL + 1), "more_body": True}
        await asyncio.sleep(3600)
        raise AssertionError

    slow = Request({"type": "http", "headers": [(b"content-length", str(MEDIUM).encode())]}, receive)
    reading = asyncio.create_task(read(slow, MEDIUM, memories, "eve"))
    await arriving.wait()
    await asyncio.sleep(0)
    assert (await memories.medium.take("ann", size)).size == size
    with pytest.raises(TooManyError, match="arrived slowly while other requests waited"):
        await reading


def test_values_are_counted_before_they_are_parsed() -> None:
    check_values(b"[" + b"1," * 99 + b"1]", 101, "a rule")
    for body in (b"[" + b"1," * 100 + b"1]", b"[" * 101, b'{"a":' * 101):
        with pytest.raises(BodyTooLargeError, match=r"about \d+ values: must have at most 101 \(a rule\)"):
            check_values(body, 101, "a rule")


# ------------------------------------------------------------------ over HTTP
def test_endpoints_bound_their_bodies_and_stay_responsive(start: Any, lettered: Any) -> None:
    """Each endpoint has its own limit. A larger body is refused before it is parsed, hashed or stored."""
    server = start(max_body_bytes=2**24)
    session = server.session()
    numbers = b'{"prompt": {"chunks": [{"tokens": [' + b"1," * 400_000 + b"1]}]}}"
    large = {
        "session_heartbeat": b'{"session_id": "' + session.encode() + b'", "x": "' + bytes(2 * 2**20) + b'"}',
        "create_session": b'{"sdk_version": "' + b"x" * 2**21 + b'"}',
        "asample": b" " * 2**23 + numbers,
        "optim_step": b" " * 2**21,
        "assets": bytes(2**24 + 1),
    }
    for path, body in large.items():
        frame = zstandard.ZstdCompressor().compress(body)
        for content, more in ((body, {}), (frame, {"content-encoding": "zstd"})):
            headers = {"X-API-Key": KEY, "content-type": "application/json", **more}
            began = time.monotonic()
            answer = server.http.post(f"{server.url}/api/v1/{path}", content=content, headers=headers)
            assert answer.status_code == 413, (path, more, answer.text[:200])
            assert "must" in answer.json()["detail"]
            assert time.monotonic() - began < 10
    for content in (numbers * 3, large["asample"]):  # too many values, and too many bytes
        refused = server.http.post(f"{server.url}/v1/chat/completions", content=content, headers={"X-API-Key": KEY})
        assert (refused.status_code, refused.json()["error"]["type"]) == (413, "invalid_request_error")
    body, key = bytes(2**24 + 1), {"X-API-Key": KEY}
    refused = server.http.post(f"{server.url}/api/v1/forward_backward", content=body, headers=key)
    assert refused.status_code == 200, "a refused chunk would hang the SDK"
    assert "max_body_bytes" in server.result(refused.json()["request_id"]).json()["error"]
    assert server.post("session_heartbeat", {"session_id": session}).status_code == 200


def test_client_disconnect_is_not_logged_as_an_error(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "tinkerflow.api.errors")
    port = int(server.url.rsplit(":", 1)[1])
    for path in ("optim_step", "forward_backward", "create_session"):
        head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\nContent-Length: 1000\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head.encode() + b"half")
        wait_for(lambda said=f"POST /api/v1/{path}: the client disconnected": said in caplog.messages)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    assert server.get("training_runs").json()["training_runs"] == []
