"""One operation from its pending request to its answer in the journal, and what operations work with.

A request that ends worker groups is failed by name, instead of being tried for ever. Nothing is written before a
command is sent: when a group ends, the engine notes what it was executing. A group that crashed blames the request; one
that was killed from outside (SIGKILL, SIGSTOP) hardly does, so that takes more. Where several were being executed, as
on GPUs, the first crash may blame the wrong one, and the next group takes them one by one (pool/group.py). A request
for which the devices had no memory left would fail again, so it is not tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import ParamSpec, TypeVar

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core import tracing
from tinkerflow.backend.core.clock import Clock
from tinkerflow.backend.core.errors import (
    AllocationError,
    DeadlineError,
    GroupFailedError,
    StateLostError,
    SuspectError,
    TinkerflowError,
)
from tinkerflow.backend.core.retry import retry
from tinkerflow.backend.journal import (
    AWAY,
    Effect,
    Journal,
    Kind,
    ModelEnded,
    ModelState,
    Outcome,
    Pending,
    SamplerLoaded,
    SamplerOpened,
)
from tinkerflow.backend.pool import Pool
from tinkerflow.backend.spec.commands import (
    AdapterState,
    Command,
    CreateAdapter,
    Forward,
    ImportAdapter,
    OptimStep,
    Reply,
)
from tinkerflow.backend.store import Store
from tinkerflow.tasks.execution.full_model_queue import FullModelQueue
from tinkerflow.tasks.execution.memory_quota import MemoryQuota
from tinkerflow.tasks.execution.sampling_snapshots import Snapshots
from tinkerflow.tasks.execution.sequencer import Saves, SaveState, Slot

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Reply)

log = logging.getLogger(__name__)

READ_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, *[5.0] * 60)  # seconds: a database may be away for minutes
WRITE_PAUSES = tuple(0.05 * 2**n for n in range(8))  # seconds: about 13 s of a database that cannot be reached
MOST_CRASHES = 2  # of worker groups that were executing a request
MOST_DEATHS = 6  # crashes included
_MOST = 64  # outcomes of one transaction
Finish = Callable[[Sequence[Outcome]], object]
INLINE_BYTES = 64 * 1024  # decoding so much takes less than a millisecond; a thread's round trip costs a third of one


@dataclass(frozen=True)
class ExecutionContext:
    """One base model: its worker group, what is in it, and the journal, store and clock that all base models share.

    generation: the only worker group that may execute what is sent through this; None: whichever serves.
    owner: the project whose share of training its commands take; "" where commands serve all projects.
    most_drift: the mean `kl_sample_train` above which a forward_backward is logged, 0 = none. image_memory: quotas for
    images in operations of models. full_models: the queue of samples of full-parameter models.
    """

    journal: Journal
    pool: Pool
    store: Store
    card: ModelCard
    clock: Clock
    answers: AnswerWriter
    saves: Saves
    snapshots: Snapshots
    generation: int | None = None
    owner: str = ""
    most_drift: float = 0.0
    image_memory: MemoryQuota = field(default_factory=MemoryQuota)
    full_models: FullModelQueue = field(default_factory=FullModelQueue)
    readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="journal"))

    def bound_to(self, generation: int, owner: str = "") -> ExecutionContext:
        """The same, for the worker group of this generation alone, with the context that fits its devices."""
        return replace(self, generation=generation, owner=owner, card=self.card.served_by(self.pool.info))

    def send(self, command: Command, reply: type[R]) -> asyncio.Task[R]:
        """Start a command; of one adapter, those started earlier are executed earlier. The task holds its reply."""
        return asyncio.create_task(self._reply(command, reply))

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A journal method, in a thread that only such reads use; again and again while the database is away."""

        def ask() -> Awaitable[T]:
            return asyncio.get_running_loop().run_in_executor(self.readers, lambda: function(*args, **kwargs))

        return await retry(ask, on=AWAY, pauses=READ_PAUSES, what="the journal cannot be read", log=log)

    async def decode(self, size: int, function: Callable[[], T]) -> T:
        """`function()`, which works on `size` bytes: in a thread when it would hold up the loop."""
        return function() if size <= INLINE_BYTES else await asyncio.to_thread(function)

    async def answer(self, outcome: Outcome) -> None:
        """Put an outcome into the journal, and remember the snapshots that its rows name."""
        await self.answers.put(outcome)
        for effect in outcome.effects:
            snapshot = effect.sampler.snapshot_id if isinstance(effect, SamplerOpened) else None
            snapshot = effect.snapshot_id if isinstance(effect, SamplerLoaded) else snapshot
            if snapshot is not None:
                self.snapshots.recorded(snapshot)

    def close(self) -> None:
        """End the threads."""
        self.readers.shutdown()

    async def _reply(self, command: Command, kind: type[R]) -> R:
        reply = await self.pool.submit(command, owner=self.owner, generation=self.generation)
        if not isinstance(reply, kind):
            raise TypeError(f"{type(command).__name__} was answered by {type(reply).__name__}, not {kind.__name__}")
        return reply


# ------------------------------------------------------------------ one operation
@dataclass
class Execution:
    """One operation being executed: what was asked, its place in the order of its model, and what it has done so far.

    copy: the state that a replay has copied for this save. as_of: in a replay, when the request was first answered:
    checkpoints that were saved later do not exist for it. started_at: when its first command was sent. changed: a
    command that changes the model was sent. then: what is left to do after the answer; it returns how the save ended.
    """

    context: ExecutionContext
    request: Pending
    slot: Slot
    copy: AdapterState | None = None
    as_of: datetime | None = None
    started_at: datetime | None = None
    changed: bool = False
    then: Callable[[], Awaitable[SaveState]] | None = None

    @property
    def model_id(self) -> str:
        """The model that the operation is of."""
        return str(self.request.model_id)

    def send(self, command: Command, reply: type[R]) -> asyncio.Task[R]:
        """Start a command of this operation, in its slot. The task holds the reply."""
        self.started_at = self.started_at or self.context.clock.now()
        self.changed |= isinstance(command, CreateAdapter | ImportAdapter | OptimStep) or (
            isinstance(command, Forward) and command.backward
        )
        return self.context.send(command, reply)


Execute = Callable[[Execution], Awaitable[Outcome]]


@dataclass(frozen=True)
class OperationTable:
    """What executes requests. execute: by kind of request. copy_state: copies the model's state for a save."""

    execute: Mapping[Kind, Execute]
    copy_state: Callable[[Execution], Awaitable[AdapterState]]


@dataclass(frozen=True)
class Operation:
    """An operation on its way; `answered` ends with its outcome when that is in the journal, and nothing left to do.

    None: its worker group ended first. It must be begun again.
    """

    request: Pending
    answered: asyncio.Task[Outcome | None]


def begin(execute: Execute, execution: Execution, group: asyncio.TaskGroup) -> Operation:
    """Start an operation with `execute`. Whatever happens to it becomes its outcome, and later operations go on.

    Only an answer that the journal does not take ends `group`.
    """
    request, work = execution.request, _perform(execute, execution)
    if request.trace is not None:
        work = tracing.inside(request.trace, work, request.kind, request_id=request.id, model_id=execution.model_id)
    return Operation(request, group.create_task(work, name=f"{request.kind} {request.id}"))


async def _perform(execute: Execute, execution: Execution) -> Outcome | None:
    """Execute, wait until every earlier operation is answered, answer, and do what is left."""
    request, slot = execution.request, execution.slot
    answered, stored = request.answered, SaveState.LOST
    try:
        try:
            outcome = await execute(execution)
            await slot.predecessors()
        except GroupFailedError as error:
            return await _interrupted(execution, error)
        except Exception as error:  # noqa: BLE001  a failure becomes a stored, named outcome
            try:
                await slot.predecessors()
            except GroupFailedError as interrupted:
                return await _interrupted(execution, interrupted)
            outcome = failure(request, error)
            execution.changed &= not isinstance(error, AllocationError)  # which leaves all as it was
        if not answered:
            replays = outcome.replays or execution.changed
            await execution.context.answer(replace(outcome, replays=replays, started_at=execution.started_at))
            answered = outcome.error is None
        stored = SaveState.FAILED if outcome.error is not None else SaveState.STORED
        if execution.then is not None:
            stored = SaveState.LOST
            try:
                stored = await execution.then()
            except GroupFailedError as error:
                slot.interrupt()
                name = f"{request.kind} {request.id} of {request.model_id}"
                log.info("%s is answered, and was interrupted after that: %s", name, error)
                return None
        return outcome
    finally:
        if slot.save is not None:
            execution.context.saves.end(slot.save, stored, answered=answered)
        await slot.end()


async def _interrupted(execution: Execution, error: GroupFailedError) -> Outcome | None:
    request = execution.request
    execution.slot.interrupt()
    log.info("%s %s of %s is executed again: %s", request.kind, request.id, request.model_id, error)
    blamed = (await attribute_crash(execution.context, [request], error)).get(request.id)
    if blamed is not None:
        await execution.context.answer(blamed)
    return blamed


def failure(request: Pending, error: Exception) -> Outcome:
    """The outcome of a request that ended with `error`, which is logged here and nowhere else.

    Ours speak for themselves. Of others the client gets type and text; the trace is in the log.
    """
    name = f"{request.kind} {request.id}" + (f" of {request.model_id}" if request.model_id else "")
    effects: tuple[Effect, ...] = ()
    if isinstance(error, TinkerflowError):
        level = logging.INFO if error.category == "user" else logging.WARNING
        log.log(level, "%s failed: %s: %s", name, type(error).__name__, error.message)
        if isinstance(error, StateLostError) and request.model_id is not None:
            effects = (ModelEnded(request.model_id, ModelState.LOST, error.message),)
        return request.failed(error, None, *effects)
    log.error("%s failed", name, exc_info=error)
    return request.failed(f"{request.kind} failed in the service ({type(error).__name__}: {error})", "server")


# ------------------------------------------------------------------ requests that end worker groups
async def attribute_crash(
    context: ExecutionContext, executing: Sequence[Pending], error: GroupFailedError
) -> dict[str, Outcome]:
    """Note that the group ended with `error` while it executed these requests.

    Returns, by request id, the failure of every request whose worker groups ended too often.
    """
    if not executing or not isinstance(error, SuspectError | DeadlineError):
        return {}
    crashed = error.crashed if isinstance(error, SuspectError) else True
    by_id = {request.id: request for request in executing}
    counts = await context.read(context.journal.recovery.suspect, sorted(by_id), crashed=crashed)
    failed = {}
    for request_id, (deaths, crashes) in counts.items():
        no_memory = isinstance(error, SuspectError) and error.out_of_memory
        if crashes >= MOST_CRASHES or deaths >= MOST_DEATHS or no_memory:
            request = by_id[request_id]
            text = (
                f"{request.kind} was being executed when a worker group ended, {deaths} times "
                f"({crashes} by a crash): it is not tried again. Last: {error.message}"
            )
            log.error("request %s: %s", request_id, text)
            failed[request_id] = request.failed(text, "server")
    return failed


# ------------------------------------------------------------------ answers on their way into the journal
class AnswerWriter:
    """Writes outcomes in the order of `put`. Its thread is its own: no slow store or decoder delays an answer.

    A write takes about a millisecond; what comes meanwhile shares the next one, so many models cost few transactions.
    """

    def __init__(self, finish: Finish, pauses: Sequence[float] = WRITE_PAUSES) -> None:
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
        """Store all together. When the database refuses the content of one of them, the others must not suffer."""
        together = await self._store([outcome for outcome, _ in batch])
        for outcome, written in batch:
            error = together
            if error is not None and not isinstance(error, AWAY) and len(batch) > 1:
                error = await self._store([outcome])
            if error is not None and not isinstance(error, AWAY):
                log.exception("the answer of request %s cannot be stored", outcome.request_id, exc_info=error)
                text = f"the answer cannot be stored ({type(error).__name__}: {error})"
                error = await self._store([replace(outcome, result=None, error=text, category="server", effects=())])
            if written.done():  # whoever put it was cancelled
                continue
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)

    async def _store(self, outcomes: list[Outcome]) -> Exception | None:
        """Why these cannot be stored; None when they are."""

        def write() -> Awaitable[object]:
            return asyncio.get_running_loop().run_in_executor(self._thread, self._finish, outcomes)

        try:
            await retry(write, on=AWAY, pauses=self._pauses, what="the journal cannot be written", log=log)
        except Exception as error:  # noqa: BLE001  whoever put them decides
            return error
        return None
