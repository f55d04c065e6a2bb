"""Waiting for answers: one task listens to the bell, and another asks the database for everybody at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from typing import Protocol, Self

import sqlalchemy as sa

from tinkerflow.backend.journal.arrivals import Arrivals, Numbers, Watch

log = logging.getLogger(__name__)

RECHECK_SECONDS = 1.0


class Answers(Numbers, Protocol):
    """What Waiters needs of the journal. Its bell also rings `done:<request_id>`."""

    def finished(self, request_ids: Collection[str]) -> set[str]:
        """Which of these requests are answered, in one query."""
        ...


class Expected:
    """One client's wait for one answer."""

    def __init__(self) -> None:
        """Use Waiters.expect."""
        self._there = asyncio.Event()

    async def wait(self, seconds: float) -> bool:
        """Whether the request has been answered since this was made, or is within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._there.wait()
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        """The answer is there."""
        self._there.set()


class Waiters:
    """`with waiters.expect(id) as answer: … await answer.wait(seconds)`, for thousands of ids.

    Whoever waits hears of an answer from the moment that `expect` is entered. So look for it inside, and wait when it
    is not there: nothing falls in between. A lost bell costs a second, and one query a second serves them all.
    """

    def __init__(self, journal: Answers) -> None:
        """Wait for answers of `journal`. Use it as an async context manager."""
        self._journal = journal
        self._expected: dict[str, set[Expected]] = {}
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._arrivals = Arrivals(journal)

    async def __aenter__(self) -> Self:
        """Start listening."""
        await self._stack.enter_async_context(self._arrivals)
        topics = await self._stack.enter_async_context(self._journal.bell.listen("done:"))
        self._tasks = [asyncio.create_task(self._listen(topics)), asyncio.create_task(self._check())]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop; whoever still waits gets False at the end of their timeout."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    @contextmanager
    def expect(self, request_id: str) -> Iterator[Expected]:
        """Inside, what wakes for the answer of a request. An id that does not exist is never answered."""
        expected = Expected()
        self._expected.setdefault(request_id, set()).add(expected)
        try:
            yield expected
        finally:
            self._expected[request_id].discard(expected)
            if not self._expected[request_id]:
                del self._expected[request_id]

    def watch(self, sampler_id: str, clone: int) -> AbstractContextManager[Watch]:
        """Inside, what wakes for every answer to one clone's requests of a sampler (arrivals.py)."""
        return self._arrivals.watch(sampler_id, clone)

    async def _listen(self, topics: AsyncIterator[str]) -> None:
        async for topic in topics:
            self._answered(topic.removeprefix("done:"))

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            if not self._expected:
                continue
            try:
                finished = await asyncio.to_thread(self._journal.finished, list(self._expected))
            except sa.exc.SQLAlchemyError:
                # Waiting must outlive a database that is away for a moment: the next second asks again.
                log.exception("cannot ask the journal for %d requests; asking again in a second", len(self._expected))
                continue
            for request_id in finished:
                self._answered(request_id)

    def _answered(self, request_id: str) -> None:
        for expected in self._expected.get(request_id, ()):
            expected.wake()
