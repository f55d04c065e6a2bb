"""Trying again what failed: how long to wait, the one loop that does so, and the one that repeats work for ever."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from tinkerflow.backend.core.errors import TinkerflowError

T = TypeVar("T")
Errors = type[Exception] | tuple[type[Exception], ...]

_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 30.0
STEADY_SECONDS = 60.0  # a process that served for so long ends a row of failures


def backoff(failures: int) -> float:
    """Seconds to wait before the next attempt after `failures` >= 1 failures in a row: 0.1, 0.2, 0.4, … up to 30."""
    return float(min(_LONGEST_SECONDS, _FIRST_SECONDS * 2 ** min(failures - 1, 20)))


@dataclass
class Restarts:
    """Counts the failures in a row of something that is started again each time that it ends."""

    failures: int = 0

    def pause(self, *, steady: bool) -> float:
        """Seconds until the next start: `backoff` of the failures in a row, this one included.

        steady: it served for STEADY_SECONDS, or its end was not its fault: a new row begins.
        """
        self.failures = 1 if steady else self.failures + 1
        return backoff(self.failures)


def backoffs() -> Iterator[float]:
    """The pauses of `backoff` after one failure, two failures, and so on, without end."""
    return map(backoff, itertools.count(1))


async def retry(
    call: Callable[[], Awaitable[T]],
    *,
    on: Errors,
    unless: Errors = (),
    pauses: Iterable[float] | None = None,
    what: str,
    log: logging.Logger,
) -> T:
    """The result of `await call()`, called again after a pause for as long as it raises an error of the classes `on`.

    call: makes a new awaitable for each attempt.
    on: the error classes that another attempt may cure. Every other error is raised immediately.
    unless: subclasses of `on` that no attempt can cure: they are raised immediately.
    pauses: seconds between attempts, one for each further attempt; None = `backoffs()`, without end.
    what: the beginning of the logged warning, as in "the journal cannot be read".
    log: the logger of the caller's module. The first warning has the traceback, unless the error is one of ours.
    Raises the error of the last attempt when no pause is left.
    """
    left = iter(backoffs() if pauses is None else pauses)
    for attempt in itertools.count():
        try:
            return await call()
        except on as error:
            pause = next(left, None)
            if pause is None or isinstance(error, unless):
                raise
            traceback = attempt == 0 and not isinstance(error, TinkerflowError)
            log.warning("%s, trying again in %g s: %s", what, pause, error, exc_info=traceback)
        await asyncio.sleep(pause)
    raise AssertionError("unreachable")  # for the type checker


async def repeat(
    work: Callable[[], Awaitable[object]],
    seconds: float,
    *,
    on: Errors,
    what: str,
    log: logging.Logger,
    level: int = logging.WARNING,
    early: asyncio.Event | None = None,
) -> None:
    """Await `work()` again and again with pauses of `seconds`, until cancelled.

    on: error classes that end only one round; they are logged. Every other error is raised.
    what: the beginning of that line, as in "a sweep failed".
    log: the logger of the caller's module. level: of the line, which has the traceback unless the error is one of ours.
    early: an event that ends the pause; it is cleared before each round.
    """
    while True:
        if early is not None:
            early.clear()
        try:
            await work()
        except on as error:
            traceback = not isinstance(error, TinkerflowError)
            log.log(level, "%s, trying again in %g s: %s", what, seconds, error, exc_info=traceback)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await (asyncio.Event() if early is None else early).wait()
