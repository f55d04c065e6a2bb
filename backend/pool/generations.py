"""The sequence of worker groups: when a group ends, the next is started."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tinkerflow.backend.core.errors import GroupFailedError, TinkerflowError, UserError
from tinkerflow.backend.core.retry import STEADY_SECONDS, Restarts
from tinkerflow.backend.pool.config import PoolConfig
from tinkerflow.backend.pool.group import Group
from tinkerflow.backend.pool.host.places import Site
from tinkerflow.backend.spec.commands import GroupInfo

log = logging.getLogger(__name__)

T = TypeVar("T")

NOTICE_SECONDS = 20.0  # from a termination notice to the end of the group; clouds give 25 or 30 s
FIRST_STARTS = 3  # attempts before `start` gives up: a free port may be taken before JAX binds it


class PoolState(enum.Enum):
    RESTING = "resting"  # no group is running or wanted
    PAUSING = "pausing"  # the next start is delayed
    STARTING = "starting"
    WAITING = "waiting"  # no hosts have capacity for the processes
    SERVING = "serving"
    DRAINING = "draining"  # the group executes its last work and is then released
    STOPPED = "stopped"


_S = PoolState
_NEXT = {
    _S.RESTING: {_S.RESTING, _S.STARTING, _S.STOPPED},
    _S.PAUSING: {_S.RESTING, _S.STARTING, _S.STOPPED},
    _S.STARTING: {_S.WAITING, _S.SERVING, _S.PAUSING, _S.STOPPED},
    _S.WAITING: {_S.STARTING, _S.PAUSING, _S.STOPPED},
    _S.SERVING: {_S.DRAINING, _S.PAUSING, _S.STOPPED},
    _S.DRAINING: {_S.PAUSING, _S.STOPPED},
    _S.STOPPED: {_S.STOPPED},
}


@dataclass(frozen=True)
class GroupLost:
    """A generation ended, and everything on its devices is lost. cause: names the rank and its fault."""

    generation: int
    cause: str


class HandledEvents(Generic[T]):
    """A queue of events. An event counts as handled when the consumer requests the next one."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T | None] = asyncio.Queue()
        self.is_consumed = False

    def put(self, event: T) -> None:
        self._queue.put_nowait(event)

    def close(self) -> None:
        """End the iteration after the queued events."""
        self._queue.put_nowait(None)

    async def handled(self) -> None:
        """Wait until the consumer has handled all events; return immediately if there is no consumer."""
        if self.is_consumed:
            await self._queue.join()

    async def consume(self) -> AsyncIterator[T]:
        """Yield every event to one consumer until `close`."""
        self.is_consumed = True
        try:
            while (event := await self._queue.get()) is not None:
                try:
                    yield event
                finally:
                    self._queue.task_done()
        finally:  # producers must not wait for a consumer that left
            self.is_consumed = False
            while not self._queue.empty():
                self._queue.get_nowait()
                self._queue.task_done()


class Generations:
    """The generations of one pool.

    info: the description of the newest generation that became ready.
    last_error: the error that ended a generation or prevented its start, most recently.
    start_failure: why the last start on demand failed; "": no failure.
    losses, notices: see Pool.
    """

    def __init__(
        self,
        config: PoolConfig,
        site: Site,
        on_progress: Callable[[str], None],
        on_waiting: Callable[[str], Awaitable[None]],
        on_ready: Callable[[GroupInfo], None],
        *,
        on_demand: bool,
    ) -> None:
        """Nothing starts before `start`. on_ready: called before a group serves. For other arguments see Pool.start."""
        self.info: GroupInfo | None = None
        self.last_error: TinkerflowError | None = None
        self.start_failure = ""
        self.losses: HandledEvents[GroupLost] = HandledEvents()
        self.notices: HandledEvents[str] = HandledEvents()
        self._config = config
        self._site = site
        self._on_progress = on_progress
        self._on_waiting = on_waiting
        self._on_ready = on_ready
        self._on_demand = on_demand
        self._state = PoolState.RESTING
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._group: Group | None = None
        self._number = 0  # the number of the last generation started
        self._failed = 0  # the number of the generation of last_error
        self._probation = 0  # how many commands are sent to the next generation one at a time
        self._restarts = Restarts()
        self._keeper: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ for the pool
    @property
    def state(self) -> PoolState:
        return self._state

    @property
    def is_wanted(self) -> bool:
        """Whether a group should be running."""
        return self._wanted.is_set()

    @property
    def number(self) -> int:
        """The number of the last generation started."""
        return self._number

    @property
    def serving(self) -> Group | None:
        """The group that accepts commands, or None."""
        serves = self._state in (PoolState.SERVING, PoolState.DRAINING)
        return self._group if serves and self._group is not None and self._group.is_ready else None

    def error_of(self, generation: int) -> TinkerflowError | None:
        """The error that ended a generation; None if it has not ended, or if a later generation has ended."""
        if self._group is not None and self._group.generation == generation:
            return self._group.failure
        return self.last_error if self._failed == generation else None

    async def wait_for_serving(self) -> Group:
        """Wait until a group serves, and return it. GroupFailedError: the pool was stopped."""
        while (group := self.serving) is None:
            if self._state is PoolState.STOPPED:
                raise GroupFailedError("the worker pool was stopped")
            self._changed.clear()
            await self._changed.wait()
        return group

    def take_out(self, generation: int, why: str) -> None:
        """See Pool."""
        if (group := self.serving) is not None and group.generation == generation:
            log.error("taking the hosts of worker group %d out of service: %s", generation, why)
            group.take_out(why)

    async def start(self) -> None:
        """Start the first generation, unless groups run on demand. From then on, replace each generation that ends.

        UserError: the executor refused the configuration. GroupFailedError: no group was ready after FIRST_STARTS
        attempts.
        """
        if not self._on_demand:
            self._wanted.set()
        while not self._on_demand and not await self._launch():
            failures = self._restarts.failures + 1
            if failures >= FIRST_STARTS or isinstance(self.last_error, UserError):
                raise self.last_error or GroupFailedError("no worker group started")
            self._enter(PoolState.PAUSING)
            await asyncio.sleep(self._restarts.pause(steady=False))
        self._keeper = asyncio.create_task(self._keep(), name="pool")

    def begin(self) -> None:
        self._wanted.set()

    def drain(self) -> None:
        if self._state is PoolState.SERVING:
            self._enter(PoolState.DRAINING)

    def release(self, cause: str) -> None:
        self.drain()
        self._wanted.clear()
        self._give_notice(cause)

    async def stop(self) -> None:
        """End the group, and wait until all its processes have ended."""
        self._enter(PoolState.STOPPED)
        for task in (self._keeper, self._leaving):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._group is not None:
            self._group.end(GroupFailedError("the worker pool was stopped"))
            await self._group.ended
        self.losses.close()

    # ------------------------------------------------------------------ one generation after the other
    def _enter(self, state: PoolState) -> None:
        assert state in _NEXT[self._state], f"{self._state} to {state}"
        self._state = state
        self._changed.set()

    async def _keep(self) -> None:
        clock, steady = asyncio.get_running_loop().time, True
        while True:
            if self._group is not None:
                began = clock()
                error = await asyncio.shield(self._group.ended)
                if self._leaving is not None:
                    self._leaving.cancel()  # it waits for snapshots of the ended group
                steady = clock() - began > STEADY_SECONDS or not self._group.crashed
                self._probation = self._group.probation_of_next
                self.losses.put(GroupLost(self._group.generation, error.message))
                self._group = None
                self._note_error(error)
            while self._group is None:
                if self._state is not PoolState.RESTING:
                    self._enter(PoolState.PAUSING)
                    await asyncio.sleep(self._restarts.pause(steady=steady))
                if not self._wanted.is_set():
                    self._enter(PoolState.RESTING)
                await self._wanted.wait()
                steady = False
                if not await self._try_launch() and self._on_demand:
                    self.start_failure = str(self.last_error)
                    self._wanted.clear()

    async def _try_launch(self) -> bool:
        try:
            return await self._launch()
        except Exception as error:  # for example, an unreadable file of the base model, which may become readable
            log.exception("worker group %d cannot be started", self._number)
            self._note_error(GroupFailedError(f"worker group {self._number} cannot be started: {error!r}"))
            return False

    async def _launch(self) -> bool:
        """Start the next generation. Returns whether it became ready."""
        self._number += 1
        self._enter(PoolState.STARTING)
        plan = await asyncio.to_thread(self._config.digest)
        await self._wait_for_capacity()
        config, generation = self._config, self._number
        slots = self._site.reserve(config.processes, plan)
        self._on_progress(f"starting worker group {generation}: {config.processes} process(es)")
        group = Group(config, self._site, self._on_progress, generation, self._probation, self._give_notice)
        try:
            info = await group.launch(slots, plan)
        except TinkerflowError as error:
            self._note_error(error)
            log.error("worker group %d did not start: %s", generation, error)
            return False
        self._group = group  # `stop` ends the group from here on
        self._on_ready(info)
        await self.losses.handled()
        if group.is_ready:
            self.info = info
            self.start_failure = ""
            self._enter(PoolState.SERVING)
        return True

    async def _wait_for_capacity(self) -> None:
        """Wait until the site has capacity for all processes. The caller must reserve it before its next await."""
        site, processes, waited = self._site, self._config.processes, False
        while (missing := site.missing(processes)) or waited:
            waited = bool(missing)
            self._enter_if_new(PoolState.WAITING if missing else PoolState.STARTING)
            if missing:
                self._on_progress(missing)
            try:
                await self._on_waiting(missing or f"worker group {self._number} is being started")
            except Exception:
                log.exception("on_waiting failed")
            if missing and missing == site.missing(processes):
                await site.changed()

    def _note_error(self, error: TinkerflowError) -> None:
        self.last_error, self._failed = error, self._number

    def _enter_if_new(self, state: PoolState) -> None:
        if state is not self._state:
            self._enter(state)

    # ------------------------------------------------------------------ an announced end
    def _give_notice(self, cause: str) -> None:
        if self._leaving is None or self._leaving.done():
            self._leaving = asyncio.create_task(self._leave(cause), name="leaving")

    async def _leave(self, cause: str) -> None:
        """End the group after the consumer of the notices has saved the models."""
        log.warning("%s; saving its models first", cause)
        group = self._group
        if group is None:
            return
        if self.notices.is_consumed:
            self.notices.put(cause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NOTICE_SECONDS):
                    await self.notices.handled()
        group.end(GroupFailedError(cause))
