"""What people ask of a run while it goes: cancel, pause, resume.

A runner (`tinkerflow serve`, a worker) cancels with SIGTERM. Prefect's own handler would raise in the middle of
whatever runs; here it only asks, and the run stops at the end of a step, with its state saved. In a process without a
runner nobody acts on the buttons at all, and nowhere does anybody act on Pause, so the run looks at its own state, too.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
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


@asynccontextmanager
async def controlled() -> AsyncIterator[Control]:
    """Control of the flow run that this is called in; outside of one it listens to SIGTERM alone."""
    control = Control()
    context = FlowRunContext.get()
    watching = None
    if context is not None and context.flow_run is not None:
        root = runtime.root_flow_run_id
        watching = asyncio.create_task(_watch(control, {context.flow_run.id, *([UUID(root)] if root else [])}))
    try:
        with _on_sigterm(control):
            yield control
    finally:
        if watching is not None:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def _watch(control: Control, flow_runs: set[UUID]) -> None:
    """Look at the states of the run and of the one that it is a part of; never returns."""
    async with get_client() as client:
        while True:
            try:
                states = [run.state.type for run in [await client.read_flow_run(one) for one in flow_runs] if run.state]
            except (httpx.HTTPError, PrefectException) as error:
                log.warning("the run's state cannot be read, so its buttons wait: %s: %s", type(error).__name__, error)
            else:
                _obey(control, states)
            await asyncio.sleep(LOOK_SECONDS)


def _obey(control: Control, states: list[StateType]) -> None:
    if StateType.CANCELLING in states or StateType.CANCELLED in states:
        control.stop()
    elif StateType.PAUSED in states:
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
