"""How a part tells `up` that it is well: a line every second, for as long as its event loop turns.

A thread writes them, so that they come while the part imports and loads; once the loop has said that it turns, they
stop when it has not said so for HUNG_SECONDS. A process that was stopped (SIGSTOP) writes nothing either.
"""

from __future__ import annotations

import sys
import threading
import time

BEAT = "beat"
READY = "ready"
BEAT_SECONDS = 1.0
HUNG_SECONDS = 60.0


class Pulse:
    """The beats of this process; `turns` is what its event loop calls about every second."""

    def __init__(self, *, hung_seconds: float = HUNG_SECONDS) -> None:
        """Nothing is written before `start`. hung_seconds: how long the loop may be silent."""
        self._hung_seconds = hung_seconds
        self._turned: float | None = None

    def start(self) -> None:
        """Write beats from now on."""
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def turns(self) -> None:
        """The event loop turns."""
        self._turned = time.monotonic()

    def _beat(self) -> None:
        while True:
            if self._turned is None or time.monotonic() - self._turned < self._hung_seconds:
                say(BEAT)
            time.sleep(BEAT_SECONDS)


def say(line: str) -> None:
    """Write a line to standard output, whole, from any thread."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
