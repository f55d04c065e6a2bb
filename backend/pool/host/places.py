"""Starts the processes of a group on this machine. The module hosts.py starts them on hosts that joined."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import tinkerflow
from tinkerflow.backend.pool.host.devices import expected
from tinkerflow.backend.pool.protocol.handshake import LaunchSpec
from tinkerflow.backend.supervise import ChildProcess, Ending
from tinkerflow.backend.supervise.processes import free_port

_PACKAGES = Path(tinkerflow.__file__).parents[1]
_MALLOC = {  # C libraries without tunables ignore these
    "hugetlb": 1,  # request huge pages by madvise
    "arena_max": 1,  # use one heap
    "mmap_max": 0,  # also use the heap for large blocks
    "trim_threshold": 2**60,  # keep freed memory until malloc_trim is called (worker.py)
}


@dataclass(frozen=True)
class Launch:
    """The parameters shared by the processes of one generation.

    port: where the driver listens. salt: the generation's secret is derived from the salt. plan: PoolConfig.digest.
    """

    generation: int
    port: int
    salt: bytes
    plan: str


class WorkerProcess(Protocol):
    """A worker on any machine. coordinator: "address:port" for jax.distributed, which was free on the worker's host."""

    pid: int
    coordinator: str

    def signal(self, number: int) -> None:
        """Send a signal. Does nothing if the process has ended."""

    async def ended(self) -> Ending:
        """Wait until the process has ended or become unreachable. May be called any number of times."""


class WorkerSlot(Protocol):
    """Reserved capacity for one process.

    host: identifies the host. Processes with the same host share its devices. name: the host's name for people.
    capacity: how many processes the host can run; 0: any number.
    """

    host: str
    name: str
    capacity: int

    async def spawn(self, launch: Launch, rank: int) -> WorkerProcess:
        """Start the process in this slot. OSError: the start failed."""

    def release(self) -> None:
        """Return the capacity. Call this when the process has ended or was never started."""

    def take_out(self, why: str) -> None:
        """Start no more processes on the host, for the reason `why`, until a person restarts it."""


class Site(Protocol):
    """The place where a pool starts its processes. address: where the driver listens for them."""

    address: str

    def secret(self, salt: bytes) -> bytes:
        """The secret of the generation with this salt."""

    def missing(self, processes: int) -> str:
        """Why this many processes cannot be started now, for people; "" if they can."""

    async def changed(self) -> None:
        """Wait until the result of `missing` may have changed."""

    def reserve(self, processes: int, plan: str) -> Sequence[WorkerSlot]:
        """Slots for `processes`, in rank order. Call this only while `missing` is "".

        plan: PoolConfig.digest. If an earlier driver left a complete group with the same plan, its processes are taken
        over.
        """


class LocalWorker:
    """A worker that this process started."""

    def __init__(
        self,
        spec: LaunchSpec,
        coordinator: str,
        *,
        log_dir: Path | None,
        keep: bool = False,
        platform: str = "auto",
    ) -> None:
        """Start a worker process, which connects to the driver of `spec`. OSError: the start failed.

        coordinator: "address:port" that was free a moment ago, for jax.distributed.
        log_dir: the folder of the worker's log, worker-<rank>.log; None: the worker writes to our stderr.
        keep: whether the process outlives its driver and waits for another driver. platform: the setting `platform`.
        """
        command = (sys.executable, "-m", "tinkerflow.backend.pool.worker")
        log = None if log_dir is None else log_dir / f"worker-{spec.rank}.log"
        self._process = ChildProcess(
            command, environment=worker_environment(os.environ, platform), log=log, input_lines=True
        )
        self.pid = self._process.pid
        self.coordinator = coordinator
        self.serve(spec)
        if not keep:
            self.serve_no_other()

    def serve(self, spec: LaunchSpec) -> None:
        """Make the process leave its driver and connect to the driver of `spec`."""
        self._process.write(spec.to_line())

    def serve_no_other(self) -> None:
        """Make the process end with its current driver."""
        self._process.close_input()

    def signal(self, number: int) -> None:
        self._process.signal(number)

    async def ended(self) -> Ending:
        return await self._process.ended()


class ThisMachine:
    """A site for any number of processes on this machine. They are children of this process, and end with it."""

    address = "127.0.0.1"
    host = name = "this machine"
    capacity = 0

    def __init__(self, log_dir: Path | None, platform: str = "auto") -> None:
        """log_dir: the folder of worker-<rank>.log; None: workers write to our stderr. platform: the setting."""
        self._log_dir, self._platform = log_dir, platform
        self._taken_out = ""

    def secret(self, salt: bytes) -> bytes:
        """The salt itself, which stays on this machine."""
        return salt

    def missing(self, processes: int) -> str:
        """Return "", unless the machine was taken out."""
        return self._taken_out and f"this machine is out of service: {self._taken_out}; restart the service to use it"

    async def changed(self) -> None:
        """Wait forever: a machine that was taken out is never used again."""
        await asyncio.Event().wait()

    def reserve(self, processes: int, plan: str) -> Sequence[WorkerSlot]:
        """The machine itself, `processes` times."""
        return [self] * processes

    async def spawn(self, launch: Launch, rank: int) -> WorkerProcess:
        """Start a child process."""
        spec = LaunchSpec(
            host=self.address,
            port=launch.port,
            secret=self.secret(launch.salt).hex(),
            generation=launch.generation,
            rank=rank,
            parent=os.getpid(),
            compile_cache_dir="",
        )
        return LocalWorker(spec, f"{self.address}:{free_port()}", log_dir=self._log_dir, platform=self._platform)

    def release(self) -> None:
        """Do nothing, because no capacity is reserved."""

    def take_out(self, why: str) -> None:
        """Start no more processes of this pool, for the reason `why`."""
        self._taken_out = why


def generation_secret(group_secret: bytes, salt: bytes) -> bytes:
    """The secret of one generation. Hosts derive it from the group's secret, so it never crosses the network."""
    return hmac.new(group_secret, b"generation|" + salt, hashlib.sha256).digest()


def worker_environment(environ: Mapping[str, str], platform: str = "auto") -> dict[str, str]:
    """The environment variables of a worker, for finding our packages and, on CPUs, keeping memory in huge pages.

    XLA's CPU client allocates new memory in each execution. Small pages cost a sixth of a training step's CPU time, and
    returning pages to the system costs a twelfth (tests/benchmarks/RESULTS.md). So malloc keeps freed memory, and the
    worker returns it every few minutes. On GPUs and TPUs malloc is unchanged, because host memory is only a buffer
    there.

    environ: our environment; its own malloc tunables take precedence. platform: the setting `platform`.
    """
    path = os.pathsep.join(filter(None, (str(_PACKAGES), environ.get("PYTHONPATH"))))
    if expected(platform, environ) != "cpu":
        return {**environ, "PYTHONPATH": path}
    ours = (f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items())
    tunables = ":".join(filter(None, (*ours, environ.get("GLIBC_TUNABLES"))))
    return {**environ, "PYTHONPATH": path, "GLIBC_TUNABLES": tunables}
