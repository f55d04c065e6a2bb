"""Threads for the slow part of a request: a long text to tokenise, a grammar to compile, a template to fill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

P = ParamSpec("P")
T = TypeVar("T")


class FairThreads:
    """Threads that projects share. One project has at most half of them, and its further work waits in its own line.

    So a project with a hundred slow requests lets others wait for one of its pieces of work, and not for all of them.
    The event loop's own threads, which ask the journal, never do this work.
    """

    def __init__(self, name: str, count: int) -> None:
        """Begin no thread yet. name: of the threads. count: how many there may be; a project may always use one."""
        self._threads = ThreadPoolExecutor(count, name)
        self._most = max(1, count // 2)
        self._lines: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, owner: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns, in a thread of the project `owner`. Work that has begun keeps its thread to its end."""
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = asyncio.Semaphore(self._most)
        await line.acquire()
        working = asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))
        working.add_done_callback(lambda _: line.release())
        return await asyncio.shield(working)
