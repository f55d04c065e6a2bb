"""One operation from its pending request to its answer in the journal, and the context that operations share.

A request that repeatedly ends worker groups fails with an error that names it. When a group ends, the engine counts
that against each request that the group was executing. Nothing is written before a command is sent. A crash counts more
than a kill from outside (SIGKILL, SIGSTOP), which a request rarely causes. GPUs execute several requests at a time, so
the first crash may blame the wrong request. The next group executes these requests one by one (pool/group.py). A
request that exceeded the memory of the devices would fail again, so it is not retried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal, ParamSpec, TypeVar

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
from tinkerflow.backend.core.single_flight import SingleFlight
from tinkerflow.backend.core.threads import FairThreads
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
from tinkerflow.backend.spec.drift import UNLIMITED, DriftLimits
from tinkerflow.backend.store import Store
from tinkerflow.tasks.execution.full_model_queue import FullModelQueue
from tinkerflow.tasks.execution.memory_quota import MemoryQuota
from tinkerflow.tasks.execution.sampling_snapshots import Snapshots
from tinkerflow.tasks.execution.sequencer import Saves, SaveState, Slot

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Reply)

log = logging.getLogger(__name__)

READ_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, *[5.0] * 60)  # in seconds: a database may be away for minutes
WRITE_PAUSES = tuple(0.05 * 2**n for n in range(8))  # in seconds: about 13 s in all without a database
MOST_CRASHES = 2  # ended worker groups that were executing a request
MOST_DEATHS = 6  # ended groups, crashes included
_MOST = 64  # outcomes in one transaction
Finish = Callable[[Sequence[Outcome]], object]
_DECODERS = 4  # threads; one project uses at most half of them
_STORE_CALLS = 32  # likewise
INLINE_BYTES = 64 * 1024  # decoded in less than 1 ms; a thread's round trip takes a third of that


@dataclass(frozen=True)
class ExecutionContext:
    """One base model: its worker group, its saves and snapshots, and the journal, store and clock of all base models.

    generation: the only worker group that may execute these commands; None for any serving group.
    owner: the project whose share of training and of store calls is charged; "" if the commands serve all projects.
    drift_limits: limits of `DRIFT_FIGURES`; a forward_backward that reaches one is logged. recheck_share: the share of
    intervals between snapshots that are executed a second time (recheck.py). max_stored_bytes: the quota of a
    project that requests a fork, 0 for none. inflight_kv_cache, prefill_answers, routing_replay, support_replay: see
    the settings.
    image_memory: quotas for images in operations of models. full_models: the queue of samples of full-parameter models.
    forks: the forks in progress, by path. Each returns the last request in it.
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
    drift_limits: DriftLimits = UNLIMITED
    recheck_share: float = 0.0
    max_stored_bytes: int = 0
    inflight_kv_cache: Literal["keep", "recompute"] = "keep"
    prefill_answers: bool = True
    routing_replay: bool = False
    support_replay: bool = False
    image_memory: MemoryQuota = field(default_factory=MemoryQuota)
    full_models: FullModelQueue = field(default_factory=FullModelQueue)
    forks: SingleFlight[int] = field(default_factory=SingleFlight)
    readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="journal"))
    storing: FairThreads = field(default_factory=lambda: FairThreads("store", _STORE_CALLS))
    decoders: FairThreads = field(default_factory=lambda: FairThreads("decode", _DECODERS))

    def bound_to(self, generation: int, owner: str = "") -> ExecutionContext:
        """A copy for only the worker group of this generation, with the context length that fits its devices."""
        return replace(self, generation=generation, owner=owner, card=self.card.served_by(self.pool.info))

    def send(self, command: Command, reply: type[R]) -> asyncio.Task[R]:
        """Start a command. Commands of one adapter are executed in call order. The task returns the reply."""
        return asyncio.create_task(self._reply(command, reply))

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a journal method in a thread reserved for reads. Retries while the database cannot be reached."""

        def ask() -> Awaitable[T]:
            return asyncio.get_running_loop().run_in_executor(self.readers, lambda: function(*args, **kwargs))

        return await retry(ask, on=AWAY, pauses=READ_PAUSES, what="the journal cannot be read", log=log)

    async def in_store(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the store in a thread of the context's project, because it may block for long."""
        return await self.storing.run(self.owner, function, *args, **kwargs)

    async def decode(self, owner: str, size: int, function: Callable[[], T]) -> T:
        """Call `function`, which processes `size` bytes of a project, in a thread if it would block the event loop."""
        return function() if size <= INLINE_BYTES else await self.decoders.run(owner, function)

    async def answer(self, outcome: Outcome) -> None:
        """Write an outcome to the journal, and remember the snapshots that its rows name."""
        await self.answers.put(outcome)
        for effect in outcome.effects:
            snapshot = effect.sampler.snapshot_id if isinstance(effect, SamplerOpened) else None
            snapshot = effect.snapshot_id if isinstance(effect, SamplerLoaded) else snapshot
            if snapshot is not None:
                self.snapshots.recorded(snapshot)

    def close(self) -> None:
        """End the threads."""
        self.readers.shutdown()
        self.storing.close(wait=False)
        self.decoders.close()

    async def _reply(self, command: Command, kind: type[R]) -> R:
        reply = await self.pool.submit(command, owner=self.owner, generation=self.generation)
        if not isinstance(reply, kind):
            raise TypeError(f"{type(command).__name__} was answered by {type(reply).__name__}, not {kind.__name__}")
        return reply


# ------------------------------------------------------------------ one operation
@dataclass
class Execution:
    """One operation that is being executed: its request, its place in the order of its model, and its progress.

    copy: the state that a replay has copied for this save. as_of: in a replay, when the request was first answered;
    checkpoints that were saved later are ignored. fork: in a fork, the adapter that gets the commands instead of the
    model's. started_at: when its first command was sent. changed: whether a command that changes the model was sent.
    then: called after the answer; returns the final state of the save.
    """

    context: ExecutionContext
    request: Pending
    slot: Slot
    copy: AdapterState | None = None
    as_of: datetime | None = None
    fork: str | None = None
    started_at: datetime | None = None
    changed: bool = False
    then: Callable[[], Awaitable[SaveState]] | None = None

    @property
    def model_id(self) -> str:
        """The operation's model."""
        return str(self.request.model_id)

    @property
    def adapter_id(self) -> str:
        """The adapter of the operation's commands: the model, or its fork."""
        return self.fork or self.model_id

    def send(self, command: Command, reply: type[R]) -> asyncio.Task[R]:
        """Start a command of this operation, in its slot. The task returns the reply."""
        self.started_at = self.started_at or self.context.clock.now()
        self.changed |= isinstance(command, CreateAdapter | ImportAdapter | OptimStep) or (
            isinstance(command, Forward) and command.backward
        )
        return self.context.send(command, reply)


Execute = Callable[[Execution], Awaitable[Outcome]]


@dataclass(frozen=True)
class OperationTable:
    """The functions that execute requests. execute: by kind of request. copy_state: copies a model's state to save."""

    execute: Mapping[Kind, Execute]
    copy_state: Callable[[Execution], Awaitable[AdapterState]]


@dataclass(frozen=True)
class Operation:
    """An operation in flight.

    answered: returns the outcome once it is in the journal and the operation is finished. It returns None if the worker
    group ended first. The operation must then start again.
    """

    request: Pending
    answered: asyncio.Task[Outcome | None]


def begin(execute: Execute, execution: Execution, group: asyncio.TaskGroup) -> Operation:
    """Start an operation with `execute`. Any error becomes its outcome, and later operations continue.

    `group` ends only if the journal refuses the answer.
    """
    request, work = execution.request, _perform(execute, execution)
    if request.trace is not None:
        work = tracing.inside(request.trace, work, request.kind, request_id=request.id, model_id=execution.model_id)
    return Operation(request, group.create_task(work, name=f"{request.kind} {request.id}"))


async def _perform(execute: Execute, execution: Execution) -> Outcome | None:
    """Execute the operation, wait until every earlier one is answered, answer it, and call `execution.then`."""
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
            execution.changed &= not isinstance(error, AllocationError)  # an AllocationError changes nothing
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
                log.info("%s was interrupted after its answer: %s", name, error)
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
    """The outcome of a request that ended with `error`. The error is logged here and nowhere else.

    The client gets the message of a TinkerflowError, or the type and text of any other error, whose trace is logged.
    """
    name = f"{request.kind} {request.id}" + (f" of {request.model_id}" if request.model_id else "")
    effects: tuple[Effect, ...] = ()
    if isinstance(error, TinkerflowError):
        level = logging.INFO if error.category == "user" else logging.ERROR
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

    Returns the failure of every request that ended too many worker groups, by request id.
    """
    if not executing or not isinstance(error, SuspectError | DeadlineError):
        return {}
    crashed = error.crashed if isinstance(error, SuspectError) else True
    by_id = {request.id: request for request in executing}
    known = await context.read(context.journal.recovery.suspects, sorted(by_id))
    counts = {request_id: (deaths + 1, crashes + crashed) for request_id, (deaths, crashes) in known.items()}
    await context.read(context.journal.recovery.suspect, counts)
    failed = {}
    for request_id, (deaths, crashes) in counts.items():
        no_memory = isinstance(error, SuspectError) and error.out_of_memory
        if crashes >= MOST_CRASHES or deaths >= MOST_DEATHS or no_memory:
            request = by_id[request_id]
            text = (
                f"{request.kind} was being executed when a worker group ended, {deaths} times "
                f"({crashes} by a crash), and is not retried. Last error: {error.message}"
            )
            log.error("request %s: %s", request_id, text)
            failed[request_id] = request.failed(text, "server")
    return failed


# ------------------------------------------------------------------ answers on their way into the journal
class AnswerWriter:
    """Writes outcomes in the order of `put`, in its own thread, so that no slow store or decoder delays an answer.

    A write takes about a millisecond. Outcomes that arrive during a write share the next transaction.
    """

    def __init__(self, finish: Finish, pauses: Sequence[float] = WRITE_PAUSES) -> None:
        """finish: Journal.finish. pauses: seconds between attempts to write while the database is away."""
        self._finish = finish
        self._pauses = pauses
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._line: list[tuple[Outcome, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def put(self, outcome: Outcome) -> None:
        """Write the outcome, and return once it is in the journal. Raises one of AWAY if the database stays away."""
        written = asyncio.get_running_loop().create_future()
        self._line.append((outcome, written))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="answers")
        await written

    async def close(self) -> None:
        """Write the waiting outcomes, and end the thread."""
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
        """Store all outcomes in one transaction. If the database rejects one outcome, store each separately."""
        together = await self._store([outcome for outcome, _ in batch])
        for outcome, written in batch:
            error = together
            if error is not None and not isinstance(error, AWAY) and len(batch) > 1:
                error = await self._store([outcome])
            if error is not None and not isinstance(error, AWAY):
                log.exception("the answer of request %s cannot be stored", outcome.request_id, exc_info=error)
                text = f"the answer cannot be stored ({type(error).__name__}: {error})"
                category = error.category if isinstance(error, TinkerflowError) else "server"
                error = await self._store([replace(outcome, result=None, error=text, category=category, effects=())])
            if written.done():  # the caller of `put` was cancelled
                continue
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)

    async def _store(self, outcomes: list[Outcome]) -> Exception | None:
        """Store these outcomes. Returns the error if that fails."""

        def write() -> Awaitable[object]:
            return asyncio.get_running_loop().run_in_executor(self._thread, self._finish, outcomes)

        try:
            await retry(write, on=AWAY, pauses=self._pauses, what="the journal cannot be written", log=log)
        except Exception as error:  # noqa: BLE001  the caller handles it
            return error
        return None
