"""A small HTTP client for load tests, and the memory and CPU time of a process."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from pathlib import Path
from typing import Any

KEY = "tml-bench"
TICK = os.sysconf("SC_CLK_TCK")


class Connection:
    """One HTTP/1.1 connection, kept alive. The client is small, because it shares the cores with the server."""

    def __init__(self, port: int, key: str = KEY) -> None:
        self._port, self._key = port, key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a POST. AssertionError: its status is not 200."""
        return json.loads(await self.send(path, json.dumps(body).encode()))

    async def send(self, path: str, content: bytes) -> bytes:
        """The body of the answer to a POST. AssertionError: its status is not 200. Reconnects after an idle close."""
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


def shown(took: list[float]) -> str:
    """Percentiles of milliseconds, as text."""
    cuts = statistics.quantiles(took, n=100, method="inclusive") if len(took) > 1 else took * 99
    return f"p50 {cuts[49]:6.1f} ms  p95 {cuts[94]:6.1f} ms  p99 {cuts[98]:6.1f} ms  max {max(took):6.1f} ms"
