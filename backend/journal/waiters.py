"""Waiting for answers: one task per process listens to the bell and asks the database for everybody at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Protocol, Self

import sqlalchemy as sa

from backend.journal.arrivals import Arrivals, Numbers, Watch

log = logging.getLogger(__name__)

RECHECK_SECONDS = 1.0


class Answers(Numbers, Protocol):
    """What Waiters needs of the journal. Its bell also rings `done:<request_id>`."""

    def finished(self, request_ids: Collection[str]) -> set[str]:
        """Which of these requests are answered, in one query."""
        ...


class Waiters:
    """`await waiters.wait(id, timeout)` for thousands of ids costs one query a second, whatever their number."""

    def __init__(self, journal: Answers) -> None:
        """Wait for answers of `journal`. Use it as an async context manager."""
        self._journal = journal
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._users: dict[str, int] = {}
        self._unchecked: set[str] = set()
        self._news = asyncio.Event()
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

    async def wait(self, request_id: str, timeout: float) -> bool:
        """Whether the request is answered within `timeout` seconds; an answer from before this call counts.

        An id that does not exist is never answered.
        """
        future = self._waiting.get(request_id)
        if future is None or future.done():
            future = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        self._users[request_id] = self._users.get(request_id, 0) + 1
        self._unchecked.add(request_id)
        self._news.set()
        try:
            await asyncio.wait([future], timeout=timeout)
            return future.done()
        finally:
            self._users[request_id] -= 1
            if not self._users[request_id]:
                del self._users[request_id], self._waiting[request_id]
                self._unchecked.discard(request_id)

    def watch(self, sampler_id: str, clone: int) -> AbstractContextManager[Watch]:
        """Inside, what wakes for every answer to one clone's requests of a sampler (arrivals.py)."""
        return self._arrivals.watch(sampler_id, clone)

    async def _listen(self, topics: AsyncIterator[str]) -> None:
        async for topic in topics:
            self._answered(topic.removeprefix("done:"))

    async def _check(self) -> None:
        """Ask for new ids at once (those that come meanwhile share the next query), for all of them once a second."""
        loop = asyncio.get_running_loop()
        due = loop.time() + RECHECK_SECONDS
        while True:
            if loop.time() < due:
                try:
                    async with asyncio.timeout_at(due):
                        await self._news.wait()
                except TimeoutError:
                    continue
                asked = set(self._unchecked)
            else:
                due = loop.time() + RECHECK_SECONDS
                asked = set(self._waiting)
            self._news.clear()
            self._unchecked -= asked
            if asked:
                await self._ask(asked)

    async def _ask(self, asked: set[str]) -> None:
        try:
            finished = await asyncio.to_thread(self._journal.finished, asked)
        except sa.exc.SQLAlchemyError:
            # Waiting must outlive a database that is away for a moment: the next second asks again.
            log.exception("cannot ask the journal for %d waiting requests; asking again in a second", len(asked))
            return
        for request_id in finished:
            self._answered(request_id)

    def _answered(self, request_id: str) -> None:
        future = self._waiting.get(request_id)
        if future is not None and not future.done():
            future.set_result(None)
