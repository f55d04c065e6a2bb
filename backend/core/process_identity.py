"""Identities of processes, for files and databases. A later process with the same pid has a different identity."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path


def identity(pid: int | None = None) -> str:
    """The identity of a process of this machine as JSON, including its start time. Default: this process."""
    pid = os.getpid() if pid is None else pid
    return json.dumps({"host": socket.gethostname(), "boot": _boot(), "pid": pid, "birth": _birth(pid)})


def is_alive(identity: str) -> bool | None:
    """Whether the process of an `identity` still runs; None if unknown, as for a process of another machine."""
    try:
        process = json.loads(identity)
        if process["host"] != socket.gethostname() or process["boot"] != _boot() or not process["birth"]:
            return None
        return _birth(int(process["pid"])) == str(process["birth"])
    except (ValueError, KeyError, TypeError):
        return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _birth(pid: int) -> str:
    """The start time of the process in ticks since boot. Empty if the process does not run, or if there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
