"""What people ask of a run while it goes: cancel, pause, resume.

A runner (`tinkerflow serve`, a worker) cancels with SIGTERM. Prefect's own handler would raise in the middle of
whatever runs; here it only asks, and the run stops at the end of a step, with its state saved. In a process without a
runner nobody acts on the buttons at all, and nowhere does anybody act on Pause, so the run looks at its own state, too.

Suspend, as the UI calls its pause, ends the run in this process: when somebody presses Resume, a runner starts another
one. So it, too, stops at the end of a step with its state saved, and the other process goes on from there.
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
    """The run was asked to stop and did: the message says after which step."""


class Control:
    """Whether the run may go on. All of it belongs to one event loop."""

    def __init__(self) -> None:
        """It may."""
        self._stop = asyncio.Event()
        self._go = asyncio.Event()
        self._go.set()
        self._suspended: State[Any] | None = None
        self._parts: list[Control] = []

    @contextmanager
    def over(self, part: Control) -> Iterator[None]:
        """For the block, asking for an end of this run asks for one of `part`, a run that is a part of it."""
        self._parts.append(part)
        if self.stopping:
            part.stop()
        try:
            yield
        finally:
            self._parts.remove(part)

    @property
    def stopping(self) -> bool:
        """Whether somebody asked for an end."""
        return self._stop.is_set()

    @property
    def paused(self) -> bool:
        """Whether somebody asked for a pause."""
        return not self._go.is_set()

    def stop(self) -> None:
        """Ask for an end; a pause ends, too."""
        self._stop.set()
        self._go.set()
        for part in self._parts:
            part.stop()

    def suspend(self, state: State[Any]) -> None:
        """Ask for an end after which another process goes on; `state` is the run's."""
        self._suspended = state
        self.stop()

    def stopped(self, text: str) -> NoReturn:
        """Raise what ends the run now that it has stopped: StoppedError, or Prefect's own when it is suspended."""
        if self._suspended is not None:
            raise Pause(text, state=self._suspended)
        raise StoppedError(text)

    def pause(self) -> None:
        """Ask for a pause."""
        if not self.stopping:
            self._go.clear()

    def resume(self) -> None:
        """End a pause."""
        self._go.set()

    async def may_go_on(self) -> bool:
        """Wait while paused; False when the run shall end."""
        await self._go.wait()
        return not self.stopping


_current: ContextVar[Control | None] = ContextVar("control", default=None)


@asynccontextmanager
async def controlled() -> AsyncIterator[Control]:
    """Control of the flow run that this is called in; outside of one it listens to SIGTERM alone.

    Within the block of another one it is a part of that one, which hears the signal for all its parts.
    """
    control, outer = Control(), _current.get()
    context = FlowRunContext.get()
    watching = None
    if context is not None and context.flow_run is not None:
        root = runtime.root_flow_run_id
        watching = asyncio.create_task(_watch(control, {context.flow_run.id, *([UUID(root)] if root else [])}))
    token = _current.set(control)
    try:
        with outer.over(control) if outer is not None else _on_sigterm(control):
            yield control
    finally:
        _current.reset(token)
        if watching is not None:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def _watch(control: Control, flow_runs: set[UUID]) -> None:
    """Look at the states of the run and of the one that it is a part of; never returns."""
    async with get_client() as client:
        while True:
            try:
                states = [run.state for run in [await client.read_flow_run(one) for one in flow_runs] if run.state]
            except (httpx.HTTPError, PrefectException) as error:
                log.warning("the run's state cannot be read, so its buttons wait: %s: %s", type(error).__name__, error)
            else:
                obey(control, states)
            await asyncio.sleep(LOOK_SECONDS)


def obey(control: Control, states: list[State[Any]]) -> None:
    """Do what the states of a run, and of the one that it is a part of, ask for."""
    if any(state.is_cancelling() or state.is_cancelled() for state in states):
        control.stop()
    elif suspended := [state for state in states if state.is_paused() and state.state_details.pause_reschedule]:
        control.suspend(suspended[0])
    elif any(state.is_paused() for state in states):
        control.pause()
    elif control.paused:
        control.resume()


@contextmanager
def _on_sigterm(control: Control) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to whoever has the main thread
        return
    before = signal.getsignal(signal.SIGTERM)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, control.stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
