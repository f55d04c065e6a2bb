"""Clients that wait for answers. Thousands share one subscription and one database query per second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from typing import Self

import sqlalchemy as sa

from tinkerflow.backend.core.errors import JournalBusyError
from tinkerflow.backend.journal.notify import RECHECK_SECONDS, Notifier
from tinkerflow.backend.journal.streams import TokenSubscriptions
from tinkerflow.backend.journal.topics import TOKENS
from tinkerflow.backend.journal.waiter import Waiter

log = logging.getLogger(__name__)


class ResultSubscriptions:
    """Wakes thousands of waiting clients. One task listens, and another queries the database for all once a second.

        with subscriptions.request(request_id) as waiter:
            ...  # look for the answer, and if it is not there:
            await waiter.wait(seconds)

    A waiter is woken by every answer that arrives after its `with` block is entered. To miss no answer, look for it
    inside the block, and then wait if there is none. For a sampler, set `waiter.seen` to the cursor before waiting.
    """

    def __init__(
        self,
        notifier: Notifier,
        finished: Callable[[Collection[str]], set[str]],
        last_completions: Callable[[Collection[str]], dict[str, int]],
        tokens: TokenSubscriptions,
        *,
        recheck_seconds: float = RECHECK_SECONDS,
    ) -> None:
        """Use as an async context manager.

        notifier: publishes the topics `done:`, `answered:` and `tokens`.
        finished: returns the answered ids among request ids, in one query.
        last_completions: returns the number of each sampler's last answer, in one query.
        tokens: the listeners of streamed samples.
        recheck_seconds: the time between queries of the database.
        """
        self.tokens = tokens
        self._notifier = notifier
        self._finished = finished
        self._last_completions = last_completions
        self._recheck_seconds = recheck_seconds
        self._requests: dict[str, set[Waiter]] = {}
        self._samplers: dict[str, set[Waiter]] = {}
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        topics = await self._stack.enter_async_context(self._notifier.subscribe("done:", "answered:", TOKENS))
        running = (self._listen(topics), self._check(), self.tokens.run())
        self._tasks = [asyncio.create_task(one) for one in running]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening. Clients that still wait get False at the end of their timeout."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def request(self, request_id: str, waiter: Waiter | None = None) -> AbstractContextManager[Waiter]:
        """Open a context with a waiter for the answer of one request. An id that does not exist is never answered.

        waiter: an existing waiter that also waits for other answers; None: a new waiter.
        """
        return _entered(self._requests, request_id, waiter or Waiter())

    def sampler(self, sampler_id: str, clone: int) -> AbstractContextManager[Waiter]:
        """Open a context with a waiter for every answer to one clone's requests of a sampler."""
        return _entered(self._samplers, sampler_id, Waiter(str(clone)))

    @property
    def waiting(self) -> int:
        """The number of requests and samplers with waiters."""
        return len(self._requests) + len(self._samplers)

    async def _listen(self, topics: AsyncIterator[str]) -> None:
        async for topic in topics:
            if topic.startswith("done:"):
                self._answered(topic.removeprefix("done:"))
                continue
            if topic == TOKENS:
                self.tokens.wake()
                continue
            _, clone, sampler_id = topic.split(":", 2)
            for waiter in self._samplers.get(sampler_id, ()):
                if clone in ("", waiter.clone):
                    waiter.wake()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(self._recheck_seconds)
            self.tokens.wake()
            try:
                if self._requests:
                    for request_id in await asyncio.to_thread(self._finished, list(self._requests)):
                        self._answered(request_id)
                if self._samplers:
                    self._wake_behind(await asyncio.to_thread(self._last_completions, list(self._samplers)))
            except (sa.exc.SQLAlchemyError, JournalBusyError):
                # The task must survive a database that is briefly unavailable. It queries again after a second.
                log.exception("cannot ask the journal for %d waiting clients; asking again soon", self.waiting)

    def _answered(self, request_id: str) -> None:
        for waiter in self._requests.get(request_id, ()):
            waiter.wake()

    def _wake_behind(self, numbers: dict[str, int]) -> None:
        for sampler_id, waiters in self._samplers.items():
            for waiter in waiters:
                if waiter.seen is not None and numbers.get(sampler_id, 0) > waiter.seen:
                    waiter.wake()


@contextmanager
def _entered(waiters: dict[str, set[Waiter]], key: str, waiter: Waiter) -> Iterator[Waiter]:
    waiters.setdefault(key, set()).add(waiter)
    try:
        yield waiter
    finally:
        waiters[key].discard(waiter)
        if not waiters[key]:
            del waiters[key]
