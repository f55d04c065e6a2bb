"""Command lines and descendants of processes, from /proc."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def cmdline(pid: int) -> str:
    """The command of a process, or "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def descendants(pid: int, *, beside: Collection[int] = ()) -> list[int]:
    """Pids of the process's descendants, except `beside` and their descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rsplit(")", 1)[1].split()[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = [child for child in children.get(todo.pop(), []) if child not in beside]
        found += below
        todo += below
    return found
