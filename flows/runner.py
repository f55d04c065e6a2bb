"""The runner of one model: its requests leave the journal in order, overlap in the pool, and are answered in order."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from tinkerflow.backend.core.errors import GroupFailedError, SuspectError
from tinkerflow.backend.journal import AWAY, Kind, ModelState, Outcome, Pending, SnapshotTaken
from tinkerflow.backend.spec.commands import AdapterState, Done, DropAdapter
from tinkerflow.flows.prefect.mirror import RunMirror
from tinkerflow.tasks.execution.operation import MOST_CRASHES, Execution, ExecutionContext, Operation, begin
from tinkerflow.tasks.execution.restore import restore
from tinkerflow.tasks.execution.sequencer import Sequencer, Slot
from tinkerflow.tasks.execution.state_transfers import take
from tinkerflow.tasks.operations import EXECUTE, SAVES

log = logging.getLogger(__name__)

IN_FLIGHT = 16  # operations of one model on their way at once; their payloads are in memory
_LOOK = 2 * IN_FLIGHT  # requests to ask the journal for: those in flight are among them
_IN_CHUNKS = (Kind.FORWARD, Kind.FORWARD_BACKWARD)  # the SDK cuts one call into several requests


class Why(StrEnum):
    """Why serving ended."""

    DONE = "the model was unloaded"
    FAILED = "the model was lost, or could not be made"
    STOPPED = "the engine was stopped"
    CANCELLED = "somebody cancelled it"


@dataclass(frozen=True)
class End:
    """The end of serving, and a sentence about it for people."""

    why: Why
    text: str

    @property
    def state(self) -> str:
        """The final state of a flow run that shows it."""
        return {Why.DONE: "Completed", Why.FAILED: "Failed"}.get(self.why, "Cancelled")


STOPPED = End(Why.STOPPED, Why.STOPPED.value)


@dataclass(frozen=True)
class Batch:
    """Requests of one kind that make up one operation for people; `step`: the optimizer step it belongs to, from 1."""

    kind: Kind
    requests: tuple[Pending, ...]
    step: int

    @property
    def ends_step(self) -> bool:
        """Whether a step ends with it, so that a shared task run may end here too."""
        return self.kind not in _IN_CHUNKS


def batches(pending: Sequence[Pending], steps_made: int) -> list[Batch]:
    """The batches that `pending` (in order) falls into; `steps_made`: optimizer steps before the first of them.

    Neighbouring chunks of forward or of forward_backward are one batch; everything else is a batch by itself.
    """
    made: list[Batch] = []
    for request in pending:
        last = made[-1] if made else None
        if last is not None and request.kind in _IN_CHUNKS and request.kind == last.kind:
            made[-1] = Batch(last.kind, (*last.requests, request), last.step)
        else:
            made.append(Batch(request.kind, (request,), steps_made + 1))
        if request.kind == Kind.OPTIM_STEP:
            steps_made += 1
    return made


# ------------------------------------------------------------------ when a recovery snapshot is due
@dataclass(frozen=True)
class SnapshotPolicy:
    """When a model's snapshot is due: after `steps` optimizer steps or `seconds` since the last one, if it changed."""

    steps: int
    seconds: float


class SnapshotSchedule:
    """How far a model has come since its last snapshot."""

    def __init__(self, policy: SnapshotPolicy, now: float) -> None:
        """Nothing has happened; `now` is monotonic."""
        self._policy = policy
        self._since = now
        self._steps = 0
        self._last = -1  # the last request that the model in the group has seen
        self.seq_id: int | None = None  # the last request that was dispatched, if none of the snapshots covers it
        self.taking = self.hurried = False

    def went(self, seq_id: int, *, step: bool) -> None:
        """A request was dispatched; a save whose place in the line a replay has passed comes after later ones."""
        self.seq_id = self._last = max(seq_id, self._last)
        self._steps += step

    def interrupted(self) -> None:
        """Some of what was dispatched was not executed."""
        self.seq_id, self._last, self.hurried = None, -1, False

    def restored(self, replayed: int, last: int) -> None:
        """So many steps were replayed after the last snapshot: they count, lest deaths in a row replay ever more.

        last: the last request that was replayed.
        """
        self._steps, self._last = replayed, last

    def hurry(self) -> None:
        """The worker group is about to end: a snapshot is due, if there is anything to be in it."""
        self.hurried = self.seq_id is not None

    def due(self, now: float) -> bool:
        """Whether a snapshot should be taken now."""
        late = self.hurried or self._steps >= self._policy.steps or now - self._since >= self._policy.seconds
        return late and not self.taking and self.seq_id is not None

    def begin(self, now: float) -> int:
        """A snapshot is being taken; the last request in it."""
        assert self.seq_id is not None
        seq_id, self.seq_id = self.seq_id, None
        self._since, self._steps, self.taking, self.hurried = now, 0, True, False
        return seq_id


# ------------------------------------------------------------------ the loop over batches
class ModelRunner:
    """Serves one model until it takes no more work.

    `serve` is a loop: wait until somebody wakes the runner, read what the journal has that was not taken yet, have the
    model in the worker group that serves (restored, if an earlier group had it), and execute batch after batch. At most
    IN_FLIGHT operations are on their way. When the worker group ends, they fail one after the other; the last one wakes
    the runner, which begins anew from the journal.
    """

    def __init__(
        self,
        context: ExecutionContext,
        observers: Sequence[RunMirror],
        snapshots: SnapshotPolicy,
        model_id: str,
        steps_made: int,
        *,
        paused: bool = False,
    ) -> None:
        """Nothing is taken from the journal before `serve`.

        context: not bound to a worker group. observers: are told what happens. snapshots: when a
        recovery snapshot of `model_id` is due. steps_made: optimizer steps so far, for the names of task runs.
        paused: it begins paused.
        """
        self.model_id = model_id
        self.observers = observers
        self._paused = paused
        self._cancelled = False
        self._unbound = context
        self._context = context  # bound to the worker group that holds the model, once one does
        self._interrupted = False
        self._crashes = 0  # of groups that were restoring this model
        self._schedule = SnapshotSchedule(snapshots, context.clock.monotonic())
        self._steps_made = steps_made
        self._taken = -1  # the seq_id of the last request that was taken
        self._unload: str | None = None  # the id of the last unload that was taken
        self._flying: set[str] = set()  # requests that later ones wait for
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._sequencer = Sequencer(model_id, context.saves)
        self._copies: dict[str, AdapterState] = {}  # by request: what a replay has copied for a save
        self._woken = asyncio.Event()
        self._woken.set()
        self._saved = asyncio.Event()  # a snapshot was taken, or cannot be
        self._look_again = False  # something changed while operations were in flight
        self._unstored = True  # the journal may list saves that were answered, and not stored
        self._stopping = False
        if paused:
            for shown in self.observers:
                shown.paused("it was paused already when this run began")

    def wake(self) -> None:
        """There may be work, or the model may have ended."""
        self._woken.set()

    def stop(self) -> None:
        """Take nothing more from the journal; `serve` returns when what is in flight is answered."""
        self._stopping = True
        self._woken.set()

    @property
    def paused(self) -> bool:
        """Whether nothing is taken from the journal."""
        return self._paused

    def pause(self, paused: bool) -> None:
        """Take nothing more from the journal until the pause ends; what is in flight is answered."""
        self._paused = paused
        for shown in self.observers:
            shown.paused("it is paused" if paused else None)
        self._woken.set()

    @property
    def base_model(self) -> str:
        """The base model of the model."""
        return self._unbound.card.name

    @property
    def busy(self) -> bool:
        """Whether anything of the model is being executed."""
        return bool(self._flying) or self._schedule.taking

    def cancel(self) -> None:
        """The model was ended from outside: drop it as soon as nothing of it is in flight."""
        self._cancelled = True
        self._woken.set()

    async def serve(self, *, restore_now: bool = False) -> End:
        """Execute requests as they come, until the model takes no more or the engine stops.

        restore_now: the model is restored at once, and not when there is something to execute.
        """
        async with asyncio.TaskGroup() as group:  # waits for what is in flight
            if restore_now:
                await self._is_ready(needed=True)
            while True:
                found = await self._next(group)
                if isinstance(found, End):
                    return found
                for batch in found:
                    await self._execute(batch, group)

    async def _next(self, group: asyncio.TaskGroup) -> list[Batch] | End:
        while True:
            await self._woken.wait()
            if self._stopping:
                self._take_snapshot(group)
                return STOPPED
            self._woken.clear()
            paused = self._paused and not self._cancelled
            if paused and not (self._unstored or self._interrupted):
                continue
            if self._interrupted:
                if self._flying:
                    continue  # the last of them wakes us
                await self._begin_anew()
            if self._schedule.due(self._context.clock.monotonic()):
                self._take_snapshot(group)
            if self._unbound.pool.draining:
                continue
            if fresh := await self._fresh(paused):
                if await self._is_ready_for(fresh):
                    return batches(fresh, self._steps_made)
                self._woken.set()
            elif self._flying:
                self._look_again = True
            elif not paused and (end := await self._ended()) is not None:
                return end

    async def _fresh(self, paused: bool) -> list[Pending]:
        """What the journal has for us and was not taken yet: while paused only saves that wait for the store."""
        detached = self._detached()  # from before the look: what is in neither was answered meanwhile
        rows = [] if paused else await self._context.read(self._context.journal.requests.ready, self.model_id, _LOOK)
        if self._unstored:  # also while paused: samplers wait for these
            left = await self._context.read(self._context.journal.recovery.unstored, self.model_id)
            self._unstored = bool(left)
            rows = sorted([*left, *rows], key=lambda row: math.inf if row.seq_id is None else row.seq_id)
        if len(rows) >= _LOOK:
            self._woken.set()  # there may be more
        return [row for row in rows if row.id not in detached and self._is_fresh(row)]

    async def _is_ready_for(self, fresh: list[Pending]) -> bool:
        """Have the model where it can execute these. False: look again."""
        bound = self._context.generation
        ready = await self._is_ready(needed=any(request.seq_id is not None for request in fresh))
        if ready:
            self._unstored = self._context.generation != bound  # what the replay has copied is to be stored
        return ready and not self._unstored

    async def _is_ready(self, *, needed: bool) -> bool:
        """Have the model in the worker group that serves: restored, if an earlier group had it. False: look again.

        needed: whether there is anything to do with it but unload it.
        """
        pool = self._unbound.pool
        if not needed and pool.resting and not self._flying:  # no group is started to unload a model that is in none
            self._context = self._unbound
            return True
        generation = await pool.serving()
        if self._context.generation == generation:
            return True
        if self._flying:
            self._interrupted = True  # they fail one after the other, and the last one wakes us
            return False
        model = await self._unbound.read(self._unbound.journal.models.get, self.model_id, None)
        context = self._unbound.bound_to(generation, model.owner)
        if model.state is ModelState.LIVE and needed:
            for shown in self.observers:
                shown.restoring(generation)
            try:
                restored = await restore(context, self.model_id, self._detached())
            except GroupFailedError as error:
                self._crashes += isinstance(error, SuspectError) and error.crashed
                if self._crashes < MOST_CRASHES:
                    return False
                await self._fail(f"worker groups crash while they restore it: {error}")
                return False
            except AWAY:
                raise  # nothing is lost: the engine ends
            except Exception as error:
                log.exception("model %s cannot be restored", self.model_id)
                await self._fail(f"{type(error).__name__}: {error}")
                return False
            self._schedule.restored(restored.steps, restored.last)
            self._copies = dict(restored.copies)
            for shown in self.observers:
                shown.restored(generation, restored)
        self._crashes = 0
        self._context = context
        return True

    async def _fail(self, why: str) -> None:
        detail = f"it could not be restored after its worker group ended: {why}"
        end = self._unbound.journal.models.end
        await self._unbound.read(end, self.model_id, ModelState.FAILED, detail)

    async def _begin_anew(self) -> None:
        """What was in flight went with its group: take it from the journal again."""
        for shown in self.observers:
            shown.interrupted()
        self._interrupted = False
        model = await self._unbound.read(self._unbound.journal.models.get, self.model_id, None)
        self._steps_made, self._taken, self._unload, self._unstored = model.step, -1, None, True
        self._sequencer.restart()
        self._schedule.interrupted()
        self._saved.set()
        self._context = self._unbound

    def _take_snapshot(self, group: asyncio.TaskGroup) -> None:
        """Give a snapshot the next slot of the model, if there is anything new to be in it."""
        last = self._sequencer.last
        if self._schedule.seq_id is None or self._schedule.taking or last is None or last.interrupted:
            return
        seq_id = self._schedule.begin(self._context.clock.monotonic())
        taking = group.create_task(take(self._context, self.model_id, seq_id, self._sequencer.slot()), name="snapshot")
        taking.add_done_callback(self._snapshot_taken)

    def _snapshot_taken(self, taking: asyncio.Task[SnapshotTaken | None]) -> None:
        self._schedule.taking = False
        self._saved.set()
        if not taking.cancelled() and taking.exception() is None and (taken := taking.result()) is not None:
            for shown in self.observers:
                shown.log(f"snapshot taken at request {taken.seq_id}: {taken.size_bytes / 2**20:.1f} MiB")

    async def save_now(self) -> None:
        """Take a snapshot, unless the last one holds all; return when it is taken."""
        self._schedule.hurry()
        self._woken.set()
        while (self._schedule.taking or self._schedule.hurried) and not self._paused:
            self._saved.clear()
            await self._saved.wait()

    def look_at_snapshot(self) -> None:
        """Time has passed: a snapshot may be due."""
        if self._schedule.due(self._context.clock.monotonic()):
            self._woken.set()

    def _is_fresh(self, row: Pending) -> bool:
        # Not by the ids in flight: one of them may have been answered since the rows were read. What was answered is
        # asked for only when nothing is in flight.
        if row.seq_id is None:
            return row.id != self._unload  # an unload that failed is asked for again
        return row.answered or row.seq_id > self._taken

    def _detached(self) -> frozenset[str]:
        """The model's saves that are on their way to the store: they hold up nobody."""
        return frozenset(save.request_id for save in self._context.saves.detached(self.model_id))

    async def _ended(self) -> End | None:
        model = await self._context.read(self._context.journal.models.get, self.model_id, None)
        match model.state:
            case ModelState.CREATING | ModelState.LIVE:
                return None
            case ModelState.UNLOADED if self._unload is None:  # from outside, also if we see that before `cancel`
                await self._drop()
                return End(Why.CANCELLED, model.detail or Why.CANCELLED.value)
            case ModelState.UNLOADED:
                return End(Why.DONE, f"unloaded: {model.detail}")
            case _:
                return End(Why.FAILED, f"{model.state}: {model.detail}")

    async def _drop(self) -> None:
        """Free what the model takes in the worker group."""
        if self._context.generation is None:
            return  # it is in none
        try:
            await self._context.send(DropAdapter(self.model_id), Done)
        except GroupFailedError as error:
            log.info("model %s went with its worker group: %s", self.model_id, error)

    async def _execute(self, batch: Batch, group: asyncio.TaskGroup) -> None:
        """Start the operations of a batch, and let people see them."""
        operations = []
        for request in batch.requests:
            await self._room.acquire()
            operations.append(self._begin(request, group))
        for shown in self.observers:
            shown.started(batch, operations)

    def _begin(self, request: Pending, group: asyncio.TaskGroup) -> Operation:
        self._flying.add(request.id)
        if request.seq_id is None:
            self._unload = request.id
        else:
            if not request.answered:  # a paused run stores answered saves before it takes those in front
                self._taken = max(self._taken, request.seq_id)
            self._schedule.went(request.seq_id, step=request.kind == Kind.OPTIM_STEP)
        slot = self._sequencer.slot(request.id if request.kind in SAVES else None)
        execution = Execution(self._context, request, slot, copy=self._copies.pop(request.id, None))
        operation = begin(EXECUTE[request.kind], execution, group)
        if request.kind == Kind.OPTIM_STEP:
            self._steps_made += 1
        operation.answered.add_done_callback(partial(self._answered, request.id))
        if slot.save is not None:
            group.create_task(self._let_go(request.id, slot), name=f"{request.kind} {request.id} is detached")
        return operation

    async def _let_go(self, request_id: str, slot: Slot) -> None:
        """Go on without a save, once it is detached."""
        await slot.released()
        self._landed(request_id)

    def _answered(self, request_id: str, answered: asyncio.Task[Outcome | None]) -> None:
        ended = not answered.cancelled() and answered.exception() is None
        outcome = answered.result() if ended else None
        if ended and outcome is None:
            self._interrupted = True
            self._woken.set()
        self._landed(request_id)
        if outcome is not None and (outcome.seq_id is None or outcome.error is not None):
            self._woken.set()  # the model may have ended

    def _landed(self, request_id: str) -> None:
        """Later requests do not wait for this one any more: it is answered or detached."""
        if request_id not in self._flying:
            return
        self._flying.remove(request_id)
        self._room.release()
        if not self._flying and (self._interrupted or self._look_again):
            self._look_again = False
            self._woken.set()
