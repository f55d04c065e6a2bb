"""Helpers for processes: ending with the parent, open files, memory given back and mapped, free ports, ends of logs."""

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

_PR_SET_PDEATHSIG = 1
_PORTS = range(20_000, 32_768)


def die_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent ends (Linux; elsewhere a closed pipe or socket must do).

    `parent_pid` is who started it: if that process is gone already, this one ends at once.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def allow_open_files() -> None:
    """Let this process and its children have as many open files, sockets too, as the system allows them at most.

    The usual limit is 1,024, and a client of the SDK holds a connection for each future that it waits for.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def give_back_memory() -> None:
    """Give freed memory back to the system, also where malloc was told to keep it (pool/host/places.py).

    Nothing happens with a C library that has no malloc_trim.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def memory_maps_used() -> float:
    """Which part of the memory maps that Linux lets a process have this one uses; 0.0 where that is not known."""
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as maps:
            return sum(1 for _ in maps) / most
    except OSError:
        return 0.0


def free_port(address: str = "127.0.0.1") -> int:
    """A port of `address` that was free a moment ago. The caller must be ready to try again with another one.

    It is none of those that the system gives to connections going out (Linux: from 32768), so that who listens there
    can end and come back. Raises OSError when nothing can listen at `address`.
    """
    for port in secrets.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(errno.EADDRINUSE, f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free at {address}")


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log, for the message about the process that wrote it."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
