"""Work is tracked by Prefect when Prefect can be reached, and goes on untracked, counted and logged, when it cannot."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import UUID

import httpx
from prefect import Flow, get_client, tags
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import State
from prefect.context import TagsContext
from prefect.events import emit_event
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker, emit_events_to_cloud
from prefect.exceptions import PrefectSignal
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.states import Crashed

from tinkerflow.backend.errors import ServerError, UserError
from tinkerflow.backend.processes import free_port
from tinkerflow.backend.settings import Settings
from tinkerflow.flows.prefect.deployed import run_deployed
from tinkerflow.flows.prefect_server import is_healthy, start_server

log = logging.getLogger(__name__)

T = TypeVar("T")

BEGIN_SECONDS = 20.0  # a flow run that has not begun by then goes on untracked
HEALTH_SECONDS = 2.0  # between two looks
LATE_SECONDS = 10.0  # a server that takes longer to answer is away; on a busy machine, one that works takes seconds
END_SECONDS = 5.0
RESTART_SECONDS = 2.0  # between the end of an embedded server and the start of the next
# Prefect's loggers for what we log ourselves, once: failed operations, and a server that cannot be reached.
_SAID_BY_US = ("prefect.flow_runs", "prefect.task_runs", "prefect.events.clients", "prefect._internal.concurrency")
_UNFINISHED = ("PENDING", "RUNNING", "PAUSED")  # those that are to be cancelled belong to the buttons

Body = Callable[[], Awaitable[object]]
_body: ContextVar[Body] = ContextVar("body")


async def run_body() -> object:
    """What a flow of the engine does: the body that `Tracking.run` was given, away from the flow run's tags.

    Task runs inherit the tags of their context, and a tagged one costs a round trip to the server.
    """
    body = _body.get()
    with TagsContext(current_tags=set()):
        return await body()


class Tracking:
    """Knows whether Prefect can be reached, and counts what was tracked and what was not (task runs)."""

    def __init__(self, api_url: str, deployment: str = "") -> None:
        """`api_url`: the Prefect API, empty to track nothing. `deployment`: what flow runs of this engine share.

        mark: the tag that says so.
        """
        self.api_url = api_url
        self.reachable = bool(api_url)
        self.tracked = 0
        self.untracked = 0
        self.mark = "tinkerflow:" + hashlib.sha256(deployment.encode()).hexdigest()[:8]
        self._ending: set[asyncio.Task[object]] = set()
        self._shown: dict[UUID, asyncio.Task[None]] = {}

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Prefect's client settings, for everything that is started inside.

        Logs stay with us: sending them costs a request per task run. A request that fails is not repeated for minutes.
        """
        for name in _SAID_BY_US:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        logging.getLogger("prefect").setLevel(logging.WARNING)
        updates: dict[Any, Any] = {PREFECT_LOGGING_TO_API_ENABLED: False, PREFECT_CLIENT_MAX_RETRIES: 1}
        if self.api_url:
            updates[PREFECT_API_URL] = self.api_url
        with temporary_settings(updates), _impatient_events(self.api_url):
            yield

    async def watch(self) -> None:
        """Look every HEALTH_SECONDS whether Prefect can be reached; never returns."""
        async with httpx.AsyncClient(timeout=LATE_SECONDS) as client:
            while self.api_url:
                self._found(await is_healthy(client, self.api_url), "it does not answer")
                await asyncio.sleep(HEALTH_SECONDS)

    async def run(
        self,
        flow: Flow[..., Any],
        body: Callable[[], Awaitable[T]],
        labels: Iterable[str],
        *,
        deployed: bool = False,
        again: UUID | None = None,
        **names: str,
    ) -> T:
        """Await `body` inside a flow run of `flow` (whose function awaits `run_body`), or without one.

        labels: tags of the flow run, for people. names: the flow's parameters. deployed: the run gets the buttons that
        the UI offers for runs of deployments alone. again: the id of a run that is taken up again, instead of a new
        one. Returns as soon as the body does, and raises what it raises; Prefect's own failures are logged and change
        nothing.
        """
        if not self.reachable:
            return await body()
        once = _Once(body)
        _body.set(once)
        call: Callable[..., Coroutine[Any, Any, object]] = flow
        with tags(*labels, self.mark):
            begin = run_deployed(flow, names, self.mark, again) if deployed else call(**names, return_state=True)
            running: asyncio.Task[object] = asyncio.create_task(begin)
        begun = asyncio.create_task(once.begun.wait())
        try:
            await asyncio.wait((running, begun), timeout=BEGIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not once.begun.is_set():
                once.given_up = True
                why = running.exception() if running.done() and not running.cancelled() else "no flow run began in time"
                running.cancel()
                self._found(False, str(why))
                return await body()
            return await asyncio.shield(once.ended)
        except asyncio.CancelledError:
            running.cancel()
            raise
        finally:
            begun.cancel()
            self._ending.add(running)
            running.add_done_callback(self._flow_ended)

    async def guard(self, tracked: Coroutine[Any, Any, None]) -> None:
        """Await a task run; its failure is Prefect's, and changes nothing."""
        try:
            await tracked
        except (Exception, PrefectSignal) as error:  # noqa: BLE001  whatever Prefect raises, the operation goes its way
            self._found(False, f"{type(error).__name__}: {error}")

    async def reconcile(self) -> int:
        """Say of the flow runs that an earlier engine of this deployment left behind that they crashed; how many."""
        if not self.reachable:
            return 0
        left = FlowRunFilter.model_validate({"tags": {"all_": [self.mark]}, "state": {"type": {"any_": _UNFINISHED}}})
        count = 0
        try:
            async with get_client() as client:
                while runs := await client.read_flow_runs(flow_run_filter=left):  # a page of them
                    for run in runs:
                        state: State[None] = Crashed(message="the engine that ran this ended without a word")
                        await client.set_flow_run_state(run.id, state, force=True)
                    count += len(runs)
        except Exception as error:  # noqa: BLE001  the picture may be wrong, the work goes on
            self._found(False, f"{type(error).__name__}: {error}")
        return count

    def tell(self, event: str, name: str, of: str = "base-model", **payload: object) -> None:
        """Emit a Prefect event about the `of` that is called `name`, such as `tinkerflow.group.ended`; never waits."""
        if not self.api_url:
            return
        resource = {"prefect.resource.id": f"tinkerflow.{of}.{name}", "prefect.resource.name": name}
        emit_event(event, resource, payload=payload)

    def show(self, flow_run: UUID, state: State[None]) -> None:
        """Give a flow run a state if it is running then; never waits."""
        if not self.reachable:
            return
        before = self._shown.get(flow_run)
        showing = asyncio.create_task(self._show(flow_run, state, before))
        self._shown[flow_run] = showing
        self._ending.add(cast("asyncio.Task[object]", showing))
        showing.add_done_callback(lambda _: self._was_shown(flow_run, showing))

    async def _show(self, flow_run: UUID, state: State[None], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        try:
            async with get_client() as client:
                now = (await client.read_flow_run(flow_run)).state
                if now is not None and now.is_running():  # what people asked for stays
                    await client.set_flow_run_state(flow_run, state)
        except Exception as error:  # noqa: BLE001  whatever Prefect raises, the work goes on
            self._found(False, f"{type(error).__name__}: {error}")

    def _was_shown(self, flow_run: UUID, showing: asyncio.Task[None]) -> None:
        self._ending.discard(cast("asyncio.Task[object]", showing))
        if self._shown.get(flow_run) is showing:
            del self._shown[flow_run]

    async def close(self) -> None:
        """Give flow runs that are ending END_SECONDS to say so, and what was not sent yet END_SECONDS to be sent."""
        if self._ending:
            _, late = await asyncio.wait(self._ending, timeout=END_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await cast(Awaitable[object], EventsWorker.drain_all(timeout=END_SECONDS))

    def _flow_ended(self, running: asyncio.Task[object]) -> None:
        self._ending.discard(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            log.warning("a flow run could not be ended properly: %s: %s", type(error).__name__, error)

    def _found(self, reachable: bool, why: str) -> None:
        if self.reachable and not reachable:
            log.warning("Prefect at %s cannot be reached (%s): work goes on untracked", self.api_url, why)
        if not self.reachable and reachable:
            log.warning("Prefect at %s is back; %d operations went untracked", self.api_url, self.untracked)
        self.reachable = reachable


@contextmanager
def _impatient_events(api_url: str) -> Iterator[None]:
    """Let an event that cannot be sent fail at once; the client keeps it, and sends it when it is connected again.

    By default Prefect tries for eight seconds for each, also when the process ends: 200 events keep it half an hour.
    """
    if not api_url or emit_events_to_cloud():
        yield
        return
    EventsWorker.set_client_override(PrefectEventsClient, api_url=api_url, reconnection_attempts=1)
    try:
        yield
    finally:
        EventsWorker.set_client_override(None)


@asynccontextmanager
async def open_tracking(settings: Settings, say: Callable[[str], None]) -> AsyncIterator[Tracking]:
    """Tracking as the settings want it, with its server where that is embedded, and Prefect's settings inside.

    A server that does not start, ends or is silent is started again and again; meanwhile work goes on untracked.
    """
    if settings.prefect == "external" and not os.environ.get("PREFECT_API_URL"):
        raise UserError("prefect is 'external': the variable PREFECT_API_URL must name the server to use")
    port = settings.prefect_port or free_port()
    url = {"off": "", "embedded": f"http://127.0.0.1:{port}/api", "external": os.environ.get("PREFECT_API_URL", "")}
    tracking = Tracking(url[settings.prefect], settings.journal_url)
    with tracking.settings():
        keeping: asyncio.Task[None] | None = None
        if settings.prefect == "embedded":
            say("starting the Prefect server")
            first: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            keeping = asyncio.create_task(_keep_server(settings.data_dir, port, first), name="prefect server")
            tracking.reachable = await first
        try:
            await tracking.reconcile()
            yield tracking
        finally:
            await tracking.close()
            if keeping is not None:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)


async def _keep_server(data_dir: Path, port: int, first: asyncio.Future[bool]) -> None:
    while True:
        try:
            server = await start_server(data_dir, port)
        except ServerError as error:
            log.error("%s", error.message)
        else:
            if not first.done():
                first.set_result(True)
            try:
                log.error("the Prefect server %s: it is started again", await server.ended())
            finally:
                await server.stop()
        if not first.done():
            first.set_result(False)
        await asyncio.sleep(RESTART_SECONDS)


class _Once:
    """A body that runs once, in the flow run, unless it was given up before."""

    def __init__(self, body: Callable[[], Awaitable[Any]]) -> None:
        self.begun = asyncio.Event()
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.given_up = False
        self._body = body

    async def __call__(self) -> object:
        if self.given_up:
            return None
        self.begun.set()
        try:
            result = await self._body()
        except BaseException as error:
            if not self.ended.done():
                self.ended.set_exception(error)
                self.ended.exception()  # seen: whoever waits gets it, and if nobody does it is in the flow run
            raise
        self.ended.set_result(result)
        return result
