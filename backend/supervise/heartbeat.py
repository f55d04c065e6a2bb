"""Detects that a process, or the other end of a connection, has been silent for too long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_START_GRACE = 60.0  # additional seconds of silence allowed while a starting process imports modules
BEATS = 6  # the other end is lost after this many consecutive beats without a sign of life


async def _no_beat() -> None:
    """Send nothing."""


@dataclass
class HeartbeatMonitor:
    """Waits until there is no sign of life for `timeout` seconds.

    The monitor counts its own beats instead of time, so a stall of this process is not blamed on another process. It
    detects silence at most one beat (a sixth of `timeout`) late.

    timeout: seconds of silence.
    signs: returns the number of signs of life so far, for example of received bytes.
    beat: awaited before each pause, to send our own sign of life or to request one. The next beat follows when both
    `beat` and the pause are over.
    is_starting: while this returns True, the timeout is _START_GRACE seconds longer.
    """

    timeout: float
    signs: Callable[[], int]
    beat: Callable[[], Awaitable[None]] = _no_beat
    is_starting: Callable[[], bool] = lambda: False

    async def silence(self) -> float:
        """Wait until the other end is silent. Returns the seconds of silence."""
        pause = self.timeout / BEATS
        starting = BEATS + math.ceil(_START_GRACE / pause)
        missed, seen = 0, -1
        while missed < (starting if self.is_starting() else BEATS):
            await asyncio.gather(self.beat(), asyncio.sleep(pause))
            signs = self.signs()
            missed = missed + 1 if signs == seen else 0
            seen = signs
        return missed * pause
