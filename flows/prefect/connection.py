"""The connection to Prefect: whether its server can be reached, its settings, and the server that we start."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

import httpx
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker, emit_events_to_cloud
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.states import Crashed

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.core.prefect_access import make_credential
from tinkerflow.backend.core.retry import STEADY_SECONDS, Restarts, repeat
from tinkerflow.backend.settings import Settings
from tinkerflow.flows.prefect.client import get_client
from tinkerflow.flows.prefect.server import is_healthy, listen, start_server

log = logging.getLogger(__name__)

HEALTH_SECONDS = 2.0  # between two checks
LATE_SECONDS = 10.0  # a server that takes longer to answer is away; on a busy machine, one that works takes seconds
END_SECONDS = 5.0
# Prefect's loggers for what we log ourselves, once: a server that cannot be reached.
_SAID_BY_US = ("prefect.events.clients", "prefect._internal.concurrency")
_BANNED = str.maketrans(dict.fromkeys("/%&<>", "-"))  # Prefect's names of deployments have none of these
_UNFINISHED = ("PENDING", "RUNNING", "PAUSED")  # controls.py ends the runs that are to be cancelled


def is_away(error: Exception) -> bool:
    """Whether a request failed because the server cannot be reached or is too busy, so that it may be sent again."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    return isinstance(error, httpx.TransportError | TimeoutError | OSError)


class PrefectConnection:
    """Knows whether Prefect can be reached, and counts task runs and the operations that none shows."""

    def __init__(self, api_url: str, journal: str = "", title: str = "training runs") -> None:
        """Prefect is taken for reachable until `watch` finds otherwise.

        api_url: the Prefect API, empty for none. journal: the URL of the journal; `mark` is the tag that all flow runs
        of its engines have. title: the name of the deployment in Prefect that training runs are of.
        """
        self.api_url = api_url
        self._reachable = asyncio.Event()
        if api_url:
            self._reachable.set()
        self.tracked = 0
        self.untracked = 0
        self.mark = "tinkerflow:" + hashlib.sha256(journal.encode()).hexdigest()[:8]
        self.title = title
        self._beside: set[asyncio.Task[object]] = set()
        self._when_back: list[Callable[[], None]] = []

    @contextmanager
    def settings(self, credential: str = "") -> Iterator[None]:
        """Prefect's client settings, for everything that is started inside.

        Prefect's own logs stay with us. A request that fails is not repeated for minutes.

        credential: of the server that we start; empty: the environment names the server's. Our server has no CSRF
        tokens; for other servers each client requests one first, which takes 1 ms of CPU.
        """
        for name in _SAID_BY_US:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        logging.getLogger("prefect").setLevel(logging.WARNING)
        updates: dict[Any, Any] = {PREFECT_LOGGING_TO_API_ENABLED: False, PREFECT_CLIENT_MAX_RETRIES: 1}
        if self.api_url:
            updates[PREFECT_API_URL] = self.api_url
        if credential:
            updates |= {PREFECT_API_AUTH_STRING: credential, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}
        with temporary_settings(updates), _impatient_events(self.api_url):
            yield

    async def watch(self) -> None:
        """Check every HEALTH_SECONDS whether Prefect can be reached, until cancelled."""
        async with httpx.AsyncClient(timeout=LATE_SECONDS) as client:

            async def check() -> None:
                self.found(await is_healthy(client, self.api_url), "it does not answer")

            await repeat(check, HEALTH_SECONDS, on=(), what="", log=log)

    def found(self, reachable: bool, why: str) -> None:
        """Prefect answered, or did not and `why`: whoever asked to hear that it is back is told."""
        if self.reachable and not reachable:
            log.warning("Prefect at %s cannot be reached (%s): work goes on untracked", self.api_url, why)
        if not self.reachable and reachable:
            log.warning("Prefect at %s is back; %d operations went untracked", self.api_url, self.untracked)
            self._reachable.set()
            for tell in list(self._when_back):
                tell()
        if not reachable:
            self._reachable.clear()

    @property
    def reachable(self) -> bool:
        """Whether Prefect answered when it was last asked."""
        return self._reachable.is_set()

    async def back(self) -> None:
        """Wait until Prefect can be reached."""
        await self._reachable.wait()

    def when_back(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever Prefect can be reached again, until `forget`."""
        self._when_back.append(tell)

    def forget(self, tell: Callable[[], None]) -> None:
        """Call `tell` no more."""
        self._when_back.remove(tell)

    def beside(self, work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[object]:
        """Do `work` beside everything else; `close` gives it END_SECONDS."""
        task = asyncio.create_task(work, name=name)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

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
            self.found(False, f"{type(error).__name__}: {error}")
        return count

    def emit(
        self,
        event: str,
        name: str,
        of: str,
        payload: Mapping[str, object],
        *,
        send: Callable[[dict[str, Any]], object] | None = None,
        once: str = "",
    ) -> None:
        """Emit a Prefect event about the `of` that is called `name`, such as `tinkerflow.group.ended`; never waits.

        event, name, of: of the event, and of the thing it is about. payload: its facts. send: sends it:
        `FlowRunRecord.emit` adds the flow run, which automations can suspend or cancel. once: Prefect keeps one event
        of each thing with this text.
        """
        if self.api_url:
            resource = {"prefect.resource.id": f"tinkerflow.{of}.{name}", "prefect.resource.name": name}
            send = send or (lambda event: emit_event(**event))
            key = uuid5(NAMESPACE_URL, f"{event}/{of}/{name}/{once}") if once else None
            send({"event": event, "resource": resource, "payload": dict(payload), "id": key})

    async def close(self) -> None:
        """Give what was not sent yet END_SECONDS to be sent, requests and events alike."""
        if self._beside and self.reachable:
            await asyncio.wait(self._beside, timeout=END_SECONDS)
        late = tuple(self._beside)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await cast(Awaitable[object], EventsWorker.drain_all(timeout=END_SECONDS))


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
async def open_prefect(settings: Settings, say: Callable[[str], None]) -> AsyncIterator[PrefectConnection]:
    """The connection that the settings ask for, with its server where that is embedded, and Prefect's settings inside.

    A server that does not start, ends or is silent is started again and again; meanwhile work goes on untracked.
    """
    if settings.prefect == "external" and not os.environ.get("PREFECT_API_URL"):
        raise UserError("prefect is 'external': the variable PREFECT_API_URL must name the server to use")
    names = (settings.journal_url, title_of(settings))
    async with AsyncExitStack() as stack:
        if settings.prefect == "embedded":
            say("starting the Prefect server")
            listener = stack.enter_context(await listen(settings.prefect_port))
            connection = PrefectConnection(f"http://127.0.0.1:{listener.getsockname()[1]}/api", *names)
            credential = await asyncio.to_thread(make_credential, settings.data_dir)
            stack.enter_context(connection.settings(credential))
            await stack.enter_async_context(_embedded_server(settings, listener, connection))
        else:
            external = os.environ["PREFECT_API_URL"] if settings.prefect == "external" else ""
            connection = PrefectConnection(external, *names)
            stack.enter_context(connection.settings())
        stack.push_async_callback(connection.close)
        await connection.reconcile()
        yield connection


@asynccontextmanager
async def _embedded_server(
    settings: Settings, listener: socket.socket, connection: PrefectConnection
) -> AsyncIterator[None]:
    first: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    keeping = asyncio.create_task(_keep_server(settings, listener, connection, first), name="prefect server")
    try:
        if not await first:
            connection.found(False, "the embedded server did not start")
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def title_of(settings: Settings) -> str:
    """The name of the deployment that an engine's training runs are of: it says where their journal is."""
    journal = urlsplit(settings.journal_url)
    name = journal.path.strip("/") if journal.hostname else settings.data_dir.resolve().name
    return f"training runs of {name.translate(_BANNED)} on {journal.hostname or socket.gethostname()}"


async def _keep_server(
    settings: Settings, listener: socket.socket, connection: PrefectConnection, first: asyncio.Future[bool]
) -> None:
    """Start the server again whenever it ends or is silent. first: whether the first start succeeded."""
    clock, restarts = asyncio.get_running_loop().time, Restarts()
    while True:
        steady = False
        try:
            server = await start_server(settings.data_dir, listener, settings.prefect_public_url)
        except ServerError as error:
            log.error("%s", error.message)
        else:
            if not first.done():
                first.set_result(True)
            began = clock()
            try:
                ending = await server.ended()
                log.error("the Prefect server %s: it is started again", ending)
                connection.found(False, ending)
                steady = clock() - began > STEADY_SECONDS
            finally:
                await server.stop()
        if not first.done():
            first.set_result(False)
        await asyncio.sleep(restarts.pause(steady=steady))
