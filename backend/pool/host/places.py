"""Where the processes of a group are started: on this machine, or (hosts.py) on the hosts that joined."""

from __future__ import annotations

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
_MALLOC = {  # C libraries without tunables ignore them
    "hugetlb": 1,  # asks for huge pages by madvise
    "arena_max": 1,  # all memory from one heap,
    "mmap_max": 0,  # however large the piece,
    "trim_threshold": 2**60,  # and none of it given back unless asked (worker.py)
}


@dataclass(frozen=True)
class Launch:
    """What the processes of one generation have in common.

    port: the driver's. salt: the generation's secret is made of it. plan: PoolConfig.digest.
    """

    generation: int
    port: int
    salt: bytes
    plan: str


class WorkerProcess(Protocol):
    """A worker on any machine. coordinator: "address:port" for jax.distributed, free on its host at the start."""

    pid: int
    coordinator: str

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens to one that has ended."""

    async def ended(self) -> Ending:
        """Wait until it has ended, or cannot be reached any more. May be called any number of times."""
        ...


class WorkerSlot(Protocol):
    """Reserved room for one process, until it is released.

    host: processes with the same one share its devices. capacity: for so many processes, 0 = any number.
    """

    host: str
    capacity: int

    async def spawn(self, launch: Launch, rank: int) -> WorkerProcess:
        """Start the process there. OSError when that fails."""
        ...

    def release(self) -> None:
        """Give the room back: its process has ended, or was never started."""


class Site(Protocol):
    """Where a pool starts its processes."""

    address: str  # that the driver listens on for them

    def secret(self, salt: bytes) -> bytes:
        """The secret of a generation with this salt."""
        ...

    def missing(self, processes: int) -> str:
        """Why so many processes cannot be started now, for people; "" when they can be started."""
        ...

    async def changed(self) -> None:
        """Wait until the answer of `missing` may have changed."""

    def reserve(self, processes: int, plan: str) -> Sequence[WorkerSlot]:
        """Slots for `processes`, in the order of their ranks. Call it only while `missing` is "".

        plan: a digest. When an earlier driver has left a whole group with the same plan, its processes are taken over.
        """
        ...


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
        """Start a worker process, which connects to the driver of `spec`. OSError when that fails.

        coordinator: "address:port" that was free a moment ago, for jax.distributed.
        log_dir: where it appends worker-<rank>.log; None = to our stderr.
        keep: whether it outlives its driver, to be given another one. platform: the setting.
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
        """Have it leave the driver that it serves, and connect to the driver of `spec`."""
        self._process.write(spec.to_line())

    def serve_no_other(self) -> None:
        """Let it end with the driver that it serves."""
        self._process.close_input()

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens when it has ended."""
        self._process.signal(number)

    async def ended(self) -> Ending:
        """Wait until it has ended."""
        return await self._process.ended()


class ThisMachine:
    """Any number of processes, as children of this process, which they do not outlive."""

    address = "127.0.0.1"
    host = "this machine"
    capacity = 0

    def __init__(self, log_dir: Path | None, platform: str = "auto") -> None:
        """log_dir: where workers append worker-<rank>.log; None = to our stderr. platform: the setting."""
        self._log_dir, self._platform = log_dir, platform

    def secret(self, salt: bytes) -> bytes:
        """The salt itself: nobody else sees it."""
        return salt

    def missing(self, processes: int) -> str:
        """There is always room."""
        return ""

    async def changed(self) -> None:
        """Return immediately."""

    def reserve(self, processes: int, plan: str) -> Sequence[WorkerSlot]:
        """The machine itself, `processes` times."""
        return [self] * processes

    async def spawn(self, launch: Launch, rank: int) -> WorkerProcess:
        """Start a child."""
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
        """Nothing is held."""


def generation_secret(group_secret: bytes, salt: bytes) -> bytes:
    """The secret of one generation: hosts derive it from the group's secret, so it never crosses the network."""
    return hmac.new(group_secret, b"generation|" + salt, hashlib.sha256).digest()


def worker_environment(environ: Mapping[str, str], platform: str = "auto") -> dict[str, str]:
    """Our environment as a worker gets it: our packages are found, and on CPUs memory is in huge pages, and kept.

    platform: the setting. On other devices malloc stays as it is: the host's memory is only passed through there.
    XLA's CPU client takes the memory of each execution anew. Small pages cost a sixth of a training step's CPU time,
    and pages that went back to the system and are wanted again a twelfth (tests/benchmarks/RESULTS.md). So a worker
    gives back by itself, every few minutes. Tunables that are set already are kept, and win.
    """
    path = os.pathsep.join(filter(None, (str(_PACKAGES), environ.get("PYTHONPATH"))))
    if expected(platform, environ) != "cpu":
        return {**environ, "PYTHONPATH": path}
    ours = (f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items())
    tunables = ":".join(filter(None, (*ours, environ.get("GLIBC_TUNABLES"))))
    return {**environ, "PYTHONPATH": path, "GLIBC_TUNABLES": tunables}
