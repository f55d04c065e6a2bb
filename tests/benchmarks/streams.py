"""64 streams at once: whether a token is lost, the gap between tokens beside the engine's chunk, memory, a slow reader.

    python -m tests.benchmarks.streams [--model FOLDER] [--streams 64] [--tokens 128] [--rounds 5] [--data-dir FOLDER]

One `tinkerflow up` without Prefect. In each round the same requests are sent to /v1/completions whole, which gives the
time of the engine's chunk of so many rows (prefill included), and then as streams, each of which must have the tokens
of the whole answer. Then all but 16 of them beside one of 16 samples with the 20 most likely tokens (more bytes than
sockets hold) that is read, and that is not read. RESULTS.md keeps the output.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
from tests.benchmarks.scheduling import CHUNK
from tests.benchmarks.service import random_ids, server, tree, warm
from tests.benchmarks.waiters import memory

KEY = {"Authorization": "Bearer tml-bench"}
PROMPT = 32  # tokens
LARGE = 16  # samples of the large stream


@dataclass
class Heard:
    """A stream's tokens, and when each part of them came."""

    tokens: list[int] = field(default_factory=list)
    came: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.came, self.came[1:], strict=False)]


@dataclass(frozen=True)
class Load:
    """The requests of every round. model: what they ask for."""

    url: str
    model: str
    tokens: int
    prompts: Sequence[list[int]]

    def body(self, number: int, **more: Any) -> dict[str, Any]:
        asked = {"model": self.model, "prompt": self.prompts[number], "max_tokens": self.tokens, "seed": number}
        return {**asked, "return_token_ids": True, "ignore_eos": True, "logprobs": 0, **more}

    async def whole(self, http: httpx.AsyncClient, number: int) -> list[int]:
        answer = await http.post("/v1/completions", json=self.body(number))
        answer.raise_for_status()
        return list(answer.json()["choices"][0]["token_ids"])

    async def stream(self, http: httpx.AsyncClient, number: int) -> Heard:
        heard = Heard()
        async with http.stream("POST", "/v1/completions", json=self.body(number, stream=True)) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    heard.tokens += orjson.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                    heard.came.append(time.perf_counter())
        return heard

    @contextmanager
    def beside(self, *, read: bool) -> Iterator[None]:
        """Inside, one large stream is asked for. read: what comes is taken in."""
        asked = {"model": self.model, "messages": [{"role": "user", "content": "a"}], "max_tokens": self.tokens}
        more = {"n": LARGE, "stream": True, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
        body, at = orjson.dumps(asked | more), urlsplit(self.url)
        with socket.socket() as connection:
            if not read:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((at.hostname, at.port))
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: {at.netloc}\r\nAuthorization: {KEY['Authorization']}\r\n"
            )
            length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall((head + length).encode() + body)
            reader = threading.Thread(target=_take, args=(connection,))
            if read:
                reader.start()
            yield
            connection.shutdown(socket.SHUT_RDWR)
        if read:
            reader.join()

    async def all_whole(self) -> tuple[float, list[list[int]]]:
        """Seconds until all have answered, and their tokens."""
        async with client(self.url) as http:
            began = time.perf_counter()
            found = await asyncio.gather(*(self.whole(http, number) for number in range(len(self.prompts))))
            return time.perf_counter() - began, found

    async def streams(self, count: int) -> tuple[float, list[Heard]]:
        """Seconds until the first `count` have ended, and what they said."""
        async with client(self.url) as http:
            began = time.perf_counter()
            found = await asyncio.gather(*(self.stream(http, number) for number in range(count)))
            return time.perf_counter() - began, found


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers=KEY, timeout=600, limits=httpx.Limits(max_connections=None))


def _take(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(2**16):
            pass


def round_of(load: Load, api: int) -> None:
    """Whole answers, streams, and streams beside a large one; print their times beside each other."""
    most = len(load.prompts)
    seconds, expected = asyncio.run(load.all_whole())
    chunk = seconds / (load.tokens / CHUNK)
    said = [f"{most} whole answers {seconds:.2f} s, a chunk {1000 * chunk:.0f} ms"]

    def streamed(name: str, count: int) -> float:
        took, heard = asyncio.run(load.streams(count))
        assert [one.tokens for one in heard] == expected[:count], f"{name}: tokens were lost, or came twice"
        gap = statistics.median(gap for one in heard for gap in one.gaps)
        said.append(f"{name} {took:.2f} s, p50 gap {1000 * gap:.0f} ms")
        return gap

    said.append(f"{streamed(f'{most} streams', most) / chunk:.2f} chunks")
    gaps = []
    for name, read in (("read", True), ("not read", False)):
        with load.beside(read=read):
            gaps.append(streamed(f"{most - LARGE} beside a large one that is {name}", most - LARGE))
    said.append(f"{gaps[1] / gaps[0]:.2f} of that")
    print(f"{'; '.join(said)}; API {memory(api) / 2**20:.1f} MiB; load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a Hugging Face folder; default: the tiny model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data-dir", help="the server's, kept: a second run finds its programs compiled")
    asked = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        data_dir = Path(asked.data_dir or scratch)
        data_dir.mkdir(exist_ok=True)
        with server(data_dir, {}, model=asked.model) as (url, pid):
            api = next(one for one in tree(pid) if b"\0api\0" in Path(f"/proc/{one}/cmdline").read_bytes())
            served = httpx.get(f"{url}/v1/models", headers=KEY).json()["data"][0]["id"]
            load = Load(url, served, asked.tokens, [random_ids(PROMPT) for _ in range(asked.streams)])

            def all_kinds() -> None:
                asyncio.run(load.streams(asked.streams))
                with load.beside(read=True):
                    asyncio.run(load.streams(asked.streams - LARGE))

            warm(all_kinds, data_dir)
            for _ in range(asked.rounds):
                round_of(load, api)


if __name__ == "__main__":
    main()
