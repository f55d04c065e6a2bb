"""Threads for slow work: no project has all of them, and work that nobody waits for keeps its place."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tinkerflow.api.threads import FairThreads


async def test_a_project_with_much_slow_work_leaves_threads_to_others() -> None:
    with ThreadPoolExecutor(4) as pool:
        threads, release, begun = FairThreads(pool, 4), threading.Event(), threading.Semaphore(0)

        def slow() -> None:
            begun.release()
            assert release.wait(60)

        flood = [asyncio.create_task(threads.run("ann", slow)) for _ in range(20)]
        while begun._value < 2:  # noqa: ASYNC110  threads tell it
            await asyncio.sleep(0.01)
        try:
            assert await asyncio.wait_for(threads.run("bob", "b".upper), 60) == "B"
            for task in flood[:10]:
                task.cancel()  # those that have begun go on in their threads
            assert await asyncio.wait_for(threads.run("bob", "b".upper), 60) == "B"
            assert begun._value == 2
        finally:
            release.set()
        await asyncio.gather(*flood[10:])
        assert begun._value == 12, "what was cancelled in the line never began"


async def test_what_work_raises_is_raised() -> None:
    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="invalid literal"):
        await FairThreads(pool, 2).run("ann", int, "x")
