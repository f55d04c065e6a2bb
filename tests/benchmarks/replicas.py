"""Several engines and API replicas on one Postgres, behind a balancer. Each part can be killed and replaced.

Used by failover.py, load.py and tests/e2e/test_failover.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tinkerflow.backend.core.joining import make_secret
from tinkerflow.backend.supervise.processes import free_port, tail

START_SECONDS = 600.0
_RIGHTS = () if os.getuid() == 0 else ("--map-root-user",)
_ELSEWHERE = ("unshare", "--uts", *_RIGHTS, "sh", "-c", 'hostname "$0" && exec "$@"')
READY = "ready\n"  # the output of a part that serves


class Part:
    """A process that runs a part of the service."""

    def __init__(
        self, name: str, number: int, environment: Mapping[str, str], log_dir: Path, *options: str, apart: bool = False
    ) -> None:
        """Start `tinkerflow NAME OPTIONS`, which logs to NAME-NUMBER.log in log_dir.

        apart: gives it its own host name, so that other parts cannot see whether its process lives. environment: the
        complete environment.
        """
        self.name = f"{name}-{number}"
        self.log = log_dir / f"{self.name}.log"
        with self.log.open("a") as output:
            command = [sys.executable, "-m", "tinkerflow", name, *options]
            if apart:
                command = [*_ELSEWHERE, self.name, *command]
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=dict(environment))

    def says(self, words: str) -> bool:
        """Whether its log contains these words. RuntimeError, with the end of the log: the part has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} has ended:\n{tail(self.log)}")
        return words in self.log.read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Send SIGTERM, and kill the process after a minute."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()


class Balancer:
    """A TCP load balancer on loopback, which connects to the replicas in turn and skips those that refuse."""

    def __init__(self, ports: list[int]) -> None:
        """Return once the balancer listens. ports: the replicas' ports."""
        self._ports, self._next = ports, 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        threading.Thread(target=self._run, name="balancer", daemon=True).start()
        self._started.wait()

    def close(self) -> None:
        """Stop listening, and drop all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024))
        self.port = int(server.sockets[0].getsockname()[1])
        self._started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.1))
        self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in self._ports:
            self._next = (self._next + 1) % len(self._ports)
            with suppress(OSError):
                there, back = await asyncio.open_connection("127.0.0.1", self._ports[self._next])
                await asyncio.gather(_carry(reader, back), _carry(there, writer))
                return
        writer.close()


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.close()


class Replicas:
    """The parts of a service, by kind. url: the API's address for clients."""

    def __init__(
        self, data_dir: Path, database_url: str, settings: Mapping[str, str], *, apis: int, apart: bool
    ) -> None:
        """Start only the balancer. settings: further variables TINKERFLOW_<NAME>."""
        self.data_dir, self._apart = data_dir, apart
        self._group = f"127.0.0.1:{free_port()}"
        ours = {"DATABASE_URL": database_url, "GROUP": self._group, "DATA_DIR": str(data_dir), "PREFECT": "off"}
        settings = {"WARM_UP": "false", **settings, **ours}
        self._environment = os.environ | {f"TINKERFLOW_{name}": value for name, value in settings.items()}
        self._ports = [free_port() for _ in range(apis)]
        self._numbers = {"engine": 0, "api": 0, "worker": 0}
        self.engines: list[Part] = []
        self.apis: list[Part] = []
        self.workers: list[Part] = []
        self._balancer = Balancer(self._ports)
        self.url = f"http://127.0.0.1:{self._balancer.port}"
        make_secret(data_dir / "group.secret")

    def start_engine(self) -> Part:
        """Start an engine, which works or stands by."""
        self.engines.append(self._start("engine", self._environment, apart=self._apart))
        return self.engines[-1]

    def start_api(self, place: int) -> Part:
        """Start the replica at this place behind the balancer, counted from 0."""
        part = self._start("api", {**self._environment, "TINKERFLOW_PORT": str(self._ports[place])})
        self.apis[place : place + 1] = [part]
        return part

    def start_worker(self) -> Part:
        """Start a worker host with room for one process."""
        options = ("--group", self._group, "--processes", "1")
        self.workers.append(self._start("worker", self._environment, *options))
        return self.workers[-1]

    def _start(self, kind: str, environment: Mapping[str, str], *options: str, apart: bool = False) -> Part:
        self._numbers[kind] += 1
        return Part(kind, self._numbers[kind], environment, self.data_dir, *options, apart=apart)

    def close(self) -> None:
        """Stop all parts and the balancer."""
        for part in (*self.apis, *self.engines, *self.workers):
            part.stop()
        self._balancer.close()


@contextmanager
def replicas(
    data_dir: Path,
    database_url: str,
    settings: Mapping[str, str],
    *,
    apis: int = 2,
    engines: int = 2,
    apart: bool = False,
) -> Iterator[Replicas]:
    """Run all parts for the block; yield them once they serve.

    data_dir: the data dir of all parts. database_url: an empty Postgres database. settings: further variables
    TINKERFLOW_<NAME>. apis, engines: how many to run. A single worker process serves them. apart: engines have
    different host names, as on different machines, so a standby engine cannot see that the other one is dead and waits
    for the end of its lease.
    """
    found = Replicas(data_dir, database_url, settings, apis=apis, apart=apart)
    try:
        found.start_worker()
        first = found.start_engine()
        wait_for(first, READY)
        for place in range(apis):
            found.start_api(place)
        for _ in range(engines - 1):
            wait_for(found.start_engine(), "uses this journal")
        for api in found.apis:
            wait_for(api, READY)
        yield found
    finally:
        found.close()


def wait_for(part: Part, words: str) -> None:
    """Wait until the part has logged these words. RuntimeError: the part has ended, or START_SECONDS have passed."""
    until = time.monotonic() + START_SECONDS
    while not part.says(words):
        if time.monotonic() > until:
            raise RuntimeError(f"{part.name} did not say {words!r} in {START_SECONDS:g} s:\n{tail(part.log)}")
        time.sleep(0.05)
