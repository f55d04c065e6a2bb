"""One client's wait for an answer."""

from __future__ import annotations

import asyncio


class Waiter:
    """One client's wait for a request, or for the requests of one clone of a sampler (`clone`, as text).

    seen: the client's cursor. An answer with a higher number wakes it.
    """

    def __init__(self, clone: str | None = None) -> None:
        """Use ResultSubscriptions.request or ResultSubscriptions.sampler."""
        self.clone = clone
        self.seen: int | None = None
        self._event = asyncio.Event()

    async def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the answer. Returns whether it has arrived.

        For a sampler: True if a request of the clone was answered since the last wait.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        if self.clone is not None:
            self.sleep()
        return True

    def wake(self) -> None:
        """End the wait, because there is an answer."""
        self._event.set()

    def sleep(self) -> None:
        """Make the next wait last until the next `wake`."""
        self._event.clear()
