"""The parts of a deployment as processes: `tinkerflow engine`, `api`, `worker` and `track`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path

from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.core.disk import make_folder
from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.core.ids import EMBEDDED, EMBEDDED_FOLDER
from tinkerflow.backend.core.joining import parse_address, read_secret
from tinkerflow.backend.core.retry import retry
from tinkerflow.backend.journal import AWAY, Journal, migrate
from tinkerflow.backend.pool import HostConfig, serve_group
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.supervise.processes import die_with_parent
from tinkerflow.deployments.data_dir import make_data_dir
from tinkerflow.deployments.options import existing
from tinkerflow.deployments.pulse import READY, Pulse, keep_stdout, say


def run_engine_part(settings: Settings, parent: int) -> None:
    """Run the engine until SIGTERM. Prints progress, READY when it executes requests, and beats for `up`."""
    pulse = _begin(parent)
    from tinkerflow.flows.engine import run_engine

    async def run() -> None:
        served = with_base_models(settings)
        await run_engine(served, on_progress=say, on_ready=lambda: say(READY), on_turn=pulse.turns)

    _until_signal(run, logging.getLogger(__name__).info)


def run_api_part(settings: Settings, parent: int) -> None:
    """Run the API until SIGTERM. Prints READY when it listens, and beats for `up`."""
    pulse = _begin(parent)
    from tinkerflow.api.serve import serve

    serve(settings, on_ready=lambda: say(READY), on_turn=pulse.turns)


def run_worker_part(settings: Settings, group: str, processes: int) -> None:
    """Run `processes` worker processes of the group at `group` ("host:port") on this host until SIGTERM."""
    _begin(0)
    try:
        driver, port = parse_address(group)
    except ValueError as error:
        raise UserError(f"--group {error}") from error
    secret, logs = read_secret(settings.group_secret_path), settings.data_dir / "logs"
    cache = str(settings.compile_cache)
    host = HostConfig(driver, port, secret, processes, logs, cache, platform=settings.platform)
    _until_signal(lambda: serve_group(host, say), say)


def run_track_part(settings: Settings, parent: int, *, once: bool) -> None:
    """Mirror training runs to the trackers of the settings until SIGTERM. Prints READY and beats for `up`.

    once: mirror the journal as it is, and return. UserError: the settings name no tracker and no OpenLineage server, or
    they name one that cannot be used.
    """
    from tinkerflow.backend.catalog.openlineage import LineageMirror
    from tinkerflow.backend.store import Store
    from tinkerflow.backend.tracking.journal_runs import LOOK_SECONDS, JournalMirror
    from tinkerflow.backend.tracking.trackers import trackers_named

    if not (trackers := trackers_named(settings.trackers)) and not settings.openlineage_url:
        names = "TINKERFLOW_TRACKERS and TINKERFLOW_OPENLINEAGE_URL"
        raise UserError(f"track: the settings {names} are empty; docs/trackers.md lists the trackers")
    _begin(parent)
    keep_stdout()  # libraries of trackers print
    if not once:
        say(READY)
    stop = threading.Event()

    async def run() -> None:
        journal = await retry(
            partial(asyncio.to_thread, Journal.open, settings.journal_url),
            on=(ServerError, *AWAY),
            pauses=() if once else itertools.repeat(LOOK_SECONDS),
            what="no journal yet",
            log=logging.getLogger(__name__),
        )
        place, projects = settings.tracking_folder, settings.tracked_projects
        mirrors: list[JournalMirror | LineageMirror] = [
            JournalMirror(tracker, journal, place, SystemClock(), projects) for tracker in trackers
        ]
        if settings.openlineage_url:
            store = Store.open(settings.store_url)
            mirrors.append(LineageMirror(settings.openlineage_url, journal, store, place, projects))
        works = [mirror.once if once else partial(mirror.keep, stop) for mirror in mirrors]
        try:
            await asyncio.gather(*map(asyncio.to_thread, works))
        finally:
            stop.set()  # the threads close their runs, and the event loop's end waits for them

    _until_signal(run, logging.getLogger(__name__).info)


def with_base_models(settings: Settings) -> Settings:
    """The settings, with the folder of the embedded model, which is also the default, instead of its alias.

    Makes the embedded model in the data dir if it is missing.
    """
    named = settings.base_models or (EMBEDDED,)
    if EMBEDDED not in named:
        return settings
    from tinkerflow.deployments.tiny_model import make_tiny

    folder = embedded_model(settings)
    if not (folder / "config.json").exists():
        say(f"creating the embedded tiny model in {folder}")
        make_data_dir(settings.data_dir)
        make_folder(folder.parent)
        make_tiny(folder)
    base_models = tuple(str(folder) if name == EMBEDDED else name for name in named)
    return Settings(**(settings.model_dump() | {"base_models": base_models}))


def resolve_base_model(settings: Settings, name: str) -> str:
    """The base model of a name, as `with_base_models` resolves it; "" = the first one of the settings."""
    named = {"base_models": (name,)} if name else {}
    return with_base_models(Settings(**(settings.model_dump() | named))).base_models[0]


def embedded_model(settings: Settings) -> Path:
    """The folder of the embedded model, which may not exist yet."""
    return settings.data_dir.joinpath(*EMBEDDED_FOLDER)


def open_journal(settings: Settings) -> AbstractContextManager[Journal]:
    """Open the journal for a command. Creates or migrates its database first."""
    make_data_dir(settings.data_dir)
    migrate(settings.journal_url)
    return closing(Journal.open(settings.journal_url))


def open_existing_journal(settings: Settings) -> AbstractContextManager[Journal]:
    """Like `open_journal`. UserError: the database and its data dir do not exist."""
    if not settings.has_journal:
        existing(settings, settings.data_dir.as_uri())
    return open_journal(settings)


def _until_signal(work: Callable[[], Coroutine[None, None, None]], log: Callable[[str], None]) -> None:
    """Run `work` until it ends, or SIGTERM or SIGINT cancels it."""

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.create_task(work())
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, task.cancel)
        await task

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        log("stopped")


def _begin(parent: int) -> Pulse:
    """Prepare a part: end with the parent and send it heartbeats, write private files, and log to stderr."""
    os.umask(0o077)
    pulse = Pulse()
    if parent:
        die_with_parent(parent)
        pulse.start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return pulse
