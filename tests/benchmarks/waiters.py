"""Thousands of waiting futures on one API process: what a heartbeat takes meanwhile, and what a waiter costs.

    .venv/bin/python tests/benchmarks/waiters.py [--waiters 2000] [--seconds 40]

Starts `tinkerflow api` alone in a scratch folder, over SQLite, and stores samples that nobody answers. Every waiter has
a connection of its own, as the SDK's have, and asks again as soon as its poll ends. Two rounds: one future each
(retrieve_future), and one sampling session each (retrieve_futures). A heartbeat is sent every 20 ms. Prints wall times
of heartbeats before and while they wait, and the server's memory and CPU. RESULTS.md keeps the output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tinkerflow.backend.core.ids import sampler_id
from tinkerflow.backend.journal import Journal, Kind, NewRequest, NewSampler, NewSession, migrate
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.supervise.processes import allow_open_files, free_port

OWNER, KEY = "local", "tml-bench"
TICK = os.sysconf("SC_CLK_TCK")


class Connection:
    """One HTTP/1.1 connection, kept alive; as little client as possible beside the server on the same cores."""

    def __init__(self, port: int, key: str = KEY) -> None:
        self._port, self._key = port, key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer; AssertionError unless it is a 200."""
        return json.loads(await self.send(path, json.dumps(body).encode()))

    async def send(self, path: str, content: bytes) -> bytes:
        """The answer's body; AssertionError unless it is a 200. A connection closed while idle is opened again."""
        kept = self._streams is not None
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: a\r\nX-API-Key: {self._key}\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            if kept:
                return await self.send(path, content)
            raise
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
        answer = await reader.readexactly(length)
        assert " 200 " in lines[0], (lines[0], answer)
        return answer

    def close(self) -> None:
        """Close the connection; the next call opens another one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """CPU-seconds, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


async def heartbeats(port: int, session: str, seconds: float) -> list[float]:
    """Milliseconds of each of the heartbeats sent every 20 ms."""
    connection, took = Connection(port), []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        await connection.post("session_heartbeat", {"session_id": session})
        took.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(0.02)
    return took


def shown(took: list[float]) -> str:
    """Percentiles in words."""
    cuts = statistics.quantiles(took, n=100, method="inclusive") if len(took) > 1 else took * 99
    return f"p50 {cuts[49]:6.1f} ms  p95 {cuts[94]:6.1f} ms  p99 {cuts[98]:6.1f} ms  max {max(took):6.1f} ms"


Wait = Callable[[int], Coroutine[Any, Any, None]]


async def round_of(
    name: str,
    waiters: int,
    seconds: float,
    port: int,
    pid: int,
    session: str,
    wait: Callable[[int], Coroutine[Any, Any, None]],
) -> None:
    """Let them wait, and beat meanwhile."""
    before = memory(pid)
    tasks = [asyncio.create_task(wait(n)) for n in range(waiters)]
    arriving = await heartbeats(port, session, 5.0)
    spent = cpu_seconds(pid)
    took = await heartbeats(port, session, seconds)
    spent = cpu_seconds(pid) - spent
    assert not any(task.done() for task in tasks), next(task for task in tasks if task.done())
    each = (memory(pid) - before) / waiters / 1024
    load = os.getloadavg()[0]
    print(f"{name}: {waiters} waiting, load {load:.1f}, server {spent / seconds * 100:.0f} % of a core", flush=True)
    print(f"    heartbeat while they arrive ({len(arriving)} in 5 s): {shown(arriving)}")
    print(f"    heartbeat while they wait ({len(took)} in {seconds:.0f} s): {shown(took)}")
    print(f"    memory per waiter: {each:.1f} KiB", flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run(port: int, pid: int, journal: Journal, waiters: int, seconds: float) -> None:
    """Both rounds."""
    session = journal.sessions.create(NewSession(OWNER, "0"))
    samplers = [sampler_id(session, n) for n in range(waiters)]
    requests = []
    for sampler in samplers:
        journal.samplers.open(NewSampler(sampler, session, OWNER, "m"))
        new = NewRequest(Kind.SAMPLE, OWNER, b"{}", "x", sampler_id=sampler, seq_id=0)
        requests.append(journal.requests.submit(new))
    print(f"heartbeat alone: {shown(await heartbeats(port, session, 5.0))}", flush=True)

    async def one_future(n: int) -> None:
        connection = Connection(port)
        while True:
            answer = await connection.post("retrieve_future", {"request_id": requests[n], "allow_metadata_only": True})
            assert answer["type"] == "try_again", answer

    async def one_session(n: int) -> None:
        connection = Connection(port)
        target = {"type": "sampling_session", "sampling_session_id": samplers[n], "cloned_sampler_id": 0}
        while True:
            answer = await connection.post("retrieve_futures", {"target": target, "prev_cursor": 0})
            assert answer == {"completions": [], "cursor": 0}, answer

    await round_of("retrieve_future", waiters, seconds, port, pid, session, one_future)
    await asyncio.sleep(2)
    await round_of("retrieve_futures", waiters, seconds, port, pid, session, one_session)


def main() -> None:
    """Start the server, measure, stop it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiters", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=40.0)
    given = parser.parse_args()
    allow_open_files()
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        settings = Settings(data_dir=Path(folder), port=port)
        migrate(settings.journal_url)
        journal = Journal.open(settings.journal_url)
        journal.base_models.register([("m", "{}")])
        command = [sys.executable, "-m", "tinkerflow", "api"]
        server = subprocess.Popen(command, env={**os.environ, **settings.environment()})
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert server.poll() is None, "the server ended"
                time.sleep(0.1)
            asyncio.run(run(port, server.pid, journal, given.waiters, given.seconds))
        finally:
            server.terminate()
            server.wait(30)
            journal.close()


if __name__ == "__main__":
    main()
