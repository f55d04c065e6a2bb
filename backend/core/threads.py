"""Threads that projects share, for slow work (a long text to tokenize, a body to decode) and for journal calls."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from tinkerflow.backend.core.fairness import FairQueue

P = ParamSpec("P")
T = TypeVar("T")
# The project of the request; "" for the service's own work.
current_project: ContextVar[str] = ContextVar("current_project", default="")


class TurnThreads(ThreadPoolExecutor):
    """Threads for short calls, as an event loop's default executor. Projects (`current_project`) take turns.

    A project with thousands of calls therefore delays a call of another project by the calls that have begun.
    """

    def __init__(self, count: int, name: str) -> None:
        """Start no thread yet. count: the most threads. name: the threads' name."""
        super().__init__(count, name)
        self._calls: FairQueue[tuple[Future[Any], Callable[[], Any]]] = FairQueue()
        self._lock = threading.Lock()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue `fn(*args, **kwargs)` for the current project. Returns the future of its result."""
        result: Future[T] = Future()
        with self._lock:
            self._calls.push(current_project.get(), (result, partial(fn, *args, **kwargs)))
        super().submit(self._call_next)
        return result

    def _call_next(self) -> None:
        with self._lock:
            result, call = self._calls.serve(self._calls.firsts()[0])
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(call())
            except BaseException as error:  # noqa: BLE001  for the caller
                result.set_exception(error)
                del result, call  # the error's traceback contains this frame; a cycle would keep the call's arguments


@dataclass(eq=False)
class _Work:
    """A call that waits for a thread. result: the caller's future; if it is cancelled first, the call is never made.

    queued: whether the call is still in the queue.
    """

    call: Callable[[], Any]
    result: asyncio.Future[Any]
    queued: bool = True


class FairThreads:
    """Threads that projects share fairly. One project uses at most half of them at a time.

    A project with a hundred slow calls therefore delays other projects by one of its calls, not by all of them. Journal
    queries run in separate threads.
    """

    def __init__(self, name: str, count: int) -> None:
        """Start no thread yet. name: the threads' name. count: the most threads; a project may always use one."""
        self._threads = ThreadPoolExecutor(count, name)
        self._count = count
        self._most = max(1, count // 2)
        self._busy: Counter[str] = Counter()  # threads by project
        self._queue: FairQueue[_Work] = FairQueue()

    async def run(self, owner: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work(...)`, run in a thread for project `owner`. A call that has begun is finished."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        ticket = self._queue.push(owner, _Work(partial(work, *args, **kwargs), result))
        self._begin_calls()
        try:
            return await result
        finally:
            if ticket.item.queued:
                self._queue.withdraw(ticket)
            del result, ticket  # an error's traceback contains this frame; such a cycle would keep the call's arguments

    def close(self, *, wait: bool = True) -> None:
        """End the threads after the calls that have begun. wait: return only then."""
        self._threads.shutdown(wait)

    def _begin_calls(self) -> None:
        while self._busy.total() < self._count:
            ticket = next((one for one in self._queue.firsts() if self._busy[one.owner] < self._most), None)
            if ticket is None:
                return
            work, owner = ticket.item, ticket.owner
            work.queued = False
            if work.result.cancelled():  # and its caller has not continued yet
                self._queue.withdraw(ticket)
                continue
            self._queue.serve(ticket)
            self._busy[owner] += 1
            calling = asyncio.get_running_loop().run_in_executor(self._threads, work.call)
            calling.add_done_callback(partial(self._end_call, owner, work.result))

    def _end_call(self, owner: str, result: asyncio.Future[Any], calling: asyncio.Future[Any]) -> None:
        self._busy -= Counter((owner,))  # drops projects whose count is 0
        if not result.done():
            if (error := calling.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(calling.result())
        self._begin_calls()
