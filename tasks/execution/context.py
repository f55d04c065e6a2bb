"""What the operations of one base model work with, handed to them by the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import ParamSpec, Protocol, TypeVar, cast

from tinkerflow.backend.clock import Clock
from tinkerflow.backend.commands import AdapterState, Command, CreateAdapter, Forward, ImportAdapter, OptimStep, Reply
from tinkerflow.backend.journal import AWAY, Journal, Pending
from tinkerflow.backend.model_card import ModelCard
from tinkerflow.backend.retry import retry
from tinkerflow.backend.store import Store
from tinkerflow.tasks.execution.answers import AnswerWriter
from tinkerflow.tasks.execution.save_state import Saves, SaveState
from tinkerflow.tasks.execution.sequencer import Slot
from tinkerflow.tasks.execution.snapshots import Snapshots

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Reply)

log = logging.getLogger(__name__)

_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, *[5.0] * 60)  # seconds: a database may be away for minutes
INLINE_BYTES = 64 * 1024  # decoding so much takes less than a millisecond; a thread's round trip costs a third of one


class Commanded(Protocol):
    """The part of tinkerflow.backend.pool.Pool that operations use."""

    @property
    def generation(self) -> int:
        """The number of the worker group that serves, or served last."""
        ...

    async def serving(self) -> int:
        """Wait until a worker group serves: its number."""
        ...

    async def submit(self, command: Command, deadline: float | None = None, *, generation: int | None = None) -> Reply:
        """Execute after all that were submitted before for the same adapter; the reply, or the executor's error.

        generation: the only group that may execute it; GroupFailedError when it serves no more.
        """
        ...


@dataclass(frozen=True)
class ExecutionContext:
    """One base model: its worker group, what is in it, and the journal, store and clock that all base models share.

    generation: the only worker group that may execute what is sent through this; None: whichever serves.
    """

    journal: Journal
    pool: Commanded
    store: Store
    card: ModelCard
    clock: Clock
    answers: AnswerWriter
    saves: Saves
    snapshots: Snapshots
    generation: int | None = None
    readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="journal"))

    def bound_to(self, generation: int) -> ExecutionContext:
        """The same, for the worker group of this generation alone."""
        return replace(self, generation=generation)

    def send(self, command: Command, reply: type[R]) -> asyncio.Task[R]:
        """Start a command; of one adapter, those started earlier are executed earlier. The task holds its reply."""
        return asyncio.create_task(self._reply(command, reply))

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A journal method, in a thread that only such reads use; again and again while the database is away."""

        def ask() -> Awaitable[T]:
            return asyncio.get_running_loop().run_in_executor(self.readers, lambda: function(*args, **kwargs))

        return await retry(ask, on=AWAY, pauses=_PAUSES, what="the journal cannot be read", log=log)

    async def decode(self, size: int, function: Callable[[], T]) -> T:
        """`function()`, which works on `size` bytes: in a thread when it would hold up the loop."""
        return function() if size <= INLINE_BYTES else await asyncio.to_thread(function)

    def close(self) -> None:
        """End the threads."""
        self.readers.shutdown()

    async def _reply(self, command: Command, kind: type[R]) -> R:
        reply = await self.pool.submit(command, generation=self.generation)
        if not isinstance(reply, kind):
            raise TypeError(f"{type(command).__name__} was answered by {type(reply).__name__}, not {kind.__name__}")
        return cast(R, reply)


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
