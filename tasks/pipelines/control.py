"""The buttons on the page of an active run: cancel, pause, suspend, resume.

A runner (`tinkerflow serve`, a Prefect worker) cancels a run with SIGTERM. Prefect's own handler would raise in the
middle of a step. The handler here only sets a flag: the run stops at the end of a step, with its state saved. Before
and after training, its work is interrupted. A thread interrupts user code that blocks the event loop. In a process
without a runner, Prefect acts on no button, and it never acts on Pause. Therefore the run also reads its own state.

Suspend ends the run in this process, at the end of a step with its state saved. When someone presses Resume, a runner
starts another process, which continues from that state.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar, copy_context
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, NoReturn, TypeVar
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Pause, PrefectException
from prefect.runtime import flow_run as runtime

from tinkerflow.tasks.pipelines.artifacts import log_line
from tinkerflow.tasks.pipelines.user_code import InterruptedCodeError, place_in_loop

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_SECONDS = 2.0
LAST_SECONDS = 10.0  # time for the answers of the last step; Prefect kills a cancelled run after 30 s
STUCK_SECONDS = 3.0  # how long code may block the event loop after a signal before it is interrupted
_STOPPING = "stopping after this step, with its state saved; press Ctrl-C again to stop without saving"


class StoppedError(Exception):
    """The run has stopped on request. The message names the last step."""


class Control:
    """Whether the run may continue. All calls come from one event loop."""

    def __init__(self, flow_run: UUID | None = None) -> None:
        """Begin with the run allowed to continue. flow_run: its id in Prefect; None outside a flow run."""
        self.flow_run = flow_run
        self.interrupted = ""  # the place of user code that blocked the event loop after a request to stop
        self._limit: asyncio.Timeout | None = None
        self._gradual = 0  # number of open blocks that end by themselves
        self._stop = asyncio.Event()
        self._go = asyncio.Event()
        self._go.set()
        self._suspended: State[Any] | None = None
        self._parts: list[Control] = []

    @contextmanager
    def over(self, part: Control) -> Iterator[None]:
        """During the block, also stop `part`, the control of a subflow run, when this run is stopped."""
        self._parts.append(part)
        if self.stopping:
            part.stop()
        try:
            yield
        finally:
            self._parts.remove(part)

    @asynccontextmanager
    async def interrupting(self, text: str) -> AsyncIterator[None]:
        """Interrupt the block after a request to stop, except within `gradually`. Raises like `stopped(text)`."""
        try:
            async with asyncio.timeout(None) as limit:
                self._limit = limit
                self._interrupt()
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            self.stopped(text)
        except InterruptedCodeError as error:
            self.stopped(f"{text}: {error}")
        finally:
            self._limit = None

    @contextmanager
    def gradually(self) -> Iterator[None]:
        """Do not interrupt the block, because it ends by itself after a request to stop.

        If it raises, the work on the way out, such as the release of a model, is not interrupted either.
        """
        self._gradual += 1
        yield
        self._gradual -= 1

    @property
    def ends_itself(self) -> bool:
        """Whether the run's current work ends by itself after a request to stop."""
        return bool(self._gradual or self._parts)

    def _interrupt(self) -> None:
        if self.stopping and not self.ends_itself and self._limit is not None and not self._limit.expired():
            self._limit.reschedule(0)

    @property
    def stopping(self) -> bool:
        """Whether the run was requested to stop."""
        return self._stop.is_set() or bool(self.interrupted)

    @property
    def paused(self) -> bool:
        return not self._go.is_set()

    def stop(self) -> None:
        """Request the run to stop. This also ends a pause."""
        self._stop.set()
        self._go.set()
        for part in self._parts:
            part.stop()
        self._interrupt()

    def suspend(self, state: State[Any]) -> None:
        """Request the run to stop, so that another process can continue it. state: the run's suspended state."""
        self._suspended = state
        self.stop()

    def stopped(self, text: str) -> NoReturn:
        """End the run after its last step: raise StoppedError, or Prefect's Pause if the run is suspended."""
        if self._suspended is not None:
            raise Pause(text, state=self._suspended)
        raise StoppedError(text)

    def pause(self) -> None:
        """Pause the run, unless it is stopping."""
        if not self.stopping:
            self._go.clear()

    def resume(self) -> None:
        """End the pause."""
        self._go.set()

    async def before_stop(self, work: Callable[[], Coroutine[Any, Any, T]], seconds: float = 0.0) -> T:
        """The result of `work`. InterruptedCodeError: it did not end within `seconds` after a request to stop."""

        async def late() -> None:
            await self._stop.wait()
            await asyncio.sleep(seconds)

        working, ending = asyncio.create_task(work()), asyncio.create_task(late())
        try:
            await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise InterruptedCodeError(f"it did not end within {seconds:g} s after the request to stop")
            return await working
        finally:
            for one in (working, ending):
                one.cancel()
            await asyncio.gather(working, ending, return_exceptions=True)

    async def may_go_on(self) -> bool:
        """Wait while the run is paused. Returns False if the run must stop."""
        await self._go.wait()
        return not self.stopping


_current: ContextVar[Control | None] = ContextVar("control", default=None)


@asynccontextmanager
async def stoppable(text: str) -> AsyncIterator[None]:
    """Interrupt the block, the work of a flow run, when the run is requested to stop. StoppedError: with `text`.

    Work within `controlled` is not interrupted.
    """
    async with _control() as control, control.interrupting(text):
        yield


@asynccontextmanager
async def controlled() -> AsyncIterator[Control]:
    """The control of the current flow run, for a block that ends by itself when the run must stop.

    Outside a flow run, only signals stop it.
    """
    async with _control() as control:
        with control.gradually():
            yield control


@asynccontextmanager
async def _control() -> AsyncIterator[Control]:
    """The control of the current flow run: that of the enclosing block if it belongs to the same run, or a new one.

    The control of a subflow run is attached to that of its parent run, which handles signals for both.
    """
    context, outer = FlowRunContext.get(), _current.get()
    run = context.flow_run.id if context is not None and context.flow_run is not None else None
    if outer is not None and outer.flow_run == run:
        yield outer
        return
    control, watching = Control(run), None
    if run is not None:
        root = runtime.root_flow_run_id
        watching = asyncio.create_task(_watch(control, {run, *([UUID(root)] if root else [])}))
    token = _current.set(control)
    try:
        with outer.over(control) if outer is not None else _on_signals(control):
            yield control
    finally:
        _current.reset(token)
        if watching is not None:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def before_stop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of `work`, the part of a step that trains nothing yet.

    InterruptedCodeError: it did not end within LAST_SECONDS after the current flow run was requested to stop.
    """
    control = _current.get()
    return await (work() if control is None else control.before_stop(work, LAST_SECONDS))


def refuse_after_interruption() -> None:
    """Raise InterruptedCodeError if user code was interrupted, so that no more user code begins."""
    control = _current.get()
    if control is not None and control.interrupted:
        raise InterruptedCodeError(control.interrupted)


async def _watch(control: Control, flow_runs: set[UUID]) -> None:
    """Read the states of the run and of its root run every LOOK_SECONDS, and obey them. Never returns."""
    async with get_client() as client:
        while True:
            try:
                states = [run.state for run in [await client.read_flow_run(id_) for id_ in flow_runs] if run.state]
            except (httpx.HTTPError, PrefectException) as error:
                log.warning(
                    "the run's state cannot be read, so its buttons have no effect yet: %s: %s",
                    type(error).__name__,
                    error,
                )
            else:
                obey(control, states)
            await asyncio.sleep(LOOK_SECONDS)


def obey(control: Control, states: list[State[Any]]) -> None:
    """Stop, suspend, pause or resume the run, depending on the states of the run and of its root run."""
    if any(state.is_cancelling() or state.is_cancelled() for state in states):
        control.stop()
    elif suspended := [state for state in states if state.is_paused() and state.state_details.pause_reschedule]:
        control.suspend(suspended[0])
    elif any(state.is_paused() for state in states):
        control.pause()
    elif control.paused:
        control.resume()


@contextmanager
def _on_signals(control: Control) -> Iterator[None]:
    """Stop the run at SIGTERM, and at the first Ctrl-C. The second Ctrl-C interrupts it.

    User code that blocks the event loop for STUCK_SECONDS after a signal is interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    received, ended = SimpleQueue[int](), threading.Event()
    loop, main, context = asyncio.get_running_loop(), threading.get_ident(), copy_context()

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])
        received.put(number)  # the thread does the rest, because locks (of logs, for example) may be held here
        if control.interrupted and place_in_loop(frame):
            raise InterruptedCodeError(control.interrupted)

    def warn(text: str) -> None:
        log.warning(text)
        log_line(text, logging.WARNING)

    def follow() -> None:
        asked = False
        while not ended.is_set():
            try:
                number = received.get(timeout=1.0)
            except Empty:
                number = 0
            if number == signal.SIGINT:
                log.warning(_STOPPING if control.ends_itself else "stopping")
            asked = asked or number > 0
            passed = threading.Event()
            if asked:
                try:
                    loop.call_soon_threadsafe(control.stop)
                    loop.call_soon_threadsafe(passed.set)
                except RuntimeError:  # the loop is closed
                    return
            while asked and not passed.wait(STUCK_SECONDS) and not ended.is_set():
                if place := place_in_loop(sys._current_frames().get(main)):
                    control.interrupted = f"{place} blocked the event loop, and was interrupted"
                    context.run(warn, control.interrupted)
                    signal.pthread_kill(main, signal.SIGTERM)

    for number in before:
        signal.signal(number, handle)
    threading.Thread(target=follow, name="signals of a run", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)
