"""Threads for slow work: no project gets all of them, and cancelled work that has begun keeps its thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from concurrent.futures import Future
from contextvars import copy_context

import pytest

from tinkerflow.backend.core.threads import FairThreads, TurnThreads, current_project


async def test_slow_work_of_one_project_leaves_threads_to_other_projects() -> None:
    threads, release, begun = FairThreads("test", 4), threading.Event(), threading.Semaphore(0)

    def slow() -> None:
        begun.release()
        assert release.wait(60)

    flood = [asyncio.create_task(threads.run("ann", slow)) for _ in range(20)]
    while begun._value < 2:  # noqa: ASYNC110  threads release it
        await asyncio.sleep(0.01)
    try:
        assert await asyncio.wait_for(threads.run("bob", "b".upper), 60) == "B"
        for task in flood[:10]:
            task.cancel()  # calls that have begun continue in their threads
        assert await asyncio.wait_for(threads.run("bob", "b".upper), 60) == "B"
        assert begun._value == 2
    finally:
        release.set()
    await asyncio.gather(*flood[10:])
    assert begun._value == 12, "calls that were cancelled in the queue never began"


async def test_projects_take_turns_in_a_single_thread() -> None:
    threads, done = FairThreads("test", 1), list[str]()
    await asyncio.gather(*(threads.run(owner, done.append, owner) for owner in ("ann", "ann", "ann", "bob")))
    assert done == ["ann", "bob", "ann", "ann"]


async def test_exception_of_the_work_reaches_the_caller() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await FairThreads("test", 2).run("ann", int, "x")


async def test_arguments_of_failed_work_are_freed_immediately() -> None:
    class Argument:
        def fail(self) -> None:
            raise ValueError("wrong")

    async def fail() -> weakref.ref[Argument]:
        argument = Argument()
        with contextlib.suppress(ValueError):
            await threads.run("ann", argument.fail)
        return weakref.ref(argument)

    threads = FairThreads("test", 2)
    gc.disable()  # a reference cycle would keep the argument until the collector runs
    try:
        freed = await fail()
        await asyncio.sleep(0)  # asyncio drops the result of the thread
        assert freed() is None
    finally:
        gc.enable()


async def test_cost_of_a_call_does_not_depend_on_how_many_wait() -> None:
    """A flood of calls would otherwise block the event loop, and with it all other projects, for seconds."""
    looked_up = 0

    class Owner(str):
        __slots__ = ()

        def __hash__(self) -> int:
            nonlocal looked_up
            looked_up += 1
            return super().__hash__()

    threads, flood = FairThreads("test", 4), 400
    assert await asyncio.gather(*(threads.run(Owner("ann"), abs, -n) for n in range(flood))) == list(range(flood))
    assert looked_up < 40 * flood


async def test_cancelled_call_frees_its_arguments_although_other_calls_still_wait() -> None:
    class Argument:
        def use(self) -> None:
            raise AssertionError("a cancelled call began")

    async def call(argument: Argument) -> None:
        await threads.run("ann", argument.use)

    threads, release = FairThreads("test", 1), threading.Event()
    first = asyncio.create_task(threads.run("ann", release.wait, 60))
    second = asyncio.create_task(threads.run("ann", str))
    argument = Argument()
    task = asyncio.create_task(call(argument))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    freed = weakref.ref(argument)
    del argument, task
    await asyncio.sleep(0)  # the event loop drops the task
    gc.collect()
    try:
        assert freed() is None
    finally:
        release.set()
    await asyncio.gather(first, second)


def test_a_projects_call_is_next_although_calls_of_another_project_wait() -> None:
    threads, release, done = TurnThreads(1, "test"), threading.Event(), list[str]()

    def submit(owner: str) -> Future[None]:
        current_project.set(owner)
        return threads.submit(done.append, owner)

    first = threads.submit(release.wait, 60)
    calls = [copy_context().run(submit, owner) for owner in ("ann", "ann", "ann", "bob")]
    assert calls[1].cancel()
    failing = threads.submit(int, "x")
    release.set()
    threads.shutdown()
    assert first.result()
    assert done == ["ann", "bob", "ann"], "the cancelled call was never made"
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result()


def test_failed_calls_free_their_arguments_immediately() -> None:
    class Argument:
        def fail(self) -> None:
            raise ValueError("wrong")

    argument = Argument()
    freed = weakref.ref(argument)
    gc.disable()  # a reference cycle would keep the argument until the collector runs
    try:
        with TurnThreads(1, "test") as threads:
            result = threads.submit(argument.fail)
        assert isinstance(result.exception(), ValueError)
        del argument, result
        assert freed() is None
    finally:
        gc.enable()
