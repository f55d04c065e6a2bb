"""The machine as the only host of `tinkerflow up`'s group: its worker processes outlive an engine that is killed."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future

from backend.errors import UserError
from backend.joining import make_secret, parse_address
from backend.pool import Post, serve_group
from backend.settings import Settings

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 0.1  # seconds between attempts to join: the engine starts on this machine


class LocalHost:
    """A host's agent in a thread of this process. The workers that it starts end with this process, however it ends."""

    def __init__(self, settings: Settings) -> None:
        """Nothing starts yet. settings.group is where the engine will listen, for one group for each base model."""
        driver, port = parse_address(settings.group)
        processes = settings.processes * max(1, len(settings.base_models))
        secret, logs = make_secret(settings.group_secret_path), settings.data_dir / "logs"
        self._post = Post(driver, port, secret, processes, logs, compile_cache_dir="", longest_pause=_LONGEST_PAUSE)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="local host", daemon=True)
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()

    def start(self) -> None:
        """Join the engine's group as soon as there is one, and again whenever there is another engine."""
        self._thread.start()

    def stop(self) -> None:
        """End what still runs."""
        if self._thread.is_alive():
            loop, task = self._started.result()
            loop.call_soon_threadsafe(task.cancel)
            self._thread.join()

    async def _serve(self) -> None:
        this = asyncio.current_task()
        assert this is not None  # for the type checker
        self._started.set_result((asyncio.get_running_loop(), this))
        try:
            await serve_group(self._post, log.info)
        except UserError as error:
            log.error("no workers can be started: %s", error)
        except asyncio.CancelledError:
            log.info("stopped")
