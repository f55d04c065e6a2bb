"""Identities of processes for notes in files and databases: a later process with the same number has another one."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path


def identity(pid: int | None = None) -> str:
    """A process of this machine, with its start, as JSON; default: this process."""
    pid = os.getpid() if pid is None else pid
    return json.dumps({"host": socket.gethostname(), "boot": _boot(), "pid": pid, "birth": _birth(pid)})


def is_alive(identity: str) -> bool | None:
    """Whether the process of an `identity` still runs; None when that cannot be known, as for another machine's."""
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
    """When the process began, in ticks since the machine did; empty when it does not run (or has no /proc)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
