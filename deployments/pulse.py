"""The heartbeat of a part, which writes a line to `up` every second while its event loop runs.

A thread writes the lines, so a part also writes them while it imports and loads. After the first call of `turns`, the
lines stop when the loop has not called it for HUNG_SECONDS. A stopped process (SIGSTOP) writes no lines either.

A part without `up`, for example in a pod, writes no heartbeats. If its loop hangs for HUNG_SECONDS, it exits, so that
it is restarted.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from typing import TextIO

BEAT = "beat"
READY = "ready"
BEAT_SECONDS = 1.0
HUNG_SECONDS = 60.0
_KEPT: list[TextIO] = []  # the stream that `keep_stdout` has reserved


class Pulse:
    """The heartbeats of this process. Its event loop calls `turns` about every second."""

    def __init__(self, *, hung_seconds: float = HUNG_SECONDS) -> None:
        """No line is written before `start`. hung_seconds: how long the loop may go without calling `turns`."""
        self._hung_seconds = hung_seconds
        self._turned: float | None = None
        self._beats = False

    def start(self) -> None:
        """Start writing heartbeats."""
        self._beats = True
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def turns(self) -> None:
        """Note that the event loop runs.

        Without heartbeats, this process exits with status 1 if the next call does not come in time. It first writes the
        tracebacks of all threads to standard error. This also works while a thread never releases the GIL.
        """
        self._turned = time.monotonic()
        if not self._beats:
            faulthandler.dump_traceback_later(self._hung_seconds, exit=True)

    def _beat(self) -> None:
        while True:
            if self._turned is None or time.monotonic() - self._turned < self._hung_seconds:
                say(BEAT)
            time.sleep(BEAT_SECONDS)


def say(line: str) -> None:
    """Write a complete line to standard output, from any thread."""
    stream = _KEPT[-1] if _KEPT else sys.stdout
    stream.write(line + "\n")
    stream.flush()


def keep_stdout() -> None:
    """Reserve this process's standard output for `say`. All other output goes to standard error from now on."""
    _KEPT.append(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
