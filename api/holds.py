"""Long polls: held until the answer is there, the time is over, or the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Holds:
    """The polls held now. `release` ends them all at once, so that a stopping server need not wait for them."""

    def __init__(self) -> None:
        """Hold none."""
        self._held: set[asyncio.Timeout] = set()
        self._released = False

    async def hold(self, wait: Coroutine[object, object, bool]) -> bool:
        """What `wait` says; False when `release` comes first."""
        if self._released:
            wait.close()
            return False
        hold = asyncio.timeout(None)
        try:
            async with hold:
                self._held.add(hold)
                return await wait
        except TimeoutError:
            return False
        finally:
            self._held.discard(hold)

    def release(self) -> None:
        """End every poll held now, and hold none from now on."""
        self._released = True
        now = asyncio.get_running_loop().time()
        for hold in self._held:
            hold.reschedule(now)
