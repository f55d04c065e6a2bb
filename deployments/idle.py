"""Release worker processes while no request needs them, so that other programs can use the devices.

The engine continues without them, as after the loss of its hosts: a request waits, and reports the reason. This module
sees the request in the journal and starts the processes again. Models are restored as after the loss of a group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, closing

from tinkerflow.backend.journal import AWAY, Journal

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


async def keep_while_needed(
    keep: Callable[[], Coroutine[None, None, None]],
    rest: Callable[[], Coroutine[None, None, None]],
    needed: Callable[[], Awaitable[bool]],
    seconds: float,
    report: Callable[[str], None],
    *,
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Run `keep` while processes are needed and `rest` while they are not, forever. Propagates their exceptions.

    keep: keeps worker processes until it is cancelled. rest: runs instead of `keep` until it is cancelled.
    needed: whether the processes have work to do.
    seconds: how long there must be no work before `keep` is cancelled. report: gets lines for people.
    look_seconds: between two calls of `needed`.
    """

    async def until_idle() -> None:
        quiet = 0.0
        while quiet < seconds:
            await asyncio.sleep(look_seconds)
            quiet = 0.0 if await needed() else quiet + look_seconds

    async def until_needed() -> None:
        while not await needed():  # noqa: ASYNC110  another process stores the requests
            await asyncio.sleep(look_seconds)

    while True:
        await _until_either_ends(keep(), until_idle())
        report(f"no request for {seconds:g} s: worker processes are released until the next request")
        await _until_either_ends(rest(), until_needed())
        report("a request is waiting: worker processes are started again")


async def _until_either_ends(*works: Coroutine[None, None, None]) -> None:
    """Run until the first one ends, then cancel and await the rest, even if cancelled. Raises the first's exception."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            await asyncio.wait(tasks)  # a second cancellation would cut a release short
            raise
        finally:
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def demand(journal_url: str) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
    """Yields a check whether a journal's requests wait for worker processes, or weights in memory for the store."""
    with closing(await asyncio.to_thread(Journal.open, journal_url)) as journal:

        def needed() -> bool:
            try:
                return bool(journal.queue.wanted())
            except AWAY as error:
                log.warning("cannot query the journal for waiting requests: %s", error)
                return True

        yield lambda: asyncio.to_thread(needed)
