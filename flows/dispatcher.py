"""Who is woken when: the journal's notifications go to models' runners, and sweeps do what nobody is notified of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from uuid import UUID

from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.core.errors import GroupFailedError, ServerError, TinkerflowError, UserError
from tinkerflow.backend.journal import AWAY, Journal, ModelEnded, ModelState, Retention, Trained
from tinkerflow.backend.settings import Settings
from tinkerflow.flows.expiry import delete_checkpoints, delete_snapshots, delete_uploads, note_changes
from tinkerflow.flows.groups import ServedModel
from tinkerflow.flows.prefect.controls import ControlsWatch
from tinkerflow.flows.prefect.mirror import Mirror, RunMirror
from tinkerflow.flows.runner import STOPPED, End, ModelRunner, SnapshotPolicy, Why
from tinkerflow.flows.turns import GroupTurns, Turns
from tinkerflow.tasks.execution.state_transfers import drop

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # a notification may be lost
SWEEP_SECONDS = 5.0
_SAVING_SECONDS = 15.0  # for snapshots when a worker group is about to end
_EXPIRED_AT_ONCE = 500
OVER = "its session is over"


async def observed(serve: Callable[[], Awaitable[End]], observers: Sequence[RunMirror]) -> End:
    """How a runner's `serve` ends, which its observers are told, also when it fails or is cancelled."""
    end = STOPPED
    try:
        end = await serve()
    except Exception as error:
        end = End(Why.FAILED, f"{type(error).__name__}: {error}")
        raise
    finally:
        for shown in observers:
            shown.ended(end.state, end.text, over=end.why is not Why.STOPPED)
    return end


class Dispatcher:
    """One runner per model that has work, one per base model for samples, and the sweeps around them."""

    def __init__(self, settings: Settings, journal: Journal, mirror: Mirror, served: Sequence[ServedModel]) -> None:
        """Nothing runs before `serve`.

        settings, journal: of the engine. mirror: shows the runs. served: every base model.
        """
        self._settings = settings
        self._journal = journal
        self._mirror = mirror
        self._snapshots = SnapshotPolicy(settings.snapshot_steps, settings.snapshot_seconds)
        self._served = {model.card.name: model for model in served}
        self._runners: dict[str, ModelRunner | None] = {}  # None: it is being opened
        self._adopted: dict[str, UUID] = {}  # by model: the flow run that it is taken up again in
        self._group: asyncio.TaskGroup | None = None  # of the runners
        self._sweep = asyncio.Event()
        self._stopping = asyncio.Event()

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until `stop`; returns when what was in flight is answered. `on_ready` is called when it begins."""
        heard = self._journal.notifier.subscribe("model:", "session:")
        async with heard as topics, asyncio.TaskGroup() as around:
            watches = [
                around.create_task(self._sweep_often(), name="sweeps"),
                around.create_task(self._mirror.connection.watch(), name="prefect health"),
                *(around.create_task(self._on_group_lost(model), name="group lost") for model in self._served.values()),
                *(around.create_task(self._on_notice(model), name="notice") for model in self._served.values()),
            ]
            if (groups := self._settings.groups) < len(self._served):
                turns = Turns(groups, release=self._settings.idle_release)
                models = list(self._served.values())
                patience = self._settings.start_deadline
                sharing = GroupTurns(self._journal, models, turns, self._is_busy, SystemClock(), patience)
                watches.append(around.create_task(sharing.keep(), name="turns"))
            try:
                async with asyncio.TaskGroup() as runners:
                    self._group = runners
                    watches.append(around.create_task(self._listen(topics), name="notifications"))
                    watches.append(around.create_task(self._look(), name="look"))
                    watches.append(
                        around.create_task(ControlsWatch(self._mirror.connection, self).watch(), name="controls")
                    )
                    for model in self._served.values():
                        runners.create_task(observed(model.sampling.serve, model.sampling.observers), name="sampling")
                    on_ready()
                    try:
                        await self._stopping.wait()
                    finally:
                        self._stopping.set()  # also when we are cancelled: no runner begins any more
                    for runner in self._open_runners():
                        runner.stop()
                    for model in self._served.values():
                        model.sampling.stop()
            finally:
                for task in watches:
                    task.cancel()

    def _is_busy(self, base_model: str) -> bool:
        """Whether anything of a base model is being executed."""
        return self._served[base_model].sampling.busy or any(one.busy for one in self._open_runners(base_model))

    def _open_runners(self, base_model: str | None = None) -> list[ModelRunner]:
        """The runners that serve, without those that are being opened; base_model: only its own."""
        opened = [runner for runner in self._runners.values() if runner is not None]
        return [runner for runner in opened if base_model in (None, runner.base_model)]

    @property
    def models(self) -> frozenset[str]:
        """Ids of the models that are being served: each has a runner."""
        return frozenset(self._runners)

    def stop(self) -> None:
        """Take nothing more from the journal."""
        self._stopping.set()

    # ------------------------------------------------------------------ who is woken
    async def _listen(self, topics: AsyncIterator[str]) -> None:
        async for topic in topics:
            kind, _, name = topic.partition(":")
            if kind == "model":
                self.wake(name)
            else:
                self._sweep.set()

    async def _look(self) -> None:
        while True:
            try:
                waiting = await asyncio.to_thread(self._journal.queue.pending_models)
            except AWAY:
                log.warning("the journal cannot be read; looking again in %.0f s", LOOK_SECONDS, exc_info=True)
                waiting = []
            for model_id in waiting:
                self.wake(model_id)
            for model in self._served.values():
                model.sampling.wake()
            await asyncio.sleep(LOOK_SECONDS)

    def wake(self, model_id: str, *, again: bool = False) -> None:
        """There may be work for the model. again: it is restored at once, and not when there is something to do."""
        if self._stopping.is_set() or self._group is None:
            return
        runner = self._runners.get(model_id)
        if runner is not None:
            runner.wake()
        elif model_id not in self._runners:
            self._runners[model_id] = None
            self._group.create_task(self._serve_model(model_id, again=again), name=model_id)

    async def _serve_model(self, model_id: str, *, again: bool) -> None:
        try:
            model = await asyncio.to_thread(self._journal.models.get, model_id, None)
            if model.state not in (ModelState.CREATING, ModelState.LIVE):
                return
            served = self._served.get(model.base_model)
            if served is None:
                await self._give_up(model_id, self._not_served(model.base_model))
                return
            shows = bool(self._mirror.connection.api_url)
            label = await asyncio.to_thread(self._journal.models.label, model_id) if shows else ""
            trained = await asyncio.to_thread(self._journal.curves.trained, model_id) if shows else Trained()
            adopted = self._adopted.get(model_id)
            observers = self._mirror.training_run(model_id, model.base_model, label, adopted, trained)
            verb = "is created" if model.state is ModelState.CREATING else "goes on"
            for shown in observers:
                shown.log(f"model {model_id} of {model.base_model} {verb} at optimizer step {model.step}")
            paused = model.paused is not None and bool(observers)  # without Prefect, nobody can end a pause
            runner = ModelRunner(served.context, observers, self._snapshots, model_id, model.step, paused=paused)
            self._runners[model_id] = runner
            if self._stopping.is_set():
                runner.stop()
            restore_now = again and not self._stopping.is_set()
            end = await observed(partial(runner.serve, restore_now=restore_now), observers)
            log.info("model %s: %s", model_id, end.text)
        except Exception as error:
            if ExceptionGroup("", [error]).subgroup(AWAY) is not None:  # a runner's errors come in groups, too
                raise  # nothing is lost: the engine ends, and its successor finds all in the journal
            # One model's trouble must not end the others.
            log.exception("model %s cannot be served", model_id)
            await self._give_up(model_id, ServerError(f"the model cannot be served ({type(error).__name__}: {error})"))
        finally:
            del self._runners[model_id]
            for served in self._served.values():
                served.context.saves.forget(model_id)
            self._adopted.pop(model_id, None)

    def _not_served(self, base_model: str) -> UserError:
        return UserError(f"base model {base_model!r} is not served here: {', '.join(sorted(self._served))}")

    async def _give_up(self, model_id: str, error: TinkerflowError) -> None:
        """End a model, and fail all that waits for it."""
        ended = ModelEnded(model_id, ModelState.FAILED, error.message)
        waiting = await asyncio.to_thread(self._journal.requests.ready, model_id, 1)
        outcomes = [request.failed(error, None, ended) for request in waiting]
        await asyncio.to_thread(self._journal.results.finish, outcomes)

    # ------------------------------------------------------------------ what people ask for (prefect/controls.py)
    def shown_in(self, model_id: str) -> UUID | None:
        """The flow run that shows the model now, or will show it when the model is taken up again."""
        runner = self._runners.get(model_id)
        if runner is None:
            return self._adopted.get(model_id)
        return next((shown.flow_run for shown in runner.observers), None)

    async def pause(self, model_id: str, why: str | None) -> None:
        """Execute nothing of the model until it is called with None; its clients are told why."""
        await asyncio.to_thread(self._journal.models.pause, model_id, why)
        if (runner := self._runners.get(model_id)) is not None:
            runner.pause(why is not None)

    async def cancel(self, model_id: str, why: str) -> None:
        """End the model now: what waits is failed with the reason."""
        await asyncio.to_thread(self._journal.models.end, model_id, ModelState.UNLOADED, why)
        if (runner := self._runners.get(model_id)) is not None:
            runner.cancel()

    async def retry(self, model_id: str, flow_run: UUID) -> None:
        """Take up a model again that nobody serves, in this flow run; UserError when that cannot be."""
        if model_id in self._runners:
            raise UserError(f"model {model_id} is served already")
        model = await asyncio.to_thread(self._journal.models.get, model_id, None)
        if model.base_model not in self._served:
            raise self._not_served(model.base_model)
        await asyncio.to_thread(self._journal.models.revive, model_id)
        self._adopted[model_id] = flow_run
        self.wake(model_id, again=True)

    # ------------------------------------------------------------------ what is lost, and what is over
    async def _on_group_lost(self, model: ServedModel) -> None:
        """A worker group ended, and all that it held: the next one begins empty, and the runners restore into it."""
        back: asyncio.Task[None] | None = None
        name = model.card.name
        try:
            async for lost in model.pool.losses():
                model.context.snapshots.lost()
                text = f"worker group {lost.generation} ended ({lost.cause})"
                if model.pool.resting:  # as it should
                    log.info("%s: %s", name, text)
                else:
                    text += "; another one is being started"
                    log.error("%s: %s", name, text)
                    await model.context.read(self._journal.base_models.note_progress, name, text)
                self._mirror.connection.tell(
                    "tinkerflow.group.ended", name, generation=lost.generation, cause=lost.cause
                )
                if back is None or back.done():
                    back = asyncio.create_task(self._on_group_ready(model), name="next group")
        finally:
            if back is not None:
                back.cancel()

    async def _on_notice(self, model: ServedModel) -> None:
        """A worker group is about to end: models are saved, as far as time allows, so that little is replayed."""
        async for cause in model.pool.notices():
            log.warning("%s: %s; snapshots are taken", model.card.name, cause)
            with suppress(TimeoutError):
                async with asyncio.timeout(_SAVING_SECONDS):
                    await asyncio.gather(*(runner.save_now() for runner in self._open_runners(model.card.name)))

    async def _on_group_ready(self, model: ServedModel) -> None:
        generation = await model.pool.serving()
        await model.context.read(self._journal.base_models.note_progress, model.card.name, None)
        log.info("%s: worker group %d serves; models are restored as they are needed", model.card.name, generation)
        self._mirror.connection.tell("tinkerflow.group.serves", model.card.name, generation=generation)
        for runner in self._open_runners():
            runner.wake()
        model.sampling.wake()

    async def _sweep_often(self) -> None:
        while True:
            self._sweep.clear()
            try:
                for model_id in await asyncio.to_thread(self._journal.recovery.unstored_models):
                    if model_id not in self._runners:  # an earlier engine did not come to it
                        self.wake(model_id)
                abandoned = await asyncio.to_thread(self._sweep_journal)
                for runner in self._open_runners():
                    runner.look_at_snapshot()
                    if runner.paused and runner.model_id in abandoned:  # it would never come to its unload
                        await self.cancel(runner.model_id, OVER)
                for model in self._served.values():
                    await model.sampling.cancel_ended()
                    await self._drop_snapshots(model)
                store = next(iter(self._served.values())).context.store  # all of them have the same one
                keep = Retention(self._settings.keep_last, self._settings.keep_every)
                await asyncio.to_thread(delete_checkpoints, self._journal, store, keep)
                await asyncio.to_thread(note_changes, self._journal, store)
                await asyncio.to_thread(delete_snapshots, self._journal, store)
                await asyncio.to_thread(delete_uploads, self._journal, store)
            except (TinkerflowError, *AWAY):
                log.warning("a sweep failed; the next one is in %.0f s", SWEEP_SECONDS, exc_info=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_SECONDS):
                    await self._sweep.wait()

    def _sweep_journal(self) -> list[str]:
        """What is over ends; ids of models whose session is."""
        settings, journal = self._settings, self._journal
        for session_id in journal.sessions.expire(settings.session_timeout):
            log.info("session %s expired: no heartbeat for %.0f s", session_id, settings.session_timeout)
        abandoned = journal.models.abandoned()
        for model_id in abandoned:
            journal.models.request_unload(model_id, OVER)
        journal.models.forget_ended()
        for gap in journal.queue.gaps(settings.gap_timeout):
            journal.queue.skip_gap(gap)
        journal.results.expire(settings.result_ttl, _EXPIRED_AT_ONCE)
        journal.streams.expire()
        return abandoned

    async def _drop_snapshots(self, model: ServedModel) -> None:
        """Those of samplers that are closed; and others that are too many, until somebody samples them again."""
        snapshots = model.context.snapshots
        if snapshots.droppable:
            unused = await asyncio.to_thread(self._journal.samplers.unused_snapshots, snapshots.droppable)
            # of some of them a sampler may have been opened meanwhile
            await _drop(model, [one for one in unused if one in snapshots.droppable])
            most, host_bytes = self._settings.resident_snapshots, self._settings.host_snapshot_bytes
            await _drop(model, snapshots.surplus(most, host_bytes))


async def _drop(model: ServedModel, snapshot_ids: Sequence[str]) -> None:
    with suppress(GroupFailedError):  # all of them went with the group; the sweeps never wait for another one
        await drop(model.context.bound_to(model.pool.generation), snapshot_ids)
