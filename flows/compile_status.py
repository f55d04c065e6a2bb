"""Records a base model's worker group in the journal for people, with the group's programs and memory."""

from __future__ import annotations

import asyncio
import logging

from tinkerflow.backend.catalog.model_card import ModelCard, public_name
from tinkerflow.backend.core.errors import TinkerflowError
from tinkerflow.backend.core.retry import repeat
from tinkerflow.backend.journal import AWAY, Journal
from tinkerflow.backend.pool import Pool
from tinkerflow.backend.spec.commands import CompileStatus, GroupInfo, ReadCompileStatus

log = logging.getLogger(__name__)

UPDATE_SECONDS = 5.0


class CompileStatusWatch:
    """Records changes of one base model's group and of its compile status.

    It logs a warning each time a request needed programs that were not compiled during the warm-up.
    """

    def __init__(self, journal: Journal, pool: Pool, card: ModelCard) -> None:
        """Nothing is recorded yet. card: the base model's card from before its first worker group."""
        self._journal = journal
        self._pool = pool
        self._card = card
        self._last = CompileStatus(0, 0, 0, 0, 0)
        self._group: GroupInfo | None = None

    async def watch(self) -> None:
        """Record changes until cancelled."""
        what = f"{public_name(self._card.name)}: the compile status of its worker group cannot be read"
        await repeat(self._update, UPDATE_SECONDS, on=(TinkerflowError, *AWAY), what=what, log=log, level=logging.INFO)

    async def _update(self) -> None:
        notes, base_model = self._journal.base_models, self._card.name
        await self._pool.serving()
        if self._pool.info != self._group:
            await asyncio.to_thread(notes.note_worker_group, base_model, self._pool.info)
            self._card = self._card.served_by(self._pool.info)  # unknown before the first group of a base model
            await asyncio.to_thread(notes.note_card, base_model, self._card.to_json())
            self._group = self._pool.info
        status = await self._pool.submit(ReadCompileStatus())
        if not isinstance(status, CompileStatus):  # an executor that compiles nothing
            return
        if status.late > self._last.late:
            shown = public_name(base_model)
            log.warning("%s: %d program(s) were compiled for requests after the warm-up", shown, status.late)
        if status != self._last:
            await asyncio.to_thread(notes.note_compile_status, base_model, status)
        self._last = status
