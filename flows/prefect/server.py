"""The embedded Prefect server: a child process, with settings that let it keep up in measurements.

It ends with its parent, even if the parent is killed. Clients need this data dir's credential
(backend/core/prefect_access.py), and must use a name of this machine (guard.py). The parent opens the listening socket,
and keeps it open while the server restarts, so that no other program can take the server's place.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import httpx
from packaging.version import Version

from tinkerflow.backend.core.disk import make_folder, sqlite_url
from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.core.prefect_access import PrefectAccess, forget_server, make_credential, record_server
from tinkerflow.backend.supervise import BEATS, ChildProcess, HeartbeatMonitor, watch
from tinkerflow.backend.supervise.processes import tail

log = logging.getLogger(__name__)

START_SECONDS = 300.0
STOP_SECONDS = 5.0
PORT_SECONDS = 2.0  # time for the server of a killed engine to release its port
SILENT_SECONDS = 120.0  # longer than waits on a busy machine: we saw a minute while the SQLite file was locked
_RETENTION_DAYS = 30
# Seconds between writes. The recorder cuts fractions off (prefect 3.8.8): below 1 it spins, and takes a whole core.
_BATCHED_SERVICES = {"TASK_RUN_RECORDER": "1", "EVENT_PERSISTER": "0.25"}


@dataclass(frozen=True)
class PrefectServer:
    """A running embedded server. access: how to reach the server. log: the file that its output is appended to."""

    access: PrefectAccess
    data_dir: Path
    log: Path
    process: ChildProcess

    async def ended(self, silence: float = SILENT_SECONDS) -> str:
        """Wait until the server ends, or has not answered for `silence` seconds. Returns which, as text."""
        answers = 0

        async def ask() -> None:
            nonlocal answers
            answers += await is_healthy(client, self.access.api_url)

        async with httpx.AsyncClient(timeout=silence / BEATS) as client:
            if await watch(self.process, HeartbeatMonitor(silence, lambda: answers, ask)) is None:
                return f"ended with status {self.process.status}"
        return f"did not answer for {silence:g} s (stopped?)"

    async def stop(self) -> None:
        """End the server: SIGTERM, then SIGKILL if it does not end within STOP_SECONDS. Idempotent."""
        forget_server(self.data_dir, self.process.pid)
        await self.process.stop(STOP_SECONDS)


async def listen(*ports: int) -> socket.socket:
    """A listening socket on 127.0.0.1 at the first free one of `ports`, or at another port if all are in use."""
    loop = asyncio.get_running_loop()
    for port in dict.fromkeys(ports):
        deadline = loop.time() + PORT_SECONDS
        while True:
            try:
                return socket.create_server(("127.0.0.1", port), backlog=1024)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            if loop.time() > deadline:
                break
            await asyncio.sleep(0.1)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    log.warning("port %d is in use: the Prefect server listens on port %d instead", port, listener.getsockname()[1])
    return listener


def server_environment(data_dir: Path, port: int, credential: str) -> dict[str, str]:
    """The server's variables: its home and SQLite file in `data_dir`, batched recording, no telemetry, retention.

    Requests need the credential. No page of another origin may read an answer.

    With batches of 100, the server records 80-130 task runs per second. Its default, one by one, records 20-45.
    """
    home = data_dir / "prefect"
    settings = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": sqlite_url(home / "prefect.db", "sqlite+aiosqlite"),
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_API_AUTH_STRING": credential,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port}",
        # relative, so that the page also works through a tunnel or a proxy
        "PREFECT_SERVER_UI_API_URL": "/api",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
        "PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE": "100",
        # without this, flow runs and their task runs are kept forever
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(_RETENTION_DAYS * 24 * 3600),
    }
    for service, interval in _BATCHED_SERVICES.items():
        settings[f"PREFECT_SERVER_SERVICES_{service}_READ_BATCH_SIZE"] = "100"
        settings[f"PREFECT_SERVER_SERVICES_{service}_BATCH_SIZE"] = "100"
        settings[f"PREFECT_SERVER_SERVICES_{service}_FLUSH_INTERVAL"] = interval
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return inherited | settings


def check_versions(prefect: str = version("prefect"), sqlalchemy: str = version("sqlalchemy")) -> None:
    """Raise ServerError if the server cannot schedule flow runs with the installed versions."""
    if Version(sqlalchemy) >= Version("2.1") and Version(prefect) < Version("3.9.1"):
        raise ServerError(
            f"prefect {prefect} cannot schedule runs with SQLAlchemy {sqlalchemy}: install prefect 3.9.1 or newer, or "
            "SQLAlchemy before 2.1"
        )


async def start_server(data_dir: Path, listener: socket.socket, public_url: str = "") -> PrefectServer:
    """Start a server that answers at `listener`, with its database, pages and log (prefect.log) in `data_dir`.

    listener: see `listen`. public_url: the URL of a proxy that serves it to people, if there is one. ServerError: the
    server ends, or does not answer within START_SECONDS, with the end of its log in the message; or the versions are
    wrong.
    """
    check_versions()
    credential = make_credential(data_dir)
    make_folder(data_dir / "prefect" / "ui")
    log_file, port = data_dir / "logs" / "prefect.log", listener.getsockname()[1]
    module, parent = "tinkerflow.flows.prefect.server_process", str(os.getpid())
    process = ChildProcess(
        (sys.executable, "-m", module, str(listener.fileno()), parent, *filter(None, (public_url,))),
        environment=server_environment(data_dir, port, credential),
        log=log_file,
        sockets=(listener.fileno(),),
    )
    url = f"http://127.0.0.1:{port}"
    access = PrefectAccess(f"{url}/api", credential, public_url.rstrip("/") or url)
    server = PrefectServer(access, data_dir, log_file, process)
    try:
        await _wait_until_healthy(server)
        record_server(data_dir, port, process.pid, public_url)
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
            if await is_healthy(client, server.access.api_url):
                return
            await asyncio.sleep(0.1)
    raise ServerError(f"the Prefect server did not answer within {START_SECONDS:.0f} s:\n{tail(server.log)}")


async def is_healthy(client: httpx.AsyncClient, url: str) -> bool:
    """Whether the Prefect API at `url` answers."""
    try:
        return (await client.get(f"{url}/health")).is_success
    except httpx.HTTPError:
        return False
