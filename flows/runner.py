"""The runner of one model: its requests leave the journal in order, overlap in the pool, and are answered in order.

This file contains, in order: the states of a runner, the batches of its requests, the operations in flight, the model
in a worker group, and the loop over batches. Recovery snapshots are in snapshots.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import partial

from tinkerflow.backend.core.errors import GroupFailedError, SuspectError
from tinkerflow.backend.journal import AWAY, Kind, ModelState, Outcome, Pending
from tinkerflow.backend.spec.commands import AdapterState, Done, DropAdapter
from tinkerflow.flows.observers import IN_CHUNKS, Batch, RunObserver
from tinkerflow.flows.snapshots import SnapshotPolicy, SnapshotSchedule, SnapshotTaker
from tinkerflow.tasks.execution.operation import MOST_CRASHES, Execution, ExecutionContext, Operation, begin
from tinkerflow.tasks.execution.restore import Restored, restore
from tinkerflow.tasks.execution.sequencer import Sequencer, Slot
from tinkerflow.tasks.operations import OPERATIONS, SAVES

log = logging.getLogger(__name__)

IN_FLIGHT = 16  # operations of one model in flight at a time, with their payloads in memory
_PAGE = 2 * IN_FLIGHT  # requests to read from the journal, which include those in flight


# ------------------------------------------------------------------ the states of a runner
class RunnerState(Enum):
    IDLE = "the current worker group may not have the model"
    RESTORING = "the model is being restored in the current worker group"
    SERVING = "operations are executed in the current worker group"
    PAUSED = "a person paused the run: only saves that wait for the store are executed"
    DRAINING = "the worker group ended: no new operations begin until those in flight have ended"
    DRAINING_PAUSED = "as in DRAINING, then PAUSED"
    ENDED = "no more operations are executed"


class RunnerEvent(Enum):
    """An event that changes a runner's state."""

    RESTORE = "a restore begins"
    READY = "the current worker group has the model"
    NOT_READY = "the restore failed, and is tried again"
    PAUSE = "a person pauses the run"
    RESUME = "a person resumes or cancels the run"
    INTERRUPT = "an operation was interrupted because its worker group ended"
    DRAINED = "the last interrupted operation has ended"
    STOP = "the engine stops, or the model has ended"


# For each event, its transitions as "FROM TO". Other states do not change, so that a pause outlives a restore.
TRANSITIONS: Mapping[RunnerEvent, str] = {
    RunnerEvent.RESTORE: "IDLE RESTORING, SERVING RESTORING",
    RunnerEvent.READY: "IDLE SERVING, RESTORING SERVING",
    RunnerEvent.NOT_READY: "RESTORING IDLE",
    RunnerEvent.PAUSE: "IDLE PAUSED, RESTORING PAUSED, SERVING PAUSED, DRAINING DRAINING_PAUSED",
    RunnerEvent.RESUME: "PAUSED IDLE, DRAINING_PAUSED DRAINING",
    RunnerEvent.INTERRUPT: "IDLE DRAINING, RESTORING DRAINING, SERVING DRAINING, PAUSED DRAINING_PAUSED",
    RunnerEvent.DRAINED: "DRAINING IDLE, DRAINING_PAUSED PAUSED",
    RunnerEvent.STOP: ", ".join(f"{state.name} ENDED" for state in RunnerState),
}
DRAINING = (RunnerState.DRAINING, RunnerState.DRAINING_PAUSED)
_NEXT = {
    (RunnerState[before], event): RunnerState[after]
    for event, changes in TRANSITIONS.items()
    for before, after in (change.split() for change in changes.split(", "))
}


def next_state(state: RunnerState, event: RunnerEvent) -> RunnerState:
    return _NEXT.get((state, event), state)


class Why(StrEnum):
    """Why serving ended."""

    DONE = "the model was unloaded"
    FAILED = "the model was lost, or could not be created"
    STOPPED = "the engine was stopped"
    CANCELLED = "someone cancelled it"


@dataclass(frozen=True)
class End:
    """Why serving ended, with a message for people."""

    why: Why
    text: str

    @property
    def state(self) -> str:
        """The final state of a flow run that shows the runner."""
        return {Why.DONE: "Completed", Why.FAILED: "Failed"}.get(self.why, "Cancelled")


STOPPED = End(Why.STOPPED, Why.STOPPED.value)


def batches(pending: Sequence[Pending], steps_made: int) -> list[Batch]:
    """Group ordered requests into batches.

    Neighboring chunks of forward or of forward_backward are one batch. Every other request is a separate batch.
    steps_made: optimizer steps before the first request.
    """
    grouped: list[Batch] = []
    for request in pending:
        last = grouped[-1] if grouped else None
        if last is not None and request.kind in IN_CHUNKS and request.kind == last.kind:
            grouped[-1] = Batch(last.kind, (*last.requests, request), last.step)
        else:
            grouped.append(Batch(request.kind, (request,), steps_made + 1))
        if request.kind == Kind.OPTIM_STEP:
            steps_made += 1
    return grouped


# ------------------------------------------------------------------ operations in flight
class InFlight:
    """The operations of one model in flight, and the last request taken from the journal."""

    def __init__(self, woken: asyncio.Event) -> None:
        """Nothing is in flight. woken: set when the runner should read the journal again."""
        self._woken = woken
        self._requests: set[str] = set()  # requests that later requests wait for
        self._capacity = asyncio.Semaphore(IN_FLIGHT)
        self._taken = -1  # the seq_id of the last request that was taken
        self._wakes_when_empty = False
        self.unload: str | None = None  # the id of the last unload that was taken

    def __len__(self) -> int:
        return len(self._requests)

    async def has_capacity(self) -> None:
        """Wait until fewer than IN_FLIGHT operations are in flight."""
        await self._capacity.acquire()

    def add(self, request: Pending) -> None:
        """Add a request that was taken from the journal, after `has_capacity`."""
        self._requests.add(request.id)
        if request.seq_id is None:
            self.unload = request.id
        elif not request.answered:  # a paused run stores answered saves before it takes earlier requests
            self._taken = max(self._taken, request.seq_id)

    def is_new(self, request: Pending) -> bool:
        """Whether a row of the journal was not taken before.

        Checking the ids in flight is not enough, since a request may have been answered after the rows were read.
        Answered requests are read only when nothing is in flight.
        """
        if request.seq_id is None:
            return request.id != self.unload  # an unload that failed is requested again
        return request.answered or request.seq_id > self._taken

    def remove(self, request_id: str) -> None:
        """Note that a request was answered, or is a detached save. Later requests no longer wait for it."""
        if request_id not in self._requests:
            return
        self._requests.remove(request_id)
        self._capacity.release()
        if not self._requests and self._wakes_when_empty:
            self._wakes_when_empty = False
            self._woken.set()

    def wake_when_empty(self) -> None:
        """Wake the runner when nothing is in flight."""
        self._wakes_when_empty = True

    def restart(self) -> None:
        """Note that nothing is in flight, so that unanswered requests are taken from the journal again."""
        self._taken, self.unload = -1, None


# ------------------------------------------------------------------ the model in a worker group
class ModelBinding:
    """The worker group that holds the model. The model's snapshot and the journal restore it in another group."""

    def __init__(
        self,
        context: ExecutionContext,
        model_id: str,
        observers: Sequence[RunObserver],
        schedule: SnapshotSchedule,
    ) -> None:
        """No group holds the model.

        context: not bound to a worker group. observers: get reports about restores. schedule: counts replayed steps.
        """
        self._unbound = context
        self.context = context  # bound to the worker group that holds the model, once one does
        self.copies: dict[str, AdapterState] = {}  # by request: the states that a replay copied for saves
        self._model_id = model_id
        self._observers = observers
        self._schedule = schedule
        self._crashes = 0  # worker groups that were restoring this model

    def release(self) -> None:
        """Note that no group holds the model."""
        self.context = self._unbound

    async def enter(self, generation: int, *, restores: bool, detached: frozenset[str]) -> bool:
        """Put the model into the worker group `generation`. Returns False if the group or the model has ended.

        restores: whether the state of a live model is needed. detached: ids of its detached saves.
        """
        model = await self._unbound.read(self._unbound.journal.models.get, self._model_id, None)
        context = self._unbound.bound_to(generation, model.owner)
        if restores and model.state is ModelState.LIVE:
            for observer in self._observers:
                observer.restoring(generation)
            if (restored := await self._restore(context, detached)) is None:
                return False
            self._schedule.restored(restored.steps, restored.last)
            self.copies = dict(restored.copies)
            for observer in self._observers:
                observer.restored(generation, restored)
        self._crashes = 0
        self.context = context
        return True

    async def _restore(self, context: ExecutionContext, detached: frozenset[str]) -> Restored | None:
        try:
            return await restore(context, self._model_id, OPERATIONS, detached)
        except GroupFailedError as error:
            self._crashes += isinstance(error, SuspectError) and error.crashed
            if self._crashes >= MOST_CRASHES:
                await self._fail(f"restoring it crashes worker groups: {error}")
        except AWAY:
            raise  # the engine ends, and the next engine restores the model
        except Exception as error:
            log.exception("model %s cannot be restored", self._model_id)
            await self._fail(f"{type(error).__name__}: {error}")
        return None

    async def _fail(self, why: str) -> None:
        detail = f"it could not be restored after its worker group ended: {why}"
        await self._unbound.read(self._unbound.journal.models.end, self._model_id, ModelState.FAILED, detail)

    async def drop(self) -> None:
        """Free the model's memory in the worker group."""
        if self.context.generation is None:
            return
        try:
            await self.context.send(DropAdapter(self._model_id), Done)
        except GroupFailedError as error:
            log.info("model %s ended with its worker group: %s", self._model_id, error)


# ------------------------------------------------------------------ the loop over batches
class ModelRunner:
    """Serves one model until it takes no more work.

    `serve` is a loop. It waits until the runner is woken, and reads the requests from the journal that were not taken
    yet. It restores the model if the worker group that serves does not hold it, and executes batch after batch. At most
    IN_FLIGHT operations are in flight. When the worker group ends, they fail one after another, and then the runner
    reads the journal again. TRANSITIONS lists the changes of state.
    """

    def __init__(
        self,
        context: ExecutionContext,
        observers: Sequence[RunObserver],
        snapshots: SnapshotPolicy,
        model_id: str,
        steps_made: int,
        *,
        paused: bool = False,
    ) -> None:
        """Nothing is taken from the journal before `serve`.

        context: not bound to a worker group. observers: get reports about the work. snapshots: decides when a recovery
        snapshot of `model_id` is due. steps_made: optimizer steps so far, for the names of task runs. paused: whether
        the run begins paused.
        """
        self.model_id = model_id
        self.observers = observers
        self.state = RunnerState.PAUSED if paused else RunnerState.IDLE
        self._journal, self._clock, self._pool = context.journal, context.clock, context.pool
        self._read, self._saves = context.read, context.saves
        self.base_model = context.card.name
        self._schedule = SnapshotSchedule(snapshots, context.clock.monotonic())
        self._snapshots = SnapshotTaker(model_id, observers, self._schedule)
        self._binding = ModelBinding(context, model_id, observers, self._schedule)
        self._steps_made = steps_made
        self._sequencer = Sequencer(model_id, context.saves)
        self._woken = asyncio.Event()
        self._woken.set()
        self._in_flight = InFlight(self._woken)
        self._has_unstored = True  # the journal may list saves that were answered but not stored
        if paused:
            for observer in self.observers:
                observer.paused("it was paused already when this run began")

    # ------------------------------------------------------------------ calls of the dispatcher
    @property
    def paused(self) -> bool:
        """Whether a person has paused the run."""
        return self.state in (RunnerState.PAUSED, RunnerState.DRAINING_PAUSED)

    @property
    def busy(self) -> bool:
        """Whether any operation of the model is being executed."""
        return bool(self._in_flight) or self._schedule.taking

    def wake(self) -> None:
        """Read the journal again: there may be work, or the model may have ended."""
        self._woken.set()

    def stop(self) -> None:
        """Stop taking requests from the journal. `serve` returns when the operations in flight are answered."""
        self._change(RunnerEvent.STOP)

    def pause(self, paused: bool) -> None:
        """Take no requests from the journal until the pause ends. Operations in flight are answered."""
        self._change(RunnerEvent.PAUSE if paused else RunnerEvent.RESUME)
        for observer in self.observers:
            observer.paused("it is paused" if paused else None)

    def cancel(self) -> None:
        """Free the memory of a model that has ended in the journal, as soon as none of its operations is in flight."""
        self._change(RunnerEvent.RESUME)

    async def save_now(self) -> None:
        """Take a snapshot unless the last one covers everything. Returns when the snapshot is taken."""
        self._schedule.hurry()
        self._woken.set()
        await self._snapshots.hurried_snapshot(lambda: self.paused)

    def wake_for_snapshot(self) -> None:
        """Wake the runner if time has made a snapshot due."""
        if self._schedule.is_due(self._clock.monotonic()):
            self._woken.set()

    def _change(self, event: RunnerEvent) -> None:
        self.state = next_state(self.state, event)
        self._woken.set()

    # ------------------------------------------------------------------ the loop
    async def serve(self, *, restore_now: bool = False) -> End:
        """Execute requests as they arrive, until the model takes no more or the engine stops.

        restore_now: restore the model now instead of on its next request.
        """
        async with asyncio.TaskGroup() as group:  # waits for operations in flight
            if restore_now:
                await self._is_ready(restores=True)
            try:
                while True:
                    work = await self._next(group)
                    if isinstance(work, End):
                        return work
                    for batch in work:
                        await self._execute(batch, group)
            finally:
                self._snapshots.stop_rechecks()

    async def _next(self, group: asyncio.TaskGroup) -> list[Batch] | End:
        """Wait for the batches to execute next, or the end of serving."""
        while True:
            await self._woken.wait()
            if self.state is RunnerState.ENDED:
                self._snapshots.take(self._binding.context, self._sequencer, group)
                return STOPPED
            self._woken.clear()
            if self.state is RunnerState.PAUSED and not self._has_unstored:
                continue
            if self.state in DRAINING:
                if self._in_flight:
                    self._in_flight.wake_when_empty()
                    continue
                await self._begin_again()
            if self._schedule.is_due(self._clock.monotonic()):
                self._snapshots.take(self._binding.context, self._sequencer, group)
            if self._pool.draining:
                continue
            if new := await self._new_requests():
                if await self._is_ready_for(new):
                    return batches(new, self._steps_made)
                self._woken.set()
            elif self._in_flight:
                self._in_flight.wake_when_empty()
            elif not self.paused and (end := await self._ended()) is not None:
                return end

    async def _new_requests(self) -> list[Pending]:
        """The journal's requests that were not taken yet; while paused, only saves that wait for the store."""
        detached = self._detached()  # read before the journal, so that a save in neither has ended
        rows = [] if self.paused else await self._read(self._journal.requests.ready, self.model_id, _PAGE)
        if self._has_unstored:  # even while paused, because samplers wait for these
            unstored = await self._read(self._journal.recovery.unstored, self.model_id)
            self._has_unstored = bool(unstored)
            rows = sorted([*unstored, *rows], key=lambda row: math.inf if row.seq_id is None else row.seq_id)
        if len(rows) >= _PAGE:
            self._woken.set()  # there may be more
        return [row for row in rows if row.id not in detached and self._in_flight.is_new(row)]

    async def _is_ready_for(self, new: Sequence[Pending]) -> bool:
        """Place the model where it can execute these requests. False: read the journal again."""
        bound = self._binding.context.generation
        ready = await self._is_ready(restores=any(request.seq_id is not None for request in new))
        if ready:
            self._has_unstored = self._binding.context.generation != bound  # a replay's copies are to be stored
        return ready and not self._has_unstored

    async def _is_ready(self, *, restores: bool) -> bool:
        """Place the model in the worker group that serves. False: read the journal again.

        restores: whether the model's state is needed. An unload does not need it, and starts no worker group.
        """
        if not restores and self._pool.resting and not self._in_flight:
            self._binding.release()
            return True
        generation = await self._pool.serving()
        if self._binding.context.generation != generation:
            if self._in_flight or self.state in DRAINING:
                self._change(RunnerEvent.INTERRUPT)  # the operations of the ended group fail one after another
                return False
            self._change(RunnerEvent.RESTORE)
            if not await self._binding.enter(generation, restores=restores, detached=self._detached()):
                self._change(RunnerEvent.NOT_READY)
                return False
        self.state = next_state(self.state, RunnerEvent.READY)
        return True

    async def _begin_again(self) -> None:
        """Take operations that ended with their worker group from the journal again."""
        for observer in self.observers:
            observer.interrupted()
        model = await self._read(self._journal.models.get, self.model_id, None)
        self._steps_made, self._has_unstored = model.step, True
        self._in_flight.restart()
        self._sequencer.restart()
        self._snapshots.interrupted()
        self._binding.release()
        self._change(RunnerEvent.DRAINED)

    async def _ended(self) -> End | None:
        model = await self._read(self._journal.models.get, self.model_id, None)
        match model.state:
            case ModelState.CREATING | ModelState.LIVE:
                return None
            case ModelState.UNLOADED if self._in_flight.unload is None:  # a person has ended it
                await self._binding.drop()
                return End(Why.CANCELLED, model.detail or Why.CANCELLED.value)
            case ModelState.UNLOADED:
                return End(Why.DONE, f"unloaded: {model.detail}")
            case _:
                return End(Why.FAILED, f"{model.state}: {model.detail}")

    def _detached(self) -> frozenset[str]:
        """Ids of the model's detached saves."""
        return frozenset(save.request_id for save in self._saves.detached(self.model_id))

    # ------------------------------------------------------------------ operations
    async def _execute(self, batch: Batch, group: asyncio.TaskGroup) -> None:
        """Start the operations of a batch, and report them."""
        operations = []
        for request in batch.requests:
            await self._in_flight.has_capacity()
            operations.append(self._begin(request, group))
        for observer in self.observers:
            observer.started(batch, operations)

    def _begin(self, request: Pending, group: asyncio.TaskGroup) -> Operation:
        self._in_flight.add(request)
        is_step = request.kind == Kind.OPTIM_STEP
        if request.seq_id is not None:
            self._schedule.dispatched(request.seq_id, step=is_step)
        self._steps_made += is_step
        slot = self._sequencer.slot(request.id if request.kind in SAVES else None)
        copied = self._binding.copies.pop(request.id, None)
        execution = Execution(self._binding.context, request, slot, copy=copied)
        operation = begin(OPERATIONS.execute[request.kind], execution, group)
        operation.answered.add_done_callback(partial(self._answered, request.id))
        if slot.save is not None:
            group.create_task(self._remove_detached(request.id, slot), name=f"{request.kind} {request.id} is detached")
        return operation

    async def _remove_detached(self, request_id: str, slot: Slot) -> None:
        """Continue without a save once it is detached."""
        await slot.released()
        self._in_flight.remove(request_id)

    def _answered(self, request_id: str, answered: asyncio.Task[Outcome | None]) -> None:
        ended = not answered.cancelled() and answered.exception() is None
        outcome = answered.result() if ended else None
        if ended and outcome is None:
            self._change(RunnerEvent.INTERRUPT)
        self._in_flight.remove(request_id)
        if outcome is not None and (outcome.seq_id is None or outcome.error is not None):
            self._woken.set()  # the model may have ended
