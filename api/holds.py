"""Long polls: held until the answer is there, the time is over, or the server stops."""

from __future__ import annotations

import asyncio

from backend.journal import Waiters


class Holds:
    """The polls held now. `release` ends them all at once, so that a stopping server need not wait for them."""

    def __init__(self) -> None:
        """Hold none."""
        self._held: set[asyncio.Timeout] = set()
        self._released = False

    async def wait(self, waiters: Waiters, request_id: str, seconds: float) -> bool:
        """Whether the request was answered within `seconds`, or before `release`."""
        if self._released:
            return False
        hold = asyncio.timeout(None)
        try:
            async with hold:
                self._held.add(hold)
                return await waiters.wait(request_id, seconds)
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
