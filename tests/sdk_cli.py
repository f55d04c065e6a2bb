"""The SDK's command line in a process of its own, as people run it."""

from __future__ import annotations

import subprocess
import sys

# Without the interpreter's own end: the SDK's event loop runs in a daemon thread. Before Python 3.14, a daemon thread
# that wakes while the interpreter ends may abort the process (SIGABRT), although the command has succeeded.
_COMMAND = """
import os, sys
from tinker.cli.__main__ import main_cli
try:
    main_cli()
except SystemExit as end:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code or 0)
"""


def sdk_cli(*arguments: str, env: dict[str, str] | None = None) -> str:
    """What `tinker ARGUMENTS` prints; AssertionError, with what it says, where it fails."""
    command = [sys.executable, "-c", _COMMAND, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
