"""Task runs as people see them. An operation starts at once; a task run opens beside it, and follows it to its end.

Measured with prefect 3.8.8 on two busy cores: a task call costs the client 5 to 12 ms of its event loop, a tag another
round trip to the server (its concurrency limits), and a whole optim_step without Prefect 3 ms. So nothing waits for
Prefect: short operations are over before their task run opens (GRACE), and above a given rate one follows many.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.states import Completed, Failed
from prefect.tasks import Task

from tinkerflow.backend.journal import Kind, Outcome
from tinkerflow.tasks.execution.operation import Operation

GRACE = 0.01  # seconds an operation has before its task run opens
MOST = 500  # operations of one task run

Tracked = Task[[str], Coroutine[Any, Any, State[None]]]

_window: ContextVar[Window] = ContextVar("window")


class Window:
    """The operations that one task run follows. It ends when it is closed and they have ended."""

    def __init__(self, name: str, *, linger: Callable[[], float] | None = None) -> None:
        """A window for the task run `name`.

        linger: seconds that it stays open for more operations, asked anew each time it is idle; None: it takes no more
        once the first ones have ended.
        """
        self.name = name
        self.open = True
        self.final_name = name
        self._linger = linger
        self._following: set[asyncio.Task[Outcome | None]] = set()
        self._changed = asyncio.Event()
        self._kinds: Counter[str] = Counter()
        self._errors: list[str] = []

    @property
    def shared(self) -> bool:
        """Whether it takes further operations."""
        return self._linger is not None

    @property
    def size(self) -> int:
        """How many operations it has followed."""
        return self._kinds.total()

    def add(self, operation: Operation) -> None:
        """Follow one more operation, while the window is open."""
        self._kinds[operation.request.kind] += 1
        self._following.add(operation.answered)
        operation.answered.add_done_callback(self._ended)
        self._changed.set()

    def close(self) -> None:
        """Take no more."""
        self.open = False
        self._changed.set()

    async def settled(self, seconds: float) -> None:
        """Wait until nothing is being followed, `seconds` at most."""
        if self._following:
            await asyncio.wait(self._following, timeout=seconds)

    async def follow(self) -> State[None]:
        """Return when the window has ended: the state that its task run ends in, with a sentence about it."""
        while self._following or self.open:
            if self._following:
                await asyncio.wait(self._following, return_when=asyncio.FIRST_COMPLETED)
            elif self._linger is None or not await self._more(self._linger()):
                self.open = False
        text = ", ".join(f"{kind} x{count}" if count > 1 else kind for kind, count in self._kinds.items())
        if self._errors:
            return Failed(message=f"{text}; {len(self._errors)} failed: {self._errors[0]}")
        return Completed(message=text)

    async def _more(self, seconds: float) -> bool:
        self._changed.clear()
        try:
            async with asyncio.timeout(max(seconds, 0.01)):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _ended(self, answered: asyncio.Task[Outcome | None]) -> None:
        self._following.discard(answered)
        if answered.cancelled() or answered.exception() is not None:
            self._errors.append("not answered: the engine stopped")
        elif (outcome := answered.result()) is None:
            self._errors.append("interrupted by the end of its worker group: it is executed again")
        elif outcome.error is not None:
            self._errors.append(outcome.error)


async def track(window: Window, tracked: Tracked) -> None:
    """Let a task run of `tracked` follow the window; call it inside a flow run, as a task of its own."""
    await window.settled(GRACE)
    _window.set(window)
    call: Callable[..., Awaitable[object]] = tracked
    await call(window.name, return_state=True)  # a window with failures is no error of ours


async def _follow(name: str) -> State[None]:
    window = _window.get()
    state = await window.follow()
    context = TaskRunContext.get()
    if context is not None and window.final_name != name:
        context.task_run.name = window.final_name  # goes out with the run's last event
    return state


def tracked_task(name: str) -> Tracked:
    """The Prefect task called `name`: no retries (the device's state has changed), no cache, no stored result.

    No tags either: before every tagged task run, Prefect asks the server for the concurrency limits of its tags.
    """
    settle = task(
        name=name, task_run_name="{name}", retries=0, persist_result=False, cache_policy=NO_CACHE, log_prints=False
    )
    return settle(_follow)


# Operations by the names that people know them by; `steps` are many of one model, `samples` many of one base model.
TASKS: dict[str, Tracked] = {kind: tracked_task(kind) for kind in Kind if kind is not Kind.SAMPLE}
TASKS[Kind.LOAD_MODEL] = TASKS[Kind.LOAD_WEIGHTS]
TASKS[Kind.SAVE_FOR_SAMPLER] = tracked_task("save_weights_for_sampler")
STEPS = tracked_task("steps")
SAMPLE = tracked_task("sample")
