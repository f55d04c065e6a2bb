"""How long a process that ended waits for its next start."""

from __future__ import annotations

from dataclasses import dataclass

from tinkerflow.backend.retry import backoff

STEADY_SECONDS = 60.0  # a process that served for so long ends a row of failures


@dataclass
class Restarts:
    """Counts the failures in a row of something that is started again each time that it ends."""

    failures: int = 0

    def pause(self, *, steady: bool) -> float:
        """Seconds until the next start: `backoff` of the failures in a row, this one included.

        steady: it served for STEADY_SECONDS, or its end was not its fault: a new row begins.
        """
        self.failures = 1 if steady else self.failures + 1
        return backoff(self.failures)
