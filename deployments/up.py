"""`tinkerflow up`: the Prefect server, the engine, the workers and the API, as children of one process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Self

from tinkerflow.backend.catalog.model_source import find_model
from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.core.hosts import can_be_looked_up, family_of, url_of
from tinkerflow.backend.core.ids import EMBEDDED
from tinkerflow.backend.core.prefect_access import PrefectAccess, find_server, server_for_clients
from tinkerflow.backend.core.retry import Restarts
from tinkerflow.backend.pool.host.devices import expected
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store.blobs import open_blobs
from tinkerflow.backend.supervise.processes import free_port
from tinkerflow.deployments.backup import name_embedded_model
from tinkerflow.deployments.data_dir import make_data_dir, owned, refuse_served
from tinkerflow.deployments.keeper import Part
from tinkerflow.deployments.launching import Launcher, Plan

log = logging.getLogger(__name__)

PORT_SECONDS = 3.0
_PREFECT = "http://127.0.0.1:4200/api"


class Stack:
    """All parts of one deployment on this machine, as a context manager that ends the parts at exit.

    A thread with an event loop starts and supervises the parts. The launcher (`launchers/`) also runs in that thread,
    so the workers that it starts outlive an engine that is killed.

    ServerError, with the end of a part's log: the part ended before the stack was ready.
    """

    def __init__(self, settings: Settings, *, report: Callable[[str], None]) -> None:
        """Nothing starts yet. `report` gets the parts' lines, for example about compilation, from other threads.

        The attribute `report` calls it and logs its errors: the service goes on if its output is closed, or if the disk
        of its output is full.

        UserError: there is no launcher, store, base model or tracker of that name, another process serves the data dir
        or uses the port, or the file of the group's secret does not hold a secret.
        """
        _check_places(settings)
        from tinkerflow.deployments.launchers import launcher_of  # after the refusals above, as this takes a second

        self._launcher = launcher_of(settings)
        self.settings = _with_ports(settings, self._launcher)

        def tell(line: str) -> None:
            try:
                report(line)
            except Exception as error:  # noqa: BLE001  of the caller's function
                log.warning("cannot report %r: %r", line, error)

        self.report = tell
        parent, environment = str(os.getpid()), os.environ | self.settings.environment()
        self._parts = [
            Part(
                name,
                (sys.executable, "-m", "tinkerflow", name, "--parent", parent),
                environment=environment,
                log_dir=self.settings.data_dir / "logs",
                silence=self.settings.heartbeat_timeout,
                report=tell,
            )
            for name in ("engine", "api", *(("track",) if settings.trackers or settings.openlineage_url else ()))
        ]
        self._plan = None if self._launcher is None else Plan.of(self.settings, os.environ)
        self._owned = contextlib.ExitStack()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._ready: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="stack", daemon=True)

    @property
    def api_url(self) -> str:
        """Base URL for the tinker SDK."""
        return url_of(self.settings.host, self.settings.port)

    @property
    def prefect(self) -> PrefectAccess | None:
        """How to reach Prefect; None if nothing is tracked, or the embedded server does not run yet."""
        if self.settings.prefect == "embedded":
            return find_server(self.settings.data_dir)
        return server_for_clients(self.settings.data_dir, os.environ) if self.settings.prefect == "external" else None

    @property
    def prefect_url(self) -> str:
        """The URL of Prefect's UI; empty if nothing is tracked, or the embedded server does not run yet."""
        return "" if (prefect := self.prefect) is None else prefect.pages_url

    @property
    def ready_line(self) -> str:
        """The line that announces a service that is ready."""
        none = "starting" if self.settings.prefect == "embedded" else "off"
        return f"ready: {self.api_url}  prefect: {self.prefect_url or none}"

    @property
    def sign_in_line(self) -> str:
        """A line for a terminal, with a link that signs a browser in to Prefect; empty if no sign-in is needed."""
        if (prefect := self.prefect) is None or not prefect.is_embedded:
            return ""
        return (
            f"Prefect's pages: {prefect.link('/', time.time())} (for an hour; `tinkerflow prefect` prints a new link)"
        )

    def __enter__(self) -> Self:
        """Start the parts and wait until requests can be served.

        UserError: another process serves the data dir, or it cannot be written.
        """
        self._owned.enter_context(owned(self.settings.data_dir, self.api_url))
        try:
            with contextlib.suppress(sqlite3.Error):  # the engine reports a database that cannot be used
                name_embedded_model(self.settings.data_dir, moved=True)
            self._thread.start()
            self._ready.result()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._owned:
            self.stop()

    def keep(self) -> None:
        """Block while the thread restarts parts that end or fall silent. Raises the error that ends the stack."""
        self._ended.result()

    def stop(self) -> None:
        """End all parts, last started first, and then the workers that an engine may have left behind."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    # ------------------------------------------------------------------ in the thread
    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
            self._ended.set_result(None)
        except BaseException as error:  # noqa: BLE001  for the thread that waits
            self._ended.set_exception(error)
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        tasks = []
        if self._launcher is not None and self._plan is not None:
            tasks.append(asyncio.create_task(self._keep_workers(self._launcher, self._plan)))
        tasks += [asyncio.create_task(part.keep(self._ready.done)) for part in self._parts]
        stop = asyncio.create_task(self._stopping.wait())
        starting = asyncio.create_task(self._wait_until_ready())
        try:
            await asyncio.wait({stop, starting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                self._ready.set_result(None)
                await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            stop.cancel()
            for task in (starting, *reversed(tasks)):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(self.settings.start_deadline):
                await asyncio.gather(*(asyncio.wrap_future(part.ready) for part in self._parts))
        except TimeoutError:
            late = ", ".join(part.name for part in self._parts if not part.ready.done())
            raise ServerError(
                f"not ready within {self.settings.start_deadline:.0f} s (start_deadline): {late}"
            ) from None

    async def _keep_workers(self, launcher: Launcher, plan: Plan) -> None:
        """Run the launcher, and restart it when it fails. A UserError before the stack is ready propagates."""
        restarts = Restarts()
        while True:
            try:
                if self.settings.idle_release:
                    await self._keep_while_needed(launcher, plan)
                else:
                    await launcher.keep(plan, self.report)
            except Exception as error:
                if isinstance(error, UserError) and not self._ready.done():
                    raise
                pause = restarts.pause(steady=False)
                log.exception("launcher %s failed", launcher.name)
                self.report(f"cannot start workers: {error}; trying again in {pause:.1f} s")
                await asyncio.sleep(pause)

    async def _keep_while_needed(self, launcher: Launcher, plan: Plan) -> None:
        """Release the group's processes while no request needs them."""
        from tinkerflow.deployments.idle import LOOK_SECONDS, demand, keep_while_needed

        needed: Callable[[], Awaitable[bool]] | None = None

        async def is_needed() -> bool:
            return needed is None or await needed()  # True until the engine serves

        async with contextlib.AsyncExitStack() as stack:
            keep, rest = (partial(work, plan, self.report) for work in (launcher.keep, launcher.rest))
            keeping = keep_while_needed(keep, rest, is_needed, self.settings.idle_release, self.report)
            working = asyncio.create_task(keeping)
            stack.push_async_callback(_end, working)
            while not self._ready.done() and not working.done():  # noqa: ASYNC110  two kinds of futures
                await asyncio.sleep(LOOK_SECONDS)
            if not working.done():
                needed = await stack.enter_async_context(demand(self.settings.journal_url))
            await working


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _check_places(settings: Settings) -> None:
    """Raise UserError if a data dir, a port, a platform, a store, a base model or a tracker cannot be used.

    For models of the hub, only config.json is fetched. Buckets are checked by the engine.
    """
    refuse_served(settings.data_dir)
    make_data_dir(settings.data_dir)
    _refuse_used(settings.host, settings.port)
    expected(settings.platform, os.environ)
    for name in ("store", "pipelines"):
        url = getattr(settings, f"{name}_url")
        if not url.startswith("gs://") or url == "gs://":
            _check_writable(name, url)
    named = "" if settings.prefect == "off" else os.environ.get("PREFECT_API_URL", "")
    if named and not named.startswith(("http://", "https://")):
        raise UserError(f"PREFECT_API_URL: {named!r}: must begin with http:// or https://, as in {_PREFECT}")
    for name in settings.base_models:
        if name != EMBEDDED and not name.startswith("gs://"):
            folder = find_model(name, ("config.json",))
            if not (folder / "config.json").is_file():
                raise UserError(f"base model {name!r}: there is no {folder / 'config.json'}")
    if settings.trackers:
        from tinkerflow.backend.tracking.trackers import trackers_named

        trackers_named(settings.trackers)
    if settings.openlineage_url:
        from tinkerflow.backend.catalog.openlineage import check_library

        check_library(settings.openlineage_url)


def _check_writable(name: str, url: str) -> None:
    """Write and remove an object. UserError: the store cannot be opened or written."""
    blobs, probe = open_blobs(url), f".up-{secrets.token_hex(8)}"
    try:
        blobs.create(probe, b"")
        blobs.remove(probe)
    except OSError as error:
        raise UserError(f"{name} {url!r}: cannot be written ({error.strerror}): choose another folder") from error


def _with_ports(settings: Settings, launcher: Launcher | None) -> Settings:
    """The settings with every port 0 replaced by a free one, and the Prefect mode that the environment requires."""
    changes: dict[str, object] = {}
    if settings.port == 0:
        changes["port"] = free_port()
    if launcher is not None and not settings.group:
        address = launcher.address(settings)
        changes["group"] = f"{address}:{free_port(address)}"
    if settings.prefect == "embedded" and os.environ.get("PREFECT_API_URL"):
        changes["prefect"] = "external"
    elif settings.prefect == "embedded" and settings.prefect_port == 0:
        changes["prefect_port"] = free_port()
    return Settings(**(settings.model_dump() | changes))


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _refuse_used(host: str, port: int) -> None:
    """Raise UserError if the port cannot be bound.

    Retries for a moment, because a service that has just ended may keep the port, unless one accepts connections.
    """
    if not can_be_looked_up(host):  # `create_server` would leave a socket open
        raise UserError(f"host is {host!r}: must be a name or an address")
    deadline = time.monotonic() + PORT_SECONDS
    while True:
        try:
            socket.create_server((host, port), family=family_of(host)).close()
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline or _accepts(host, port):
                fix = "choose another with --host and --port (0 = any free port)"
                number = error.errno or 0  # negative after a failed lookup, which `create_server` raises as an OSError
                why = os.strerror(number) if number > 0 else str(error.strerror).partition(" (while")[0]
                raise UserError(f"port {port} of {host}: {why.lower()}; {fix}") from error
        time.sleep(0.1)
