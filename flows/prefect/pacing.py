"""The rate of task runs in Prefect. Above it, operations share task runs. Below it, each operation gets its own."""

from __future__ import annotations

from tinkerflow.backend.core.clock import Clock

BURST = 20.0  # task runs that may be opened in a burst after a quiet period
CREDIT_SECONDS = 2.0  # a flood of openings is forgotten after this time


class Pacing:
    """A token bucket for the task runs of all models together.

    When it runs empty, task runs are shared until it is half full again. Under a load above the rate, task runs
    therefore do not alternate between shared and single. A task run that must be opened is opened on credit.
    """

    def __init__(self, rate: float, clock: Clock) -> None:
        """rate: the largest average number of task runs per second."""
        self._rate = rate
        self._clock = clock
        self._tokens = BURST
        self._filled_at = clock.monotonic()
        self._sharing = False

    @property
    def seconds(self) -> float:
        """Seconds until another task run may be opened; 0 if it may be opened now."""
        self._refill()
        return max(0.0, (1.0 - self._tokens) / self._rate)

    @property
    def sharing(self) -> bool:
        """Whether task runs are shared at present."""
        self._refill()
        return self._sharing

    def open(self) -> None:
        """Count an opened task run, on credit if there are no tokens."""
        self._refill()
        self._tokens = max(-self._rate * CREDIT_SECONDS, self._tokens - 1.0)
        if self._tokens < 1.0:
            self._sharing = True

    def _refill(self) -> None:
        now = self._clock.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._tokens >= BURST / 2:
            self._sharing = False
