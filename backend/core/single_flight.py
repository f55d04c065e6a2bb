"""Work that is done once, although several callers request it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Calls in progress, by key, each shared by all callers with that key."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Future[T]] = {}

    async def run(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`. Concurrent callers with the same key share one call, and its failure.

        The call continues when a caller is cancelled.
        """
        if (running := self._running.get(key)) is None:
            running = self._running[key] = asyncio.ensure_future(work())
            running.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(running)
