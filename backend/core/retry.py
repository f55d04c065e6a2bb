"""Retries and periodic work: the pauses after failures, and the two loops that the whole service uses."""

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
STEADY_SECONDS = 60.0  # a process that ran for this long resets the count of failures


def backoff(failures: int) -> float:
    """Seconds before the next attempt, after `failures` >= 1 consecutive failures: 0.1, 0.2, 0.4, … up to 30."""
    return float(min(_LONGEST_SECONDS, _FIRST_SECONDS * 2 ** min(failures - 1, 20)))


@dataclass
class Restarts:
    """Counts the consecutive failures of a process that is restarted each time it ends."""

    failures: int = 0

    def pause(self, *, steady: bool) -> float:
        """Seconds until the next start: `backoff` of the consecutive failures, including this one.

        steady: the process ran for STEADY_SECONDS, or did not cause its own end. The count restarts at 1.
        """
        self.failures = 1 if steady else self.failures + 1
        return backoff(self.failures)


def backoffs() -> Iterator[float]:
    """An endless iterator of pauses: `backoff(1)`, `backoff(2)` and so on."""
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
    """Await `call()` until it raises no error of the classes `on`, and return its result.

    call: makes a new awaitable for each attempt.
    on: the error classes that another attempt may cure. All other errors are raised immediately.
    unless: subclasses of `on` that are raised immediately, because no attempt can cure them.
    pauses: seconds between attempts; None: `backoffs()`, which never ends.
    what: begins the logged warning, as in "the journal cannot be read".
    log: the logger of the caller's module. The first warning includes the traceback, unless the error is one of ours.
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
    """Await `work()` in a loop with pauses of `seconds`, until cancelled.

    on: error classes that end only the current round and are logged. All other errors are raised.
    what: begins the log line, as in "a sweep failed".
    log: the logger of the caller's module. level: the line's level. The traceback is logged unless the error is one of
    ours. early: an event that ends the pause early. The loop clears it before each round.
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
