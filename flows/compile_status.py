"""What the worker group of a base model is, has compiled, and has in use: asked now and then, for people to see."""

from __future__ import annotations

import asyncio
import logging

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.errors import TinkerflowError
from tinkerflow.backend.journal import AWAY, Journal
from tinkerflow.backend.pool import Pool
from tinkerflow.backend.spec.commands import CompileStatus, ReadCompileStatus

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0


async def note_compile_status(journal: Journal, pool: Pool, card: ModelCard) -> None:
    """Keep what changed, until cancelled; ends at once when the group's executor compiles nothing.

    One warning for each time that programs were compiled for a request although everything planned was there.
    """
    last, group, base_model = CompileStatus(0, 0, 0, 0, 0), None, card.name
    while True:
        try:
            await pool.serving()
            if pool.info != group:
                await asyncio.to_thread(journal.base_models.note_worker_group, base_model, pool.info)
                card = card.served_by(pool.info)  # which nobody knew before the first group of a base model
                await asyncio.to_thread(journal.base_models.note_card, base_model, card.to_json())
                group = pool.info
            found = await pool.submit(ReadCompileStatus())
            if not isinstance(found, CompileStatus):
                return
            if found.late > last.late:
                log.warning("%s: %d program(s) were compiled for requests after the warm-up", base_model, found.late)
            if found != last:
                await asyncio.to_thread(journal.base_models.note_compile_status, base_model, found)
            last = found
        except (TinkerflowError, *AWAY) as error:
            log.info("%s: its worker group cannot be asked what is compiled: %s", base_model, error)
        await asyncio.sleep(LOOK_SECONDS)
