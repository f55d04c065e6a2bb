"""Starting a worker process on this machine, and saying how one ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tinkerflow
from tinkerflow.backend.pool.protocol.handshake import LaunchSpec

_PACKAGES = Path(tinkerflow.__file__).parents[1]
_MALLOC = {  # C libraries without tunables ignore them
    "hugetlb": 1,  # asks for huge pages by madvise
    "arena_max": 1,  # all memory from one heap,
    "mmap_max": 0,  # however large the piece,
    "trim_threshold": 2**60,  # and none of it given back unless asked (worker.py)
}
_STDERR = 2  # ours, inherited


@dataclass(frozen=True)
class Ending:
    """How a process ended, as in "rank 2 was killed by SIGKILL". crashed: by itself, not by a signal from outside."""

    how: str
    crashed: bool


async def spawn_worker(spec: LaunchSpec, coordinator: str, *, log_dir: Path | None, keep: bool = False) -> ChildProcess:
    """Start a worker process, which connects to the driver of `spec`. It writes to our stderr, or into `log_dir`.

    coordinator: "address:port" that was free a moment ago. keep: it outlives its driver, to be given another one.
    The worker leads a session of its own: Ctrl-C reaches the supervisor only.
    """
    output = _STDERR if log_dir is None else _log_file(log_dir, spec.rank)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tinkerflow.backend.pool.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=worker_environment(os.environ),
            start_new_session=True,
        )
    finally:
        if output != _STDERR:
            os.close(output)
    child = ChildProcess(process, coordinator)
    child.serve(spec)
    if not keep:
        child.serve_no_other()
    return child


class ChildProcess:
    """A worker that this process started; use `spawn_worker`."""

    def __init__(self, process: asyncio.subprocess.Process, coordinator: str) -> None:
        """Its standard input is a pipe of ours."""
        assert process.stdin is not None  # for the type checker
        self.pid = process.pid
        self.coordinator = coordinator
        self._process = process
        self._input = process.stdin

    def serve(self, spec: LaunchSpec) -> None:
        """Have it leave the driver that it serves, and connect to that of `spec`."""
        self._input.write(spec.to_line())  # far less than a pipe holds: no need to drain

    def serve_no_other(self) -> None:
        """Let it end with the driver that it serves."""
        self._input.close()

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens to one that has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def ended(self) -> Ending:
        """Wait until it has ended."""
        status = await self._process.wait()
        return Ending(how_it_ended(status), crashed=status != -signal.SIGKILL)


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Our environment as a worker gets it: our packages are found, and memory is in huge pages, and kept when freed.

    XLA's CPU client takes the memory of each execution anew. Small pages cost a sixth of a training step's CPU time,
    and pages that went back to the system and are wanted again a twelfth (tests/benchmarks/RESULTS.md). So a worker
    gives back by itself, every few minutes. Tunables that are set already are kept, and win.
    """
    path = os.pathsep.join(filter(None, (str(_PACKAGES), environ.get("PYTHONPATH"))))
    ours = (f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items())
    tunables = ":".join(filter(None, (*ours, environ.get("GLIBC_TUNABLES"))))
    return {**environ, "PYTHONPATH": path, "GLIBC_TUNABLES": tunables}


def _log_file(folder: Path, rank: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / f"worker-{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def how_it_ended(code: int) -> str:
    """`was killed by SIGKILL`, `ended with exit status 1`: for a process's return code."""
    if code >= 0:
        return f"ended with exit status {code}"
    known = {s.value: s.name for s in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"
