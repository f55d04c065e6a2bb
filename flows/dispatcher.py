"""The dispatcher starts a runner for each model that has work. The journal's notifications and sweeps wake runners."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from uuid import UUID

from tinkerflow.backend.catalog.model_card import public_name
from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.core.errors import ServerError, TinkerflowError, UserError
from tinkerflow.backend.core.retry import repeat
from tinkerflow.backend.journal import AWAY, Journal, ModelEnded, ModelState
from tinkerflow.backend.settings import Settings
from tinkerflow.flows.group_watch import GroupWatch
from tinkerflow.flows.groups import ServedModel
from tinkerflow.flows.observers import EngineObserver, RunObserver
from tinkerflow.flows.run_log import RunLogs
from tinkerflow.flows.runner import STOPPED, End, ModelRunner, Why
from tinkerflow.flows.snapshots import SnapshotPolicy
from tinkerflow.flows.sweeps import OVER, SWEEP_SECONDS, Sweeps
from tinkerflow.flows.turns import GroupTurns, Turns

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # a notification may be lost
_FAILED_AT_ONCE = 500


async def observed(serve: Callable[[], Awaitable[End]], observers: Sequence[RunObserver]) -> End:
    """Await a runner's `serve`, and report its end to the observers, even if it fails or is cancelled."""
    end = STOPPED
    try:
        end = await serve()
    except Exception as error:
        end = End(Why.FAILED, f"{type(error).__name__}: {error}")
        raise
    finally:
        for observer in observers:
            observer.ended(end.state, end.text, over=end.why is not Why.STOPPED)
    return end


class Dispatcher:
    """One runner for each model that has work, one for each base model's samples, and the sweeps."""

    def __init__(
        self, settings: Settings, journal: Journal, observer: EngineObserver, served: Sequence[ServedModel]
    ) -> None:
        """Nothing runs before `serve`.

        settings, journal: the engine's. observer: shows the runs. served: every base model, at least one.
        """
        self._settings = settings
        self._journal = journal
        self._observer = observer
        self._snapshots = SnapshotPolicy(settings.snapshot_steps, settings.snapshot_seconds)
        self._served = {model.card.name: model for model in served}
        self._read = served[0].context.read
        self._sweeps = Sweeps(settings, journal, served)
        self._run_logs = RunLogs(journal, SystemClock(), settings.budget_tokens, settings.drift_limits)
        self._runners: dict[str, ModelRunner | None] = {}  # None: the runner is being opened
        self._adopted: dict[str, UUID] = {}  # by model: the flow run in which the model resumes
        self._group: asyncio.TaskGroup | None = None  # the runners' tasks
        self._sweep_now, self._swept = asyncio.Event(), asyncio.Event()
        self._stopping = asyncio.Event()

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until `stop`, and return after the operations in flight are answered. on_ready: called at the start."""
        async with self._journal.notifier.subscribe("model:", "session:") as topics, asyncio.TaskGroup() as around:
            watches = [around.create_task(watch, name=name) for name, watch in self._watches(topics)]
            try:
                async with asyncio.TaskGroup() as runners:
                    self._group = runners
                    for model in self._served.values():
                        runners.create_task(observed(model.sampling.serve, model.sampling.observers), name="sampling")
                    on_ready()
                    try:
                        await self._stopping.wait()
                    finally:
                        self._stopping.set()  # even if cancelled: no further runner begins
                    for runner in self._open_runners():
                        runner.stop()
                    for model in self._served.values():
                        model.sampling.stop()
            finally:
                for task in watches:
                    task.cancel()
                with suppress(*AWAY):
                    await self._run_logs.write()

    def _watches(self, topics: AsyncIterator[str]) -> Iterator[tuple[str, Coroutine[object, object, None]]]:
        """The tasks around the runners, with their names."""
        sweep, failed = (TinkerflowError, *AWAY), "a sweep failed"
        yield "sweeps", repeat(self._sweep, SWEEP_SECONDS, on=sweep, what=failed, log=log, early=self._sweep_now)
        store, failed = self._sweeps.sweep_store, "a sweep of the store failed"
        yield "store sweeps", repeat(store, SWEEP_SECONDS, on=sweep, what=failed, log=log, early=self._swept)
        yield "poll", repeat(self._poll, POLL_SECONDS, on=AWAY, what="the journal cannot be read", log=log)
        writing, lost = self._run_logs, "events of runs are not written"
        yield "run events", repeat(writing.write, POLL_SECONDS, on=AWAY, what=lost, log=log, early=writing.some)
        yield "notifications", self._listen(topics)
        yield "observer", self._observer.watch(self)
        for model in self._served.values():
            runners = partial(self._open_runners, model.card.name)
            yield "group watch", GroupWatch(model, self._journal, self._observer, runners).watch()
        if (groups := self._settings.groups) < len(self._served):
            turns, models = Turns(groups, release=self._settings.idle_release), list(self._served.values())
            patience = self._settings.start_deadline
            sharing = GroupTurns(self._journal, models, turns, self._is_busy, SystemClock(), patience)
            yield "group turns", sharing.watch()

    def _is_busy(self, base_model: str) -> bool:
        """Whether any operation on a base model is being executed."""
        return self._served[base_model].sampling.busy or any(one.busy for one in self._open_runners(base_model))

    def _open_runners(self, base_model: str | None = None) -> list[ModelRunner]:
        """The runners that serve, without those being opened. base_model: only runners of its models."""
        runners = [runner for runner in self._runners.values() if runner is not None]
        return [runner for runner in runners if base_model in (None, runner.base_model)]

    @property
    def models(self) -> frozenset[str]:
        """Ids of the models that are being served: each has a runner."""
        return frozenset(self._runners)

    def stop(self) -> None:
        """Stop taking requests from the journal."""
        self._stopping.set()

    # ------------------------------------------------------------------ waking runners
    async def _listen(self, topics: AsyncIterator[str]) -> None:
        async for topic in topics:
            kind, _, name = topic.partition(":")
            if kind == "model":
                self.wake(name)
            else:
                self._sweep_now.set()

    async def _poll(self) -> None:
        """Wake the runners of all models with waiting requests."""
        for model_id in await asyncio.to_thread(self._journal.queue.pending_models):
            self.wake(model_id)
        for model in self._served.values():
            model.sampling.wake()

    async def _sweep(self) -> None:
        for model_id in await asyncio.to_thread(self._journal.recovery.unstored_models):
            if model_id not in self._runners:  # an earlier engine ended before it stored these saves
                self.wake(model_id)
        await asyncio.to_thread(self._fail_unserved_samples)
        abandoned = await self._sweeps.sweep_journal()
        self._swept.set()
        for runner in self._open_runners():
            runner.wake_for_snapshot()
            if runner.paused and runner.model_id in abandoned:  # a paused runner never reaches its unload
                await self.cancel(runner.model_id, OVER)

    def wake(self, model_id: str, *, restore_now: bool = False) -> None:
        """Wake the model's runner. restore_now: restore the model now instead of on its next request."""
        if self._stopping.is_set() or self._group is None:
            return
        runner = self._runners.get(model_id)
        if runner is not None:
            runner.wake()
        elif model_id not in self._runners:
            self._runners[model_id] = None
            self._group.create_task(self._serve_model(model_id, restore_now=restore_now), name=model_id)

    # ------------------------------------------------------------------ the life of a runner
    async def _serve_model(self, model_id: str, *, restore_now: bool) -> None:
        try:
            if (runner := await self._open_runner(model_id)) is None:
                return
            self._runners[model_id] = runner
            if self._stopping.is_set():
                runner.stop()
            serve = partial(runner.serve, restore_now=restore_now and not self._stopping.is_set())
            end = await observed(serve, runner.observers)
            log.info("model %s: %s", model_id, end.text)
        except Exception as error:
            if ExceptionGroup("", [error]).subgroup(AWAY) is not None:  # a runner's errors come in groups, too
                raise  # nothing is lost: the engine ends, and its successor reads everything in the journal
            # A failure of one model must not end the others.
            log.exception("model %s cannot be served", model_id)
            await self._give_up(model_id, ServerError(f"the model cannot be served ({type(error).__name__}: {error})"))
        finally:
            del self._runners[model_id]
            for served in self._served.values():
                served.context.saves.forget(model_id)
            self._adopted.pop(model_id, None)

    async def _open_runner(self, model_id: str) -> ModelRunner | None:
        """A runner for the model; None if the model has ended, or its base model is not served here."""
        model = await self._read(self._journal.models.get, model_id, None)
        if model.state not in (ModelState.CREATING, ModelState.LIVE):
            return None
        served = self._served.get(model.base_model)
        if served is None:
            await self._give_up(model_id, self._not_served(model.base_model))
            return None
        label = await self._read(self._journal.models.label, model_id) if self._observer.is_on else ""
        trained = await self._read(self._journal.curves.trained, model_id)
        adopted = self._adopted.get(model_id)
        observers = self._observer.observe_training_run(
            model_id, model.base_model, label, adopted, trained, model.step, model.created_at
        )
        verb = "was created" if model.state is ModelState.CREATING else "continues"
        for observer in observers:
            observer.log(f"model {model_id} of {public_name(model.base_model)} {verb} at optimizer step {model.step}")
        paused = model.paused is not None and bool(observers)  # without Prefect, no one can end a pause
        observers = [*observers, self._run_logs.observe(model_id, trained)]
        return ModelRunner(served.context, observers, self._snapshots, model_id, model.step, paused=paused)

    def _fail_unserved_samples(self) -> None:
        """Fail the samples of base models that the restarted engine no longer serves. No runner takes these samples."""
        for base_model in self._journal.queue.wanted():
            if base_model not in self._served:
                error = self._not_served(base_model)
                while waiting := self._journal.requests.pending_samples(_FAILED_AT_ONCE, base_model=base_model):
                    self._journal.results.finish([request.failed(error) for request in waiting])

    def _not_served(self, base_model: str) -> UserError:
        return UserError(f"base model {base_model!r} is not served here: {', '.join(sorted(self._served))}")

    async def _give_up(self, model_id: str, error: TinkerflowError) -> None:
        """End a model, and fail all its waiting requests."""
        ended = ModelEnded(model_id, ModelState.FAILED, error.message)
        waiting = await self._read(self._journal.requests.ready, model_id, 1)
        outcomes = [request.failed(error, None, ended) for request in waiting]
        await self._read(self._journal.results.finish, outcomes)

    # ------------------------------------------------------------------ how people control runs (`RunControls`)
    def shown_in(self, model_id: str) -> UUID | None:
        runner = self._runners.get(model_id)
        if runner is None:
            return self._adopted.get(model_id)
        return next((observer.flow_run for observer in runner.observers), None)

    async def pause(self, model_id: str, reason: str | None) -> None:
        await asyncio.to_thread(self._journal.models.pause, model_id, reason)
        if (runner := self._runners.get(model_id)) is not None:
            runner.pause(reason is not None)

    async def cancel(self, model_id: str, reason: str) -> None:
        await asyncio.to_thread(self._journal.models.end, model_id, ModelState.UNLOADED, reason)
        if (runner := self._runners.get(model_id)) is not None:
            runner.cancel()

    async def retry(self, model_id: str, flow_run: UUID) -> None:
        if model_id in self._runners:
            raise UserError(f"model {model_id} is already being served")
        model = await asyncio.to_thread(self._journal.models.get, model_id, None)
        if model.base_model not in self._served:
            raise self._not_served(model.base_model)
        await asyncio.to_thread(self._journal.models.revive, model_id)
        await asyncio.to_thread(self._journal.models.pause, model_id, None)
        self._adopted[model_id] = flow_run
        self.wake(model_id, restore_now=True)
