"""The API process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
import uvloop
from fastapi import FastAPI

from tinkerflow.api.app import create_app
from tinkerflow.api.call import Services
from tinkerflow.api.connections import Connection, watch
from tinkerflow.api.errors import cause_of
from tinkerflow.backend.core import tracing
from tinkerflow.backend.core.clock import every_second
from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.core.threads import TurnThreads
from tinkerflow.backend.journal import AWAY, Journal
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store import Store
from tinkerflow.backend.supervise.processes import allow_open_files

log = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 0.25
_STOP_SECONDS = 3  # time for answers that are still being written
_KEEP_ALIVE_SECONDS = 120  # longer than the SDK keeps an idle connection, so that the client closes the connection
_BACKLOG = 2048  # the SDK opens one connection for each of up to 2,000 samples
_BEAT_SECONDS = 5.0
_THREADS = 16  # concurrent journal calls; SQLite serves them one by one


def serve(
    settings: Settings, *, on_ready: Callable[[], None] = lambda: None, on_turn: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or SIGINT, then return within a few seconds. Held polls are answered `try_again`.

    First waits until the engine has migrated the journal's database and registered a base model. The process may open
    as many connections as the system allows. UserError: the database's server refuses its URL.
    on_ready: called once requests are accepted. on_turn: called every second while the event loop is alive.
    """
    allow_open_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, on_ready, on_turn))


async def _serve(settings: Settings, on_ready: Callable[[], None], on_turn: Callable[[], None]) -> None:
    tracing.export("api")
    asyncio.get_running_loop().set_default_executor(TurnThreads(_THREADS, "journal"))
    turning = asyncio.create_task(every_second(on_turn), name="turns")
    journal = await _opened(settings)
    try:
        await _base_model_registered(journal)
        async with journal.result_subscriptions() as subscriptions:
            store = Store.open(settings.store_url)
            if (mark := await asyncio.to_thread(journal.recovery.store_mark, store.url)) is not None:
                store.blobs.expect(mark)
            app = create_app(settings, journal, subscriptions, store)
            server = ApiServer(app, settings, on_ready)
            beating = asyncio.create_task(_beat(journal), name="beat")
            try:
                await asyncio.create_task(server.serve(), name="http")
            finally:
                beating.cancel()
    finally:
        turning.cancel()
        journal.close()


async def _beat(journal: Journal) -> None:
    """Record regularly in the journal that the API is up, because sessions must not expire while it is down."""
    starts = True
    while True:
        try:
            await asyncio.to_thread(journal.leases.beat, starts=starts)
            starts = False
        except (ServerError, *AWAY):
            log.warning("cannot write to the journal; trying again in %.0f s", _BEAT_SECONDS, exc_info=True)
        await asyncio.sleep(_BEAT_SECONDS)


async def _opened(settings: Settings) -> Journal:
    waiting = False
    while True:
        try:
            return await asyncio.to_thread(Journal.open, settings.journal_url)
        except (ServerError, *AWAY) as e:
            if not waiting:
                log.info("waiting for the journal's database: %s", cause_of(e))
                waiting = True
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)


async def _base_model_registered(journal: Journal) -> None:
    waiting = ""
    while True:
        try:
            if await asyncio.to_thread(journal.base_models.all):
                return
            why = "the engine to register a base model"
        except AWAY as e:
            why = f"the journal's database: {cause_of(e)}"
        if why != waiting:
            log.info("waiting for %s", why)
            waiting = why
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)


class ApiServer(uvicorn.Server):
    """uvicorn with the clocks of connections.py. When it stops, it releases held polls and exits with status 0."""

    def __init__(self, app: FastAPI, settings: Settings, on_ready: Callable[[], None] = lambda: None) -> None:
        """app: from `create_app`. settings: define the address. on_ready: called once the server listens."""
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        super().__init__(config)
        self._services: Services = app.state.services
        self._on_ready = on_ready
        self._watching: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call on_ready."""
        await super().startup(sockets)
        if self.started:
            self._watching = asyncio.create_task(watch(self.server_state.connections), name="connections")
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop after the requests in progress."""
        # uvicorn also remembers the signal and raises it again after a clean stop.
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Release the held polls, then wait for the answers in progress."""
        self._services.holds.release()
        if self._watching is not None:
            self._watching.cancel()
        await super().shutdown(sockets)
