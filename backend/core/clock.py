"""The clock, which is passed in so that tests can control time, and a call that repeats every second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Wall time and monotonic time."""

    def now(self) -> datetime:
        """The current time, timezone-aware, in UTC."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never decreases."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()


def add_seconds(moment: datetime, seconds: float) -> datetime:
    """`moment` plus `seconds`, or the first or last moment of the calendar if the sum lies outside it."""
    try:
        return moment + timedelta(seconds=seconds)
    except OverflowError:
        return (datetime.max if seconds > 0 else datetime.min).replace(tzinfo=moment.tzinfo)


async def every_second(call: Callable[[], None]) -> None:
    """Call `call` every second until cancelled."""
    while True:
        call()
        await asyncio.sleep(1.0)
