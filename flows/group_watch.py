"""Reacts when the worker group of a base model is about to end, has ended, or serves again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from tinkerflow.backend.catalog.model_card import public_name
from tinkerflow.backend.journal import Journal
from tinkerflow.flows.groups import ServedModel
from tinkerflow.flows.observers import EngineObserver
from tinkerflow.flows.runner import ModelRunner

log = logging.getLogger(__name__)

SAVING_SECONDS = 15.0  # time for snapshots when a worker group is about to end


class GroupWatch:
    """Reports when a worker group ends and starts, and initiates saving and restoring its models."""

    def __init__(
        self,
        model: ServedModel,
        journal: Journal,
        observer: EngineObserver,
        runners: Callable[[], Sequence[ModelRunner]],
    ) -> None:
        """model: the base model. observer: gets events. runners: returns its models' runners that serve now."""
        self._model = model
        self._journal = journal
        self._observer = observer
        self._runners = runners

    async def watch(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as watches:
            watches.create_task(self._watch_losses(), name="group lost")
            watches.create_task(self._watch_notices(), name="notice")

    async def _watch_losses(self) -> None:
        """React to each lost group: its state is gone, the next group begins empty, and the runners restore into it."""
        model, name = self._model, self._model.card.name
        restarting: asyncio.Task[None] | None = None
        try:
            async for lost in model.pool.losses():
                model.context.snapshots.lost()
                text = f"worker group {lost.generation} ended ({lost.cause})"
                if model.pool.resting:  # expected: the group was released on purpose
                    log.info("%s: %s", public_name(name), text)
                else:
                    text += "; a new one is being started"
                    log.error("%s: %s", public_name(name), text)
                    await model.context.read(self._journal.base_models.note_progress, name, text)
                self._observer.emit("tinkerflow.group.ended", name, generation=lost.generation, cause=lost.cause)
                if restarting is None or restarting.done():
                    restarting = asyncio.create_task(self._report_next_group(), name="next group")
        finally:
            if restarting is not None:
                restarting.cancel()

    async def _report_next_group(self) -> None:
        model, name = self._model, self._model.card.name
        generation = await model.pool.serving()
        await model.context.read(self._journal.base_models.note_progress, name, None)
        log.info(
            "%s: worker group %d is ready; models are restored when they are needed", public_name(name), generation
        )
        self._observer.emit("tinkerflow.group.serves", name, generation=generation)
        for runner in self._runners():
            runner.wake()
        model.sampling.wake()

    async def _watch_notices(self) -> None:
        """When a worker group is about to end, save its models as time permits, so that little is replayed."""
        async for cause in self._model.pool.notices():
            log.warning("%s: %s; taking snapshots", public_name(self._model.card.name), cause)
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVING_SECONDS):
                    await asyncio.gather(*(runner.save_now() for runner in self._runners()))
