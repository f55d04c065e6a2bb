"""Helpers for processes: ending with the parent, open-file limits, freed and mapped memory, free ports, logs."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import secrets
import signal
import socket
import sys
from pathlib import Path

from tinkerflow.backend.core.hosts import family_of

_PR_SET_PDEATHSIG = 1
_PORTS = range(20_000, 32_768)
_TAIL_BYTES = 2**16


def die_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process when its parent ends. Only Linux supports this.

    parent_pid: the process that started this process. If that process is already gone, this process ends immediately.
    number: the signal's number.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def allow_open_files() -> None:
    """Raise the limit on open files, including sockets, of this process and its children to the system's maximum.

    The usual limit is 1,024, and an SDK client uses a connection for each future that it awaits.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def give_back_memory() -> None:
    """Return freed memory to the system, even if malloc is configured to keep it (pool/host/places.py).

    Does nothing if the C library has no malloc_trim.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def memory_maps_used() -> float:
    """The fraction of Linux's limit on memory maps that this process uses; 0.0 if the limit is unknown."""
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as maps:
            return sum(1 for _ in maps) / most
    except OSError:
        return 0.0


def free_port(address: str = "127.0.0.1") -> int:
    """A port of `address` that was free a moment ago. The caller must be ready to try another port.

    The port is below the range that Linux uses for outgoing connections (from 32768), so that a server can end and
    listen there again. OSError: no process can listen at `address`.
    """
    for port in secrets.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket(family_of(address)) as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(errno.EADDRINUSE, f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free at {address}")


def tail(log: Path, lines: int = 20, since: int = 0) -> str:
    """The last lines of a log, for a message about the process that wrote the log. A log may have gigabytes.

    since: bytes at the beginning of the log that come from earlier processes.
    """
    with log.open("rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
