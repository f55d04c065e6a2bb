"""Waiting for the next answer of a sampler: the part of Waiters for clients that follow a whole sampler.

One task per process listens to the bell, and another asks the database for everybody at once, once a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Protocol, Self

import sqlalchemy as sa

from tinkerflow.backend.journal.bell import Bell

log = logging.getLogger(__name__)

RECHECK_SECONDS = 1.0


class Numbers(Protocol):
    """What Arrivals needs of the journal."""

    @property
    def bell(self) -> Bell:
        """The bell that rings `answered:<clone>:<sampler>`."""
        ...

    def last_completions(self, sampler_ids: Collection[str]) -> dict[str, int]:
        """The number of each sampler's last answer, in one query."""
        ...


class Watch:
    """One client's wait. `seen` is its cursor: what is newer wakes it."""

    def __init__(self, sampler_id: str, clone: int) -> None:
        """Use Arrivals.watch."""
        self.sampler_id = sampler_id
        self.clone = str(clone)
        self.seen: int | None = None
        self._news = asyncio.Event()

    async def wait(self, seconds: float) -> bool:
        """Whether there was an answer since the last wait, or comes within `seconds`. It may be another clone's."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def wake(self) -> None:
        """There is news."""
        self._news.set()


class Arrivals:
    """`with arrivals.watch(sampler, clone) as watch: … await watch.wait(seconds)`, for any number of clients.

    A watch hears of every answer from the moment it is made. So read the completions inside, set `seen` to the cursor
    that was read, and wait: nothing falls in between. A lost bell costs a second.
    """

    def __init__(self, journal: Numbers) -> None:
        """Wait for answers of `journal`. Use it as an async context manager."""
        self._journal = journal
        self._watches: dict[str, set[Watch]] = {}
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Start listening."""
        topics = await self._stack.enter_async_context(self._journal.bell.listen("answered:"))
        self._tasks = [asyncio.create_task(self._listen(topics)), asyncio.create_task(self._check())]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop; whoever still waits gets False at the end of their timeout."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    @contextmanager
    def watch(self, sampler_id: str, clone: int) -> Iterator[Watch]:
        """Inside, what wakes for answers to one clone's requests."""
        watch = Watch(sampler_id, clone)
        self._watches.setdefault(sampler_id, set()).add(watch)
        try:
            yield watch
        finally:
            self._watches[sampler_id].discard(watch)
            if not self._watches[sampler_id]:
                del self._watches[sampler_id]

    async def _listen(self, topics: AsyncIterator[str]) -> None:
        async for topic in topics:
            _, clone, sampler_id = topic.split(":", 2)
            for watch in self._watches.get(sampler_id, ()):
                if clone in ("", watch.clone):
                    watch.wake()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            if not self._watches:
                continue
            try:
                numbers = await asyncio.to_thread(self._journal.last_completions, list(self._watches))
            except sa.exc.SQLAlchemyError:
                # Waiting must outlive a database that is away for a moment: the next second asks again.
                log.exception("cannot ask the journal for %d samplers; asking again in a second", len(self._watches))
                continue
            for sampler_id, watches in self._watches.items():
                for watch in watches:
                    if watch.seen is not None and numbers.get(sampler_id, 0) > watch.seen:
                        watch.wake()
