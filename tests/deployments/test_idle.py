"""Worker processes are released when idle, and started again on demand. With a service: tests/e2e/test_idle.py."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from tests.journal.conftest import Scene
from tests.waiting import until

from tinkerflow.backend.journal import Journal, migrate
from tinkerflow.deployments.idle import demand, keep_while_needed


class Kept:
    """A stand-in for worker processes and for the demand for them."""

    def __init__(self) -> None:
        self.demand, self.running, self.resting, self.starts = True, False, False, 0
        self.error: Exception | None = None

    async def keep(self) -> None:
        self.running = True
        self.starts += 1
        try:
            await until(lambda: self.error)
            raise self.error
        finally:
            self.running = False

    async def rest(self) -> None:
        self.resting = True
        try:
            await asyncio.Event().wait()
        finally:
            self.resting = False

    async def needed(self) -> bool:
        return self.demand


async def test_groups_are_released_when_idle_and_return_when_needed() -> None:
    kept, said = Kept(), list[str]()
    task = asyncio.create_task(
        keep_while_needed(kept.keep, kept.rest, kept.needed, 0.02, said.append, look_seconds=0.002)
    )
    await until(lambda: kept.running)
    await asyncio.sleep(0.1)
    assert kept.running and kept.starts == 1 and not said
    kept.demand = False
    await until(lambda: not kept.running)
    await asyncio.sleep(0.1)
    assert (
        kept.resting
        and kept.starts == 1
        and said == ["no request for 0.02 s: worker processes are released until the next request"]
    )
    kept.demand = True
    await until(lambda: kept.running)
    assert (
        not kept.resting
        and kept.starts == 2
        and said[1:] == ["a request is waiting: worker processes are started again"]
    )
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not kept.running


async def test_error_of_a_starting_group_is_raised() -> None:
    kept = Kept()
    kept.error = ValueError("no room")
    with pytest.raises(ValueError, match="no room"):
        await keep_while_needed(kept.keep, kept.rest, kept.needed, 60.0, print, look_seconds=0.01)


async def test_requests_of_a_suspended_run_need_no_workers(tmp_path: Path, journal_template: Path) -> None:
    url = f"sqlite:///{shutil.copy(journal_template, tmp_path / 'journal.db')}"
    with closing(Journal.open(url)) as journal:
        scene = Scene(journal)
        model = scene.model()
        scene.submit(model, 1)
        async with demand(url) as needed:
            assert await needed()
            journal.models.pause(model, "suspended in Prefect")
            assert not await needed()
            journal.models.pause(model, None)
            assert await needed()


async def test_unreachable_journal_ends_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'journal.db'}"
    migrate(url)
    async with demand(url) as needed:
        assert not await needed()

        def away(_: object) -> list[str]:
            raise sa.exc.OperationalError("SELECT", {}, Exception("the server is away"))

        monkeypatch.setattr("tinkerflow.backend.journal.queue.Queue.wanted", away)
        assert await needed()
