"""Outcomes on their way into the journal: one writer, and everything that waits goes into one transaction."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tinkerflow.backend.journal import AWAY, Outcome
from tinkerflow.backend.retry import retry

log = logging.getLogger(__name__)

PAUSES = tuple(0.05 * 2**n for n in range(8))  # seconds: about 13 s of a database that cannot be reached
_MOST = 64  # outcomes of one transaction

Finish = Callable[[Sequence[Outcome]], object]


class AnswerWriter:
    """Writes outcomes in the order of `put`. Its thread is its own: no slow store or decoder delays an answer.

    A write takes about a millisecond; what comes meanwhile shares the next one, so many models cost few transactions.
    """

    def __init__(self, finish: Finish, pauses: Sequence[float] = PAUSES) -> None:
        """finish: Journal.finish. pauses: seconds between the attempts to write while the database is away."""
        self._finish = finish
        self._pauses = pauses
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._line: list[tuple[Outcome, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def put(self, outcome: Outcome) -> None:
        """Return when the outcome is in the journal. What AWAY names when the database stays away."""
        written = asyncio.get_running_loop().create_future()
        self._line.append((outcome, written))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="answers")
        await written

    async def close(self) -> None:
        """Write what waits, and end the thread."""
        if self._writer is not None:
            await self._writer
        self._thread.shutdown()

    async def _write(self) -> None:
        try:
            while self._line:
                batch, self._line = self._line[:_MOST], self._line[_MOST:]
                await self._write_batch(batch)
        finally:
            self._writer = None

    async def _write_batch(self, batch: list[tuple[Outcome, asyncio.Future[None]]]) -> None:
        try:
            await self._store([outcome for outcome, _ in batch])
        except AWAY as error:
            for _, written in batch:
                _resolve(written, error)
        except Exception as error:  # noqa: BLE001  the database refused the content of one of them
            if len(batch) == 1:
                await self._write_failure(*batch[0], error)
            else:  # one of them cannot be stored; the others must not suffer
                for one in batch:
                    await self._write_batch([one])
        else:
            for _, written in batch:
                _resolve(written, None)

    async def _write_failure(self, outcome: Outcome, written: asyncio.Future[None], error: Exception) -> None:
        log.exception("the answer of request %s cannot be stored", outcome.request_id, exc_info=error)
        text = f"the answer cannot be stored ({type(error).__name__}: {error})"
        named = replace(outcome, result=None, error=text, category="server", effects=())
        try:
            await self._store([named])
        except Exception as second:  # noqa: BLE001  whoever put it decides
            _resolve(written, second)
        else:
            _resolve(written, None)

    async def _store(self, outcomes: list[Outcome]) -> None:
        def write() -> Awaitable[object]:
            return asyncio.get_running_loop().run_in_executor(self._thread, self._finish, outcomes)

        await retry(write, on=AWAY, pauses=self._pauses, what="the journal cannot be written", log=log)


def _resolve(written: asyncio.Future[None], error: Exception | None) -> None:
    if written.done():  # whoever put it was cancelled
        return
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)
