"""The buttons of a run's page while the run goes: cancel, pause, suspend, resume.

A runner (`tinkerflow serve`, a Prefect worker) cancels a run with SIGTERM. Prefect's own handler would raise in the
middle of a step. The handler here only sets a flag: the run stops at the end of a step, with its state saved. In a
process without a runner Prefect acts on no button, and on Pause it acts nowhere. Therefore the run also reads its own
state.

Suspend ends the run in this process, at the end of a step with its state saved. When somebody presses Resume, a runner
starts another process, which continues from that state.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NoReturn
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Pause, PrefectException
from prefect.runtime import flow_run as runtime

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0


class StoppedError(Exception):
    """The run has stopped on request; the message names the last step."""


class Control:
    """Whether the run may continue. All calls come from one event loop."""

    def __init__(self) -> None:
        """Allow the run to continue."""
        self._stop = asyncio.Event()
        self._go = asyncio.Event()
        self._go.set()
        self._suspended: State[Any] | None = None
        self._parts: list[Control] = []

    @contextmanager
    def over(self, part: Control) -> Iterator[None]:
        """For the block: when this run is stopped, stop `part` too, the control of a subflow run."""
        self._parts.append(part)
        if self.stopping:
            part.stop()
        try:
            yield
        finally:
            self._parts.remove(part)

    @property
    def stopping(self) -> bool:
        """Whether somebody asked the run to stop."""
        return self._stop.is_set()

    @property
    def paused(self) -> bool:
        """Whether the run is paused."""
        return not self._go.is_set()

    def stop(self) -> None:
        """Request the run to stop; this also ends a pause."""
        self._stop.set()
        self._go.set()
        for part in self._parts:
            part.stop()

    def suspend(self, state: State[Any]) -> None:
        """Ask the run to stop, so that another process can continue it; `state` is the run's suspended state."""
        self._suspended = state
        self.stop()

    def stopped(self, text: str) -> NoReturn:
        """End the run after its last step: raise StoppedError, or Prefect's Pause when the run is suspended."""
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

    async def may_go_on(self) -> bool:
        """Wait while the run is paused; return False when the run must stop."""
        await self._go.wait()
        return not self.stopping


_current: ContextVar[Control | None] = ContextVar("control", default=None)


@asynccontextmanager
async def controlled() -> AsyncIterator[Control]:
    """The control of the current flow run; outside of a flow run only signals stop it.

    A control within the block of another one belongs to a subflow run; the outer control hears the signal for both.
    """
    control, outer = Control(), _current.get()
    context = FlowRunContext.get()
    watching = None
    if context is not None and context.flow_run is not None:
        root = runtime.root_flow_run_id
        watching = asyncio.create_task(_watch(control, {context.flow_run.id, *([UUID(root)] if root else [])}))
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


async def _watch(control: Control, flow_runs: set[UUID]) -> None:
    """Read the states of the run and of its root run every LOOK_SECONDS, and obey them; never returns."""
    async with get_client() as client:
        while True:
            try:
                states = [run.state for run in [await client.read_flow_run(id_) for id_ in flow_runs] if run.state]
            except (httpx.HTTPError, PrefectException) as error:
                log.warning("the run's state cannot be read, so its buttons wait: %s: %s", type(error).__name__, error)
            else:
                obey(control, states)
            await asyncio.sleep(LOOK_SECONDS)


def obey(control: Control, states: list[State[Any]]) -> None:
    """Stop, suspend, pause or resume the run, as the states of the run and of its root run say."""
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
    """Stop the run at SIGTERM, and at the first Ctrl-C; the second Ctrl-C interrupts it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in signals}
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        if number == signal.SIGINT:
            log.warning("stopping after this step, with its state saved; press Ctrl-C again to stop without saving")
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
        control.stop()

    for number in signals:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
