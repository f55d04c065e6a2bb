from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from sqlalchemy.exc import OperationalError

from tinkerflow.backend.errors import JournalBusyError
from tinkerflow.backend.journal import Outcome
from tinkerflow.tasks.execution.operation import AnswerWriter


def outcome(name: str) -> Outcome:
    return Outcome(name, result=b"{}")


async def test_what_comes_while_one_is_written_shares_the_next_transaction() -> None:
    go = threading.Event()
    written: list[list[str]] = []

    def finish(outcomes: Sequence[Outcome]) -> None:
        go.wait(5)
        written.append([one.request_id for one in outcomes])

    line = AnswerWriter(finish)
    first = asyncio.create_task(line.put(outcome("a")))
    await asyncio.sleep(0.05)
    others = [asyncio.create_task(line.put(outcome(name))) for name in "bcd"]
    await asyncio.sleep(0.05)
    assert not first.done()
    go.set()
    await asyncio.gather(first, *others)
    await line.close()
    assert written == [["a"], ["b", "c", "d"]]


async def test_one_that_cannot_be_stored_becomes_a_named_failure_and_hurts_nobody_else() -> None:
    stored: dict[str, Outcome] = {}

    def finish(outcomes: Sequence[Outcome]) -> None:
        if any(one.request_id == "bad" and one.error is None for one in outcomes):
            raise ValueError("too big")
        stored.update({one.request_id: one for one in outcomes})

    line = AnswerWriter(finish)
    await asyncio.gather(*(line.put(outcome(name)) for name in ("good", "bad", "fine")))
    await line.close()
    assert stored["good"].error is None and stored["fine"].error is None
    assert stored["bad"].error == "the answer cannot be stored (ValueError: too big)"
    assert stored["bad"].category == "server"


@pytest.mark.parametrize("error", [OperationalError("finish", {}, Exception("locked")), JournalBusyError("no slot")])
async def test_a_database_that_is_away_for_a_moment_is_waited_for(error: Exception) -> None:
    tries = []

    def finish(outcomes: Sequence[Outcome]) -> None:
        tries.append(len(outcomes))
        if len(tries) < 3:
            raise error

    line = AnswerWriter(finish)
    await line.put(outcome("a"))
    await line.close()
    assert tries == [1, 1, 1]


async def test_a_database_that_stays_away_is_an_error() -> None:
    def finish(outcomes: Sequence[Outcome]) -> None:
        raise OperationalError("finish", {}, Exception("gone"))

    line = AnswerWriter(finish, pauses=(0.01,))
    with pytest.raises(OperationalError):
        await line.put(outcome("a"))
    await line.close()
