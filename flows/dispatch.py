"""Who is woken when: the bell's topics to the lanes, and the sweeps that nobody rings for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from backend.commands import Done, DropSnapshot
from backend.errors import GroupFailedError, TinkerflowError, UserError
from backend.journal import Journal, ModelEnded, ModelState
from backend.settings import Settings
from flows.groups import ServedModel
from flows.lane import Lane, Shared
from flows.training_run import serve_model

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # a bell may be lost
SWEEP_SECONDS = 5.0
_EXPIRED_AT_ONCE = 500


class Dispatcher:
    """One lane per model that has work, one per base model for samples, and the losses and sweeps around them."""

    def __init__(self, settings: Settings, journal: Journal, shared: Shared, served: Sequence[ServedModel]) -> None:
        """Nothing runs before `serve`."""
        self._settings = settings
        self._journal = journal
        self._shared = shared
        self._served = {model.card.name: model for model in served}
        self._lanes: dict[str, Lane | None] = {}  # None: it is being opened
        self._sweep = asyncio.Event()
        self._stopping = asyncio.Event()

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until `stop`; returns when what was in flight is answered. `on_ready` is called when it begins."""
        async with self._journal.bell.listen("model:", "sample", "session:") as topics, asyncio.TaskGroup() as lanes:
            around = [
                asyncio.create_task(self._heed(self._listen(topics, lanes)), name="bell"),
                asyncio.create_task(self._heed(self._look(lanes)), name="look"),
                asyncio.create_task(self._heed(self._sweep_often()), name="sweeps"),
                asyncio.create_task(self._shared.tracking.watch(), name="prefect health"),
            ]
            for model in self._served.values():
                around.append(asyncio.create_task(self._heed(self._mourn(model)), name=f"losses of {model.card.name}"))
                lanes.create_task(model.sampling.serve_for_ever(), name=f"sampling of {model.card.name}")
            try:
                on_ready()
                await self._stopping.wait()
                for lane in self._lanes.values():
                    if lane is not None:
                        lane.stop()
                for model in self._served.values():
                    model.sampling.stop()
            finally:
                for task in around:
                    task.cancel()

    def stop(self) -> None:
        """Take nothing more from the journal."""
        self._stopping.set()

    # ------------------------------------------------------------------ who is woken
    async def _listen(self, topics: "AsyncIterator[str]", lanes: asyncio.TaskGroup) -> None:
        async for topic in topics:
            kind, _, name = topic.partition(":")
            if kind == "model":
                self._wake(name, lanes)
            elif kind == "sample":
                for model in self._served.values():
                    model.sampling.wake()
            else:
                self._sweep.set()

    async def _look(self, lanes: asyncio.TaskGroup) -> None:
        while True:
            for model_id in await asyncio.to_thread(self._journal.pending_models):
                self._wake(model_id, lanes)
            for model in self._served.values():
                model.sampling.wake()
            await asyncio.sleep(LOOK_SECONDS)

    def _wake(self, model_id: str, lanes: asyncio.TaskGroup) -> None:
        if self._stopping.is_set():
            return
        lane = self._lanes.get(model_id)
        if lane is not None:
            lane.wake()
        elif model_id not in self._lanes:
            self._lanes[model_id] = None
            lanes.create_task(self._serve_model(model_id), name=model_id)

    async def _serve_model(self, model_id: str) -> None:
        try:
            model = await asyncio.to_thread(self._journal.model, model_id, None)
            if model.state not in (ModelState.CREATING, ModelState.LIVE):
                return
            served = self._served.get(model.base_model)
            if served is None:
                await self._refuse(model_id, model.base_model)
                return
            lane = Lane(served.runtime, self._shared, model_id, model.step)
            self._lanes[model_id] = lane
            if self._stopping.is_set():
                return
            end = await serve_model(lane, self._shared.tracking, model.base_model)
            log.info("model %s: %s", model_id, end.text)
        finally:
            del self._lanes[model_id]

    async def _refuse(self, model_id: str, base_model: str) -> None:
        """A model of a base model that this engine does not serve: it fails, and all that waits for it."""
        error = UserError(f"base model {base_model!r} is not served here; served are: {', '.join(sorted(self._served))}")
        ended = ModelEnded(model_id, ModelState.FAILED, error.message)
        waiting = await asyncio.to_thread(self._journal.ready, model_id, 1)
        outcomes = [request.failed(error, None, ended) for request in waiting]
        await asyncio.to_thread(self._journal.finish, outcomes)

    # ------------------------------------------------------------------ what is lost, and what is over
    async def _mourn(self, model: ServedModel) -> None:
        """A worker group ended: what waited fails by name, and what it held is lost. The next one begins empty."""
        async for lost in model.pool.losses():
            reason = f"worker group {lost.generation} failed: {lost.cause}"
            model.runtime.snapshots.lost()
            # First the requests: afterwards no outcome of the old group can make a model live again.
            failed = await asyncio.to_thread(self._journal.fail_all_pending, reason, base_model=model.card.name)
            models = await asyncio.to_thread(self._journal.lose_models, reason, base_model=model.card.name)
            log.error("%s; %d requests failed, %d models lost", reason, len(failed), len(models))

    async def _sweep_often(self) -> None:
        while True:
            self._sweep.clear()
            await asyncio.to_thread(self._sweep_journal)
            for model in self._served.values():
                await model.sampling.cancel_ended()
                await self._drop_snapshots(model)
            await self._delete_expired()
            try:
                async with asyncio.timeout(SWEEP_SECONDS):
                    await self._sweep.wait()
            except TimeoutError:
                continue

    def _sweep_journal(self) -> None:
        settings, journal = self._settings, self._journal
        for session_id in journal.expire_sessions(settings.session_timeout):
            log.info("session %s expired: no heartbeat for %.0f s", session_id, settings.session_timeout)
        for model_id in journal.abandoned_models():
            journal.request_unload(model_id, "its session is over")
        for gap in journal.gaps(settings.gap_timeout):
            if journal.skip_gap(gap):
                journal.bell.ring(f"model:{gap.model_id}")
        journal.expire_results(settings.result_ttl, _EXPIRED_AT_ONCE)

    async def _drop_snapshots(self, model: ServedModel) -> None:
        snapshots = model.runtime.snapshots
        if not snapshots.droppable:
            return
        for snapshot_id in await asyncio.to_thread(self._journal.unused_snapshots, snapshots.droppable):
            snapshots.dropped(snapshot_id)
            try:
                await model.runtime.send(DropSnapshot(snapshot_id), Done)
            except GroupFailedError:
                return  # all of them went with the group

    async def _delete_expired(self) -> None:
        for checkpoint in await asyncio.to_thread(self._journal.expired_checkpoints):
            store = next(iter(self._served.values())).runtime.store
            await asyncio.to_thread(store.delete, checkpoint.path)
            await asyncio.to_thread(self._journal.delete_checkpoint, checkpoint.path, None)
            log.info("checkpoint %s expired and was deleted", checkpoint.path)

    async def _heed(self, work: Awaitable[None]) -> None:
        raise NotImplementedError
