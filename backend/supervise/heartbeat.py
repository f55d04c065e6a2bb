"""Signs of life: noticing that a process, or the other end of a connection, has been silent for too long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_START_GRACE = 60.0  # seconds that a starting process may be silent for longer: it imports and loads
BEATS = 6  # after so many beats in a row without a sign of life, the other end is stopped or cut off


async def _no_beat() -> None:
    """Send nothing."""


@dataclass
class HeartbeatMonitor:
    """Waits until signs of life stay away for `timeout` seconds.

    Our own beats are counted, not time, so a stall of this process accuses nobody. The end of a silence of `timeout`
    seconds is noticed at most one beat, a sixth of `timeout`, later.

    timeout: seconds of silence.
    signs: gives the number of signs of life that have come so far, for example of received bytes.
    beat: is awaited before each pause, to send our own sign of life or to ask for one. The next beat follows when both
    `beat` and the pause are over.
    is_starting: while it gives True, the timeout is _START_GRACE seconds longer.
    """

    timeout: float
    signs: Callable[[], int]
    beat: Callable[[], Awaitable[None]] = _no_beat
    is_starting: Callable[[], bool] = lambda: False

    async def silence(self) -> float:
        """Return when the other end is silent: for how many seconds it has been."""
        pause = self.timeout / BEATS
        starting = BEATS + math.ceil(_START_GRACE / pause)
        missed, seen = 0, -1
        while missed < (starting if self.is_starting() else BEATS):
            await asyncio.gather(self.beat(), asyncio.sleep(pause))
            signs = self.signs()
            missed = missed + 1 if signs == seen else 0
            seen = signs
        return missed * pause
