"""How a part tells `up` that it is well: it writes a line every second, as long as its event loop runs.

A thread writes the lines, so that they come while the part imports and loads. Once the loop has called `turns`, the
lines stop when it has not called again for HUNG_SECONDS. A process that was stopped (SIGSTOP) writes nothing either.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TextIO

BEAT = "beat"
READY = "ready"
BEAT_SECONDS = 1.0
HUNG_SECONDS = 60.0
_KEPT: list[TextIO] = []  # by `keep_stdout`


class Pulse:
    """The beats of this process. Its event loop calls `turns` about every second."""

    def __init__(self, *, hung_seconds: float = HUNG_SECONDS) -> None:
        """Nothing is written before `start`. hung_seconds: how long the loop may be silent."""
        self._hung_seconds = hung_seconds
        self._turned: float | None = None

    def start(self) -> None:
        """Write beats from now on."""
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def turns(self) -> None:
        """Note that the event loop runs."""
        self._turned = time.monotonic()

    def _beat(self) -> None:
        while True:
            if self._turned is None or time.monotonic() - self._turned < self._hung_seconds:
                say(BEAT)
            time.sleep(BEAT_SECONDS)


def say(line: str) -> None:
    """Write a line to standard output, whole, from any thread."""
    stream = _KEPT[-1] if _KEPT else sys.stdout
    stream.write(line + "\n")
    stream.flush()


def keep_stdout() -> None:
    """Keep this process's standard output for `say`: what anything else prints goes to standard error from now on."""
    _KEPT.append(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
