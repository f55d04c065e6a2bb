"""A queue of events for one consumer. The producer can wait until the consumer has handled them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class HandledEvents(Generic[T]):
    """A queue of events. An event counts as handled when the consumer requests the next one."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T | None] = asyncio.Queue()
        self.is_consumed = False

    def put(self, event: T) -> None:
        self._queue.put_nowait(event)

    def close(self) -> None:
        """End the iteration after the queued events."""
        self._queue.put_nowait(None)

    async def handled(self) -> None:
        """Wait until the consumer has handled all events; return immediately if there is no consumer."""
        if self.is_consumed:
            await self._queue.join()

    async def consume(self) -> AsyncIterator[T]:
        """Yield every event until `close`."""
        self.is_consumed = True
        try:
            while (event := await self._queue.get()) is not None:
                try:
                    yield event
                finally:
                    self._queue.task_done()
        finally:  # producers must not wait for a consumer that left
            self.is_consumed = False
            while not self._queue.empty():
                self._queue.get_nowait()
                self._queue.task_done()
