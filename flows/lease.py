"""The lease that lets one engine at a time work on a journal. An engine that loses its lease ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import monotonic

from tinkerflow.backend.core.process_identity import identity, is_alive
from tinkerflow.backend.core.retry import repeat
from tinkerflow.backend.journal import AWAY, Journal
from tinkerflow.backend.journal.leases import ENGINE, LEASE_SECONDS, ProcessView

log = logging.getLogger(__name__)

RENEW_SECONDS = LEASE_SECONDS / 5
ACQUIRE_SECONDS = 0.5  # seconds between attempts to take another engine's lease


@asynccontextmanager
async def hold_lease(journal: Journal) -> AsyncIterator[asyncio.Task[None]]:
    """Acquire the lease once its holder ends or is silent. Yields the renewal task, which ends if the lease is lost.

    A heartbeat in the future does not prove that the holder is alive: a clock may have been set back, perhaps by hours.
    """
    waiting = force = False
    last, since = list[ProcessView](), monotonic()
    while (holder := await asyncio.to_thread(journal.leases.acquire, identity(), force=force)) is not None:
        beat = [view for view in await asyncio.to_thread(journal.leases.beats) if view.name == ENGINE]
        if beat != last:
            last, since = beat, monotonic()
        if force := is_alive(holder) is False or monotonic() - since > LEASE_SECONDS:
            continue
        if not waiting:
            log.warning("another engine (%s) uses this journal; waiting until it ends", holder)
            waiting = True
        await asyncio.sleep(ACQUIRE_SECONDS)
    renewing = asyncio.create_task(_renew(journal), name="lease")
    try:
        yield renewing
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        await asyncio.to_thread(journal.leases.release)


async def _renew(journal: Journal) -> None:
    thread = ThreadPoolExecutor(1, thread_name_prefix="lease")  # a slow store may block all shared threads

    def renew() -> Awaitable[object]:
        return asyncio.get_running_loop().run_in_executor(thread, journal.leases.renew)

    try:
        await repeat(renew, RENEW_SECONDS, on=AWAY, what="the lease cannot be renewed", log=log)
    finally:
        thread.shutdown(wait=False)
