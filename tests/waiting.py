"""Wait until something has happened in another thread or process, whose state can only be polled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], seconds: float = 600.0) -> Any:
    """The first true value of `condition`. Fails after `seconds`, which is long because machines may be busy."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"did not happen in {seconds:g} s"
        time.sleep(0.05)
    return found


async def until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Like `wait_for`, and lets the event loop run."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
