"""Process state that outlives a test. A test that changes it makes later tests depend on their order."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Set
from pathlib import Path

_LOGGERS = ("tinker", "tinkerflow", "prefect")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STATUS = Path("/proc/self/status")  # os.umask would change the mask for a moment, in all threads


def packages() -> set[str]:
    """The imported packages. Prefect counts only after the import of `prefect.main`, which sets up its loggers."""
    found = {name for name in list(sys.modules) if "." not in name}
    return found if "prefect.main" in sys.modules else found - {"prefect"}


def snapshot() -> dict[str, object]:
    """The environment, working folder, umask, import paths, log levels and signal handlers, each by name."""
    state: dict[str, object] = {f"os.environ[{name!r}]": value for name, value in os.environ.items()}
    state.pop("os.environ['PYTEST_CURRENT_TEST']", None)  # changes between the phases of a test
    state |= {f"the level of logger {name!r}": logging.getLogger(name).level for name in _LOGGERS}
    state |= {f"the handler of {number.name}": signal.getsignal(number) for number in _SIGNALS}
    state |= {"the working folder": Path.cwd(), "sys.path": tuple(sys.path)}
    if _STATUS.is_file():
        state["the umask"] = re.findall(r"^Umask:\s*(\d+)$", _STATUS.read_text(), re.MULTILINE)
    return state


def changes(before: dict[str, object], after: dict[str, object], imported: Set[str] = frozenset()) -> list[str]:
    """The differences of two snapshots, as texts.

    imported: packages that were imported in between. The first import of a package may add variables to the
    environment and set the level of its own logger.
    """
    ours = {f"the level of logger {name!r}" for name in imported}
    if imported:
        ours |= {name for name in after.keys() - before.keys() if name.startswith("os.environ")}
    return [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}"
        for name in sorted((before.keys() | after.keys()) - ours)
        if before.get(name) != after.get(name)
    ]
