"""Worker processes on this machine, whose agent runs in this process.

The workers survive an engine that is killed. They end with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from tinkerflow.backend.core.disk import make_folder, open_private
from tinkerflow.backend.core.joining import parse_address
from tinkerflow.backend.core.log_levels import logging_at
from tinkerflow.backend.pool import HostConfig, serve_group
from tinkerflow.deployments.launching import Launcher, Plan, Say

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 0.1  # seconds between attempts to join the engine's group: the engine starts on this machine


async def _keep(plan: Plan, report: Say) -> None:
    """Offer this machine's capacity to the engine, and to each later engine."""
    driver, port = parse_address(plan.group)
    logs = plan.data_dir / "logs"
    host = HostConfig(
        driver,
        port,
        plan.secret,
        plan.processes,
        logs,
        compile_cache_dir="",
        longest_pause=_LONGEST_PAUSE,
        platform=plan.platform,
    )
    with _logged(logs):
        try:
            await serve_group(host, log.info)
        except asyncio.CancelledError:
            log.info("stopped")
            raise
        except Exception:
            log.exception("the workers' host failed")
            raise


@contextlib.contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Log the actions of the host's agent to workers.log during the block, and nowhere else."""
    make_folder(folder)
    open_private(folder / "workers.log", "a").close()
    handler = logging.FileHandler(folder / "workers.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = (log, logging.getLogger("tinkerflow.backend.pool"))
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with logging_at(logging.INFO, *(logger.name for logger in loggers), propagate=False):
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


LAUNCHER = Launcher("local", _keep, lambda settings: "127.0.0.1")
