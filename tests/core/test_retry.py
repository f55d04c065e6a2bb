"""Failed calls are retried for the errors and with the pauses that the caller gives."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest
from tests.logged import logged_by

from tinkerflow.backend.core.errors import StoreAwayError, StoreError
from tinkerflow.backend.core.retry import Restarts, backoff, backoffs, repeat, retry

log = logging.getLogger(__name__)


class Calls:
    """Raises the given errors, one per call, and then returns the number of the call."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.made = 0

    async def __call__(self) -> int:
        self.made += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.made


def test_back_off_doubles_up_to_a_limit() -> None:
    assert [backoff(n) for n in (1, 2, 3, 4)] == [0.1, 0.2, 0.4, 0.8]
    assert backoff(50) == backoff(5000) == 30.0
    assert list(itertools.islice(backoffs(), 3)) == [0.1, 0.2, 0.4]


async def test_a_call_is_made_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls(OSError("away"), OSError("still away"))
    assert await retry(calls, on=OSError, pauses=[0, 0, 0], what="it cannot be read", log=log) == 3
    assert [record.getMessage() for record in logged_by(caplog, log.name)] == [
        "it cannot be read, trying again in 0 s: away",
        "it cannot be read, trying again in 0 s: still away",
    ]
    assert [bool(record.exc_info) for record in logged_by(caplog, log.name)] == [True, False]


async def test_tinkerflow_error_is_logged_without_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert await retry(Calls(StoreError("away")), on=StoreError, pauses=[0], what="x", log=log) == 2
    assert not logged_by(caplog, log.name)[0].exc_info


async def test_the_last_error_is_raised_when_no_pause_is_left() -> None:
    calls = Calls(OSError("1"), OSError("2"), OSError("3"))
    with pytest.raises(OSError, match="3"):
        await retry(calls, on=OSError, pauses=(0, 0), what="x", log=log)
    assert calls.made == 3


@pytest.mark.parametrize("error", [ValueError("another"), StoreAwayError("excepted")])
async def test_unexpected_errors_are_raised_immediately(error: Exception) -> None:
    calls = Calls(error)
    with pytest.raises(type(error)):
        await retry(calls, on=StoreError, unless=StoreAwayError, what="x", log=log)
    assert calls.made == 1


def test_pauses_grow_until_something_was_steady() -> None:
    restarts = Restarts()
    assert [restarts.pause(steady=False) for _ in range(3)] == [0.1, 0.2, 0.4]
    assert restarts.pause(steady=True) == 0.1
    assert restarts.pause(steady=False) == 0.2


async def test_work_is_repeated_after_errors_and_early_but_not_after_other_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    early, rounds = asyncio.Event(), list[bool]()

    async def work() -> None:
        rounds.append(early.is_set())  # cleared before each round
        early.set()  # ends the pause of an hour
        if len(rounds) == 2:
            raise StoreError("no answer")
        if len(rounds) == 4:
            raise ValueError("another error")

    with pytest.raises(ValueError, match="another error"):
        await repeat(work, 3600.0, on=StoreError, what="the work failed", log=log, early=early)
    assert rounds == [False] * 4
    (line,) = logged_by(caplog, log.name)
    assert line.getMessage() == "the work failed, trying again in 3600 s: no answer"
