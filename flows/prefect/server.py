"""The embedded Prefect server: a child process with settings under which it was measured to keep up.

It ends when its parent does, however that ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx

from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.supervise import BEATS, ChildProcess, HeartbeatMonitor, watch
from tinkerflow.backend.supervise.processes import tail

START_SECONDS = 120.0
STOP_SECONDS = 5.0
SILENT_SECONDS = 120.0  # longer than a busy machine makes it wait: with its SQLite file locked, a minute was seen
_RETENTION_DAYS = 30
# Seconds between writes. The recorder cuts fractions off (prefect 3.8.8): below 1 it spins, and takes a whole core.
_BATCHED_SERVICES = {"TASK_RUN_RECORDER": "1", "EVENT_PERSISTER": "0.25"}

# What `prefect server start` does, less its command line. Not a module of this room: importing it costs seconds.
_CHILD = """
import sys
from tinkerflow.backend.supervise.processes import die_with_parent
die_with_parent(int(sys.argv[2]))
import uvicorn
uvicorn.run(
    "prefect.server.api.server:create_app", factory=True, host="127.0.0.1", port=int(sys.argv[1]),
    log_level="warning", timeout_keep_alive=5, timeout_graceful_shutdown=2,
)
"""


@dataclass(frozen=True)
class PrefectServer:
    """A running embedded server; `log` is the file that its output is appended to."""

    port: int
    log: Path
    process: ChildProcess

    @property
    def url(self) -> str:
        """What PREFECT_API_URL is for the clients of this server."""
        return f"http://127.0.0.1:{self.port}/api"

    async def ended(self, silence: float = SILENT_SECONDS) -> str:
        """Wait until the server ends, or has answered nothing for `silence` seconds (it was stopped): what happened."""
        answers = 0

        async def ask() -> None:
            nonlocal answers
            answers += await is_healthy(client, self.url)

        async with httpx.AsyncClient(timeout=silence / BEATS) as client:
            if await watch(self.process, HeartbeatMonitor(silence, lambda: answers, ask)) is None:
                return f"ended with status {self.process.status}"
        return f"did not answer for {silence:g} s (stopped?)"

    async def stop(self) -> None:
        """End the server: SIGTERM, and SIGKILL when it does not go within STOP_SECONDS. Repeating is fine."""
        await self.process.stop(STOP_SECONDS)


def server_environment(data_dir: Path, port: int) -> dict[str, str]:
    """The server's variables: its own home and SQLite file in `data_dir`, batched recording, no calls home, retention.

    With batches of 100 the server takes in 80-130 task runs per second; one by one, its default, 20-45.
    """
    home = data_dir / "prefect"
    settings = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
        # relative, so that the page also works through a tunnel or a proxy
        "PREFECT_SERVER_UI_API_URL": "/api",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
        "PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE": "100",
        # flow runs and their task runs are kept for ever unless the vacuum is told
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(_RETENTION_DAYS * 24 * 3600),
    }
    for service, interval in _BATCHED_SERVICES.items():
        settings[f"PREFECT_SERVER_SERVICES_{service}_READ_BATCH_SIZE"] = "100"
        settings[f"PREFECT_SERVER_SERVICES_{service}_BATCH_SIZE"] = "100"
        settings[f"PREFECT_SERVER_SERVICES_{service}_FLUSH_INTERVAL"] = interval
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return inherited | settings


async def start_server(data_dir: Path, port: int) -> PrefectServer:
    """A server that answers on 127.0.0.1:`port`, with its database, pages and log (prefect.log) in `data_dir`.

    ServerError when it ends, or does not answer within START_SECONDS; the message holds the end of its log.
    """
    (data_dir / "prefect" / "ui").mkdir(parents=True, exist_ok=True)
    log = data_dir / "logs" / "prefect.log"
    command = (sys.executable, "-c", _CHILD, str(port), str(os.getpid()))
    server = PrefectServer(port, log, ChildProcess(command, environment=server_environment(data_dir, port), log=log))
    try:
        await _wait_until_healthy(server)
    except BaseException:
        await server.stop()
        raise
    return server


async def _wait_until_healthy(server: PrefectServer) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_SECONDS
    async with httpx.AsyncClient(timeout=2.0) as client:
        while loop.time() < deadline:
            if (status := server.process.status) is not None:
                raise ServerError(f"the Prefect server ended with status {status}:\n{tail(server.log)}")
            if await is_healthy(client, server.url):
                return
            await asyncio.sleep(0.1)
    raise ServerError(f"the Prefect server did not answer within {START_SECONDS:.0f} s:\n{tail(server.log)}")


async def is_healthy(client: httpx.AsyncClient, url: str) -> bool:
    """Whether the Prefect API at `url` answers."""
    try:
        return (await client.get(f"{url}/health")).is_success
    except httpx.HTTPError:
        return False
