"""The machine as the only host of `tinkerflow up`'s group: its worker processes outlive an engine that is killed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from tinkerflow.backend.joining import make_secret, parse_address
from tinkerflow.backend.pool import HostConfig, serve_group
from tinkerflow.backend.retry import backoff
from tinkerflow.backend.settings import Settings

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 0.1  # seconds between attempts to join: the engine starts on this machine
_STOP_SECONDS = 20.0


class LocalHost:
    """A host's agent in a thread of this process. The workers that it starts end with this process, however it ends.

    What it says goes to logs/workers.log.
    """

    def __init__(self, settings: Settings, *, report: Callable[[str], None]) -> None:
        """Make the group's secret; nothing starts yet.

        settings.group is where the engine will listen, for one group for each base model. `report` gets what is wrong.
        UserError when the secret's file is not one.
        """
        driver, port = parse_address(settings.group)
        processes = settings.processes * max(1, len(settings.base_models))
        secret, self._logs = make_secret(settings.group_secret_path), settings.data_dir / "logs"
        self._post = HostConfig(
            driver, port, secret, processes, self._logs, compile_cache_dir="", longest_pause=_LONGEST_PAUSE
        )
        self._report = report
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="local host", daemon=True)
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()

    def start(self) -> None:
        """Join the engine's group as soon as there is one, and again whenever there is another engine."""
        self._logs.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(self._logs / "workers.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for logger in (log, logging.getLogger("tinkerflow.backend.pool")):
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            logger.propagate = False
        self._thread.start()

    def stop(self) -> None:
        """End what still runs."""
        if self._thread.is_alive():
            loop, task = self._started.result()
            loop.call_soon_threadsafe(task.cancel)
            self._thread.join(_STOP_SECONDS)  # the kernel ends what is left with this process

    async def _serve(self) -> None:
        this = asyncio.current_task()
        assert this is not None  # for the type checker
        self._started.set_result((asyncio.get_running_loop(), this))
        failures = 0
        while True:
            try:
                await serve_group(self._post, log.info)
            except asyncio.CancelledError:
                log.info("stopped")
                return
            except Exception as error:
                failures += 1
                log.exception("the workers' host has failed")
                self._report(f"no workers can be started: {error}; trying again in {backoff(failures):.1f} s")
                await asyncio.sleep(backoff(failures))
