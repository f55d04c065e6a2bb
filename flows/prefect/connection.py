"""The connection to Prefect: its settings, ordered requests, the server's reachability, and our own server."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.events import Event
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.core.log_levels import logging_at
from tinkerflow.backend.core.prefect_access import last_port, make_credential, record_port
from tinkerflow.backend.core.retry import STEADY_SECONDS, Restarts
from tinkerflow.backend.settings import Settings
from tinkerflow.flows.prefect.client import get_client
from tinkerflow.flows.prefect.server import is_healthy, listen, start_server

log = logging.getLogger(__name__)

HEALTH_SECONDS = 2.0  # seconds between two checks
LATE_SECONDS = 10.0  # a server that takes longer to answer is away; on a busy machine, answers take seconds
END_SECONDS = 5.0
MOST_FAILURES = 30  # answers such as 500 to one request from a healthy server, which take about a minute
MOST_OPTIONAL = 1000  # requests that wait for the server before optional ones are dropped
_BANNED = str.maketrans(dict.fromkeys("/%&<>", "-"))  # Prefect refuses these in names of deployments

Request = Callable[[PrefectClient], Awaitable[object]]


def is_away(error: Exception) -> bool:
    """Whether a request failed because the server cannot be reached or is too busy, so that it may be sent again."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    return isinstance(error, httpx.TransportError | TimeoutError | OSError)


class PrefectConnection:
    """Whether Prefect can be reached, and how many task runs and unshown operations there were."""

    def __init__(self, api_url: str, journal: str = "", title: str = "training runs") -> None:
        """Prefect is assumed to be reachable until `watch` finds otherwise.

        api_url: the Prefect API, empty for none. journal: the URL of the journal. Its engines' flow runs all have the
        tag `mark`, which derives from this URL. title: the name of the deployment that Prefect shows for training runs.
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
        self._on_reachable: list[Callable[[], None]] = []
        self._events = RequestQueue(self, "events")

    @contextmanager
    def settings(self, credential: str = "") -> Iterator[None]:
        """Apply Prefect's client settings to everything that is started in the block.

        Prefect's own logs are not sent to the server. Failing requests are not retried for minutes.

        credential: the credential of the server that we start; empty: the environment contains the server's credential.
        Our server uses no CSRF tokens; for other servers each client requests one first, which takes 1 ms of CPU.
        """
        updates: dict[Any, Any] = {PREFECT_LOGGING_TO_API_ENABLED: False, PREFECT_CLIENT_MAX_RETRIES: 1}
        if self.api_url:
            updates[PREFECT_API_URL] = self.api_url
        if credential:
            updates |= {PREFECT_API_AUTH_STRING: credential, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}
        with logging_at(logging.WARNING, "prefect"), temporary_settings(updates):
            yield

    async def watch(self) -> None:
        """Check every HEALTH_SECONDS whether Prefect can be reached, until cancelled."""
        async with httpx.AsyncClient(timeout=LATE_SECONDS) as client:
            while True:
                self.note_reachable(await is_healthy(client, self.api_url), "it does not answer")
                await asyncio.sleep(HEALTH_SECONDS)

    def note_reachable(self, reachable: bool, why: str) -> None:
        """Note whether Prefect answered, and `why` it did not. Calls the `on_reachable` callbacks on its return."""
        if self.reachable and not reachable:
            log.warning("Prefect at %s cannot be reached (%s): operations continue untracked", self.api_url, why)
        if not self.reachable and reachable:
            log.warning(
                "Prefect at %s can be reached again; %d operations were not tracked", self.api_url, self.untracked
            )
            self._reachable.set()
            for callback in list(self._on_reachable):
                callback()
        if not reachable:
            self._reachable.clear()

    @property
    def reachable(self) -> bool:
        """Whether Prefect answered the last request."""
        return self._reachable.is_set()

    async def wait_until_reachable(self) -> None:
        """Wait until Prefect can be reached."""
        await self._reachable.wait()

    def on_reachable(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever Prefect can be reached again, until `forget`."""
        self._on_reachable.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Stop calling `callback`."""
        self._on_reachable.remove(callback)

    def run_beside(self, work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[object]:
        """Run `work` in the background. `close` gives it END_SECONDS."""
        task = asyncio.create_task(work, name=name)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    def emit(self, event: Event) -> None:
        """Send an event that is not about a flow run. Never waits."""
        if self.api_url:
            self._events.send(lambda client: send_event(client, event), optional=True)

    async def close(self) -> None:
        """Give requests that were not sent yet END_SECONDS to be sent."""
        if self._beside and self.reachable:
            await asyncio.wait(self._beside, timeout=END_SECONDS)
        late = tuple(self._beside)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


class RequestQueue:
    """Requests to Prefect that are sent in order in the background. Nothing waits for them.

    A request that does not reach the server is sent again when the server is back. A request that the server refuses,
    or that fails MOST_FAILURES times, is logged and skipped.
    """

    def __init__(self, connection: PrefectConnection, name: str) -> None:
        """No request waits. name: for log lines."""
        self._connection = connection
        self._name = name
        self._requests: deque[Request] = deque()
        self._sending: asyncio.Task[object] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether every request was sent."""
        return self._sending is None

    def send(self, request: Request, *, optional: bool = False) -> None:
        """Send a request after the waiting ones. optional: drop the request if MOST_OPTIONAL wait."""
        if optional and len(self._requests) >= MOST_OPTIONAL:
            return
        self._requests.append(request)
        if self._sending is None:
            self._sending = self._connection.run_beside(self._send_all(), self._name)

    async def _send_all(self) -> None:
        failures = 0  # failures in a row
        try:
            while self._requests:
                await self._connection.wait_until_reachable()
                try:
                    async with get_client() as client:
                        while self._requests:
                            await self._requests[0](client)
                            self._requests.popleft()
                            failures = 0
                except Exception as error:  # noqa: BLE001  whatever Prefect raises, the work continues
                    why = f"{type(error).__name__}: {error}"
                    failures += isinstance(error, httpx.HTTPStatusError)
                    if is_away(error) and failures < MOST_FAILURES:
                        self._connection.note_reachable(False, why)
                    else:
                        log.warning("%s: Prefect refused a request: %s", self._name, why)
                        self._requests.popleft()
                        failures = 0
        finally:
            self._sending = None


def event_about(event: str, name: str, of: str, payload: Mapping[str, object], once: str = "") -> Event:
    """A Prefect event. event: the event's name. name, of: the event's subject, and the subject's kind. payload: facts.

    once: Prefect keeps only one such event per subject with this text; "" = Prefect keeps all.
    """
    resource = {"prefect.resource.id": f"tinkerflow.{of}.{name}", "prefect.resource.name": name}
    values: dict[str, Any] = {"event": event, "resource": resource, "payload": dict(payload)}
    if once:
        values["id"] = uuid5(NAMESPACE_URL, f"{event}/{of}/{name}/{once}")
    return Event.model_validate(values)


async def send_event(client: PrefectClient, event: Event) -> None:
    """Send one event in a request. Prefect's own method needs a thread, a websocket, and private classes."""
    await client.request("POST", "/events", json=[event.model_dump(mode="json")])


@asynccontextmanager
async def open_prefect(settings: Settings, say: Callable[[str], None]) -> AsyncIterator[PrefectConnection]:
    """Open the connection of the settings, with the embedded server if there is one. Applies Prefect's settings inside.

    settings: `prefect` is not "off". A server that does not start, ends or falls silent is restarted indefinitely.
    Meanwhile work continues untracked.
    """
    if settings.prefect == "external" and not os.environ.get("PREFECT_API_URL"):
        raise UserError("prefect is 'external': the variable PREFECT_API_URL must name the server to use")
    names = (settings.journal_url, title_of(settings))
    async with AsyncExitStack() as stack:
        if settings.prefect == "embedded":
            say("starting the Prefect server")
            wanted = settings.prefect_port
            listener = stack.enter_context(await listen(last_port(settings.data_dir, wanted), wanted))
            connection = PrefectConnection(f"http://127.0.0.1:{listener.getsockname()[1]}/api", *names)
            credential = await asyncio.to_thread(make_credential, settings.data_dir)
            record_port(settings.data_dir, wanted, listener.getsockname()[1])
            stack.enter_context(connection.settings(credential))
            await stack.enter_async_context(_embedded_server(settings, listener, connection))
        else:
            connection = PrefectConnection(os.environ["PREFECT_API_URL"], *names)
            stack.enter_context(connection.settings())
        stack.push_async_callback(connection.close)
        yield connection


@asynccontextmanager
async def _embedded_server(
    settings: Settings, listener: socket.socket, connection: PrefectConnection
) -> AsyncIterator[None]:
    first: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    keeping = asyncio.create_task(_keep_server(settings, listener, connection, first), name="prefect server")
    try:
        if not await first:
            connection.note_reachable(False, "the embedded server did not start")
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def title_of(settings: Settings) -> str:
    """The name of the deployment for an engine's training runs, which includes the place of their journal."""
    journal = urlsplit(settings.journal_url)
    name = journal.path.strip("/") if journal.hostname else settings.data_dir.resolve().name
    return f"training runs of {name.translate(_BANNED)} on {journal.hostname or socket.gethostname()}"


async def _keep_server(
    settings: Settings, listener: socket.socket, connection: PrefectConnection, first: asyncio.Future[bool]
) -> None:
    """Restart the server whenever it ends or falls silent. first: receives whether the first start succeeded."""
    clock, restarts = asyncio.get_running_loop().time, Restarts()
    while True:
        steady = False
        try:
            server = await start_server(settings.data_dir, listener, settings.prefect_public_url)
        except (ServerError, OSError) as error:  # OSError: for example, the disk is full or no process can be started
            log.error("the Prefect server cannot be started: %s", error)
        else:
            if not first.done():
                first.set_result(True)
            began = clock()
            try:
                ending = await server.ended()
                log.error("the Prefect server %s: starting it again", ending)
                connection.note_reachable(False, ending)
                steady = clock() - began > STEADY_SECONDS
            finally:
                await server.stop()
        if not first.done():
            first.set_result(False)
        await asyncio.sleep(restarts.pause(steady=steady))
