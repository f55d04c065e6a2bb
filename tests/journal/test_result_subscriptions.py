"""Waiting for answers with notifications, without notifications, and with a thousand clients."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Collection

import pytest
import sqlalchemy as sa

from tinkerflow.backend.core.errors import JournalBusyError
from tinkerflow.backend.journal import Notifier, ResultSubscriptions
from tinkerflow.backend.journal.streams import TokenSubscriptions

ENGINE = """
import sys, time
from tinkerflow.backend.journal import Journal
journal = Journal.open(sys.argv[1])
while not (run := journal.requests.ready(sys.argv[2])):
    time.sleep(0.01)
journal.results.finish([pending.done(b"from another process", "json") for pending in run])
journal.close()
"""


def answer_in_a_process(url: str, model: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", ENGINE, url, model], check=True, timeout=60)


async def wait(subscriptions: ResultSubscriptions, request: str, seconds: float) -> bool:
    with subscriptions.request(request) as answer:
        return await answer.wait(seconds)


async def test_answer_wakes_its_waiters_immediately(scene):
    model = scene.model()
    request, other = scene.submit(model, 1), scene.submit(model, 2)
    async with scene.journal.result_subscriptions() as subscriptions:
        waiting = [asyncio.create_task(wait(subscriptions, request, 20)) for _ in range(3)]
        late = asyncio.create_task(wait(subscriptions, other, 0.3))
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        await asyncio.to_thread(scene.execute, model, 1)
        async with asyncio.timeout(60):
            assert await asyncio.gather(*waiting) == [True] * 3
        assert await late is False


async def test_answer_between_read_and_wait_needs_no_query(scene, deaf):
    model = scene.model()
    request = scene.submit(model, 1)
    async with deaf.subscriptions(scene.journal.notifier, recheck_seconds=600.0) as subscriptions:
        with subscriptions.request(request) as answer:
            await asyncio.to_thread(scene.execute, model)
            assert await answer.wait(60)
            assert await answer.wait(60)
    assert deaf.asked == []


async def test_earlier_answer_is_found_within_a_second(scene):
    model = scene.model()
    request = scene.submit(model, 1)
    scene.execute(model)
    async with scene.journal.result_subscriptions() as subscriptions:
        assert await wait(subscriptions, request, 20)
        assert await wait(subscriptions, "req-none", 0.05) is False


async def test_answer_of_another_process_is_found(scene, url):
    model = scene.model()
    async with scene.journal.result_subscriptions() as subscriptions:
        engine = asyncio.create_task(asyncio.to_thread(answer_in_a_process, url, model))
        request = await asyncio.to_thread(scene.submit, model, 1)
        assert await wait(subscriptions, request, 30)
        assert scene.journal.results.get(request, "local").result == b"from another process"
        await engine


class Deaf:
    """Result subscriptions without the journal's notifications. `asked` records the size of each query."""

    def __init__(self, journal, url: str) -> None:
        self._journal = journal
        self.notifier = Notifier(url + ".other" if url.startswith("sqlite") else url.replace("/migrated", "/postgres"))
        self.asked: list[int] = []
        self.failures: list[Exception] = []

    def subscriptions(self, notifier: Notifier | None = None, *, recheck_seconds: float = 0.2) -> ResultSubscriptions:
        last = self._journal.results.last_completions
        tokens = TokenSubscriptions(lambda: 0, lambda seen: ([], seen))
        return ResultSubscriptions(
            notifier or self.notifier, self.finished, last, tokens, recheck_seconds=recheck_seconds
        )

    def finished(self, request_ids: Collection[str]) -> set[str]:
        self.asked.append(len(request_ids))
        if self.failures:
            raise self.failures.pop()
        return self._journal.results.finished(request_ids)


@pytest.fixture
def deaf(journal, url):
    made = Deaf(journal, url)
    yield made
    made.notifier.close()


async def test_a_lost_notification_costs_one_recheck(scene, deaf):
    model = scene.model()
    request = scene.submit(model, 1)
    async with deaf.subscriptions() as subscriptions:
        waiting = asyncio.create_task(wait(subscriptions, request, 30))
        await asyncio.sleep(0.1)
        scene.execute(model)
        start = time.monotonic()
        assert await waiting
        assert time.monotonic() - start < 10


async def test_a_thousand_waiters_cost_one_query_a_recheck(deaf):
    async with deaf.subscriptions(recheck_seconds=0.5) as subscriptions:
        ids = [f"req-{n}" for n in range(1000)]
        start = time.monotonic()
        answers = await asyncio.gather(*(wait(subscriptions, request, 1.7) for request in ids))
        seconds = time.monotonic() - start
    assert not any(answers)
    assert 1 <= len(deaf.asked) <= seconds / 0.5 + 1
    assert max(deaf.asked) == 1000  # on a busy machine the first query may precede the last waiter


async def test_waiting_survives_a_database_outage(scene, deaf):
    model = scene.model()
    request = scene.submit(model, 1)
    scene.execute(model)
    away = sa.exc.OperationalError("SELECT", {}, Exception("the database is away"))
    deaf.failures = [away, JournalBusyError("the database ended a transaction that paused for too long")]
    async with deaf.subscriptions() as subscriptions:
        assert await wait(subscriptions, request, 30)
    assert len(deaf.asked) >= 3


async def test_finished_waits_leave_no_subscription(scene, deaf):
    async with deaf.subscriptions() as subscriptions:
        task = asyncio.create_task(wait(subscriptions, "req-a", 30))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wait(subscriptions, "req-b", 0.01)
        before = len(deaf.asked)
        await asyncio.sleep(0.5)
    assert len(deaf.asked) == before
