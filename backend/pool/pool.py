"""The pool: one worker group after the other, and the order in which the serving group gets commands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

from tinkerflow.backend.core import tracing
from tinkerflow.backend.core.errors import GroupFailedError, StoreAwayError, SuspectError, TinkerflowError, UserError
from tinkerflow.backend.core.retry import STEADY_SECONDS, Restarts
from tinkerflow.backend.pool.group import Group, PoolConfig
from tinkerflow.backend.pool.host.places import Site
from tinkerflow.backend.pool.scheduler import CommandScheduler, in_parts
from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.commands import Command, FetchState, GroupInfo, Reply, WriteState

log = logging.getLogger(__name__)

NOTICE_SECONDS = 20.0  # from the notice that a group's machine goes until the group is ended; clouds give 25 or 30
DETOUR_SECONDS = 600.0  # that states go through the engine after a process could not reach the store
FIRST_STARTS = 3  # attempts before Pool.start gives up: a port may be taken between probing and binding it


@dataclass(frozen=True)
class GroupLost:
    """A generation ended, and everything on its devices with it; `cause` names the rank and what happened to it."""

    generation: int
    cause: str


class _NotSentError(GroupFailedError):
    """The group ended before the command was sent to it."""


def _quietly(show: Callable[[str], None]) -> Callable[[str], None]:
    """`show`, except that its failure (a closed terminal) is logged and does not end the group."""

    def shown(text: str) -> None:
        try:
            show(text)
        except Exception:
            log.exception("on_progress failed for %r", text)

    return shown


async def _say_nothing(text: str) -> None:
    """Ignore what a generation waits for."""


class Pool:
    """Executes commands in order on a group of worker processes, and replaces the group when it fails.

    Made by `await Pool.start(...)`. Use it from the event loop in which it was started.
    """

    def __init__(
        self,
        config: PoolConfig,
        site: Site,
        on_progress: Callable[[str], None],
        on_waiting: Callable[[str], Awaitable[None]],
    ) -> None:
        """Use `start`, which says what the arguments are."""
        self._config = config
        self._site = site
        self._on_progress = _quietly(on_progress)
        self._on_waiting = on_waiting
        self._scheduler = CommandScheduler(config.chunks_per_microbatch)
        self._group: Group | None = None
        self._info: GroupInfo | None = None
        self._generation = 0
        self._open = False  # whether the group takes commands
        self._opened = asyncio.Event()
        self._wanted = asyncio.Event()  # a generation is to run
        self._on_demand = False
        self.trouble = ""  # why the last start on demand failed, if it did
        self.pausing = False  # the last group ended, or could not be started: the next start is later
        self.lacks_room = False  # a group is to be started, and the site has no room for it
        self.draining = False  # nothing new is to be begun: the group is released when what it executes is done
        self._restarts = Restarts()
        self._probation = 0  # commands that the next generation gets one at a time
        self._last_error: TinkerflowError | None = None
        self._entrance = asyncio.Lock()  # fair: commands that wait for a generation keep their order
        self._losses: asyncio.Queue[GroupLost | None] = asyncio.Queue()
        self._notices: asyncio.Queue[str] = asyncio.Queue()
        self._heeded = False  # somebody reads the notices
        self._leaving: asyncio.Task[None] | None = None
        self._detour_until = 0.0  # processes do not reach the store before
        self._keeper: asyncio.Task[None] | None = None
        self._stopped = self._consumed = False

    @classmethod
    async def start(
        cls,
        config: PoolConfig,
        site: Site,
        *,
        on_progress: Callable[[str], None],
        on_waiting: Callable[[str], Awaitable[None]] = _say_nothing,
        on_demand: bool = False,
    ) -> Pool:
        """A pool whose first generation is ready to serve.

        config: what all generations have in common.
        site: where processes are started: `ThisMachine`, or the `Hosts` that joined. The start, and the start of each
        later generation, waits until the site has room.
        on_progress: called in this event loop with lines for people: what the start-up or a long command is doing.
        on_waiting: told what a generation waits for before its processes can be started, and when it waits no more.
        on_demand: no group runs before `begin`, and none after `release` or a start that failed, until `begin` again.
        On ThisMachine, call it in a thread that lives as long as the pool: the kernel ends the workers with the thread.
        Raises UserError when the executor refuses the configuration, GroupFailedError when no group came up in three
        attempts.
        """
        pool = cls(config, site, on_progress, on_waiting)
        pool._on_demand = on_demand
        if not on_demand:
            pool._wanted.set()
        while not on_demand and not await pool._launch():
            failures = pool._restarts.failures + 1
            if failures >= FIRST_STARTS or isinstance(pool._last_error, UserError):
                raise pool._last_error or GroupFailedError("no worker group came up")
            await asyncio.sleep(pool._restarts.pause(steady=False))
        pool._keeper = asyncio.get_running_loop().create_task(pool._keep(), name="pool")
        return pool

    def begin(self) -> None:
        """Have a group started, and others when that fails."""
        self._wanted.set()

    def release(self, cause: str) -> None:
        """End the group that serves, as after a notice, and start none until `begin`. It takes nothing new."""
        self.draining = True
        self._wanted.clear()
        self._noticed(cause)

    @property
    def ending(self) -> bool:
        """Whether the group that serves is to be released, or is being released."""
        return self.draining or not self._wanted.is_set()

    @property
    def resting(self) -> bool:
        """Whether no group runs or is being started, and none will be before `begin`."""
        return not self._wanted.is_set() and self._group is None

    @property
    def info(self) -> GroupInfo:
        """What the newest generation said of itself when it was ready."""
        if self._info is None:
            raise GroupFailedError("no worker group has been ready yet")
        return self._info

    @property
    def generation(self) -> int:
        """The number of the generation that serves, or that served last: 1, 2, …"""
        return self.info.generation

    @property
    def ready(self) -> bool:
        """Whether a generation serves at this moment."""
        return self._serving() is not None

    @property
    def reaches_store(self) -> bool:
        """Whether the processes of the newest generation read and write states themselves (`transfer`).

        False for DETOUR_SECONDS after one of them could not: until then, states go through us.
        """
        return self.info.reaches_store and asyncio.get_running_loop().time() >= self._detour_until

    @property
    def bytes_sent(self) -> int:
        """How many bytes went to the processes of the serving generation."""
        group = self._serving()
        return group.bytes_sent if group else 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the serving workers, by rank; empty while none serve."""
        group = self._serving()
        return group.pids if group else ()

    async def serving(self) -> int:
        """Wait until a generation serves: its number. GroupFailedError when the pool is stopped."""
        while (group := self._serving()) is None:
            if self._stopped:
                raise GroupFailedError("the worker pool was stopped")
            self._opened.clear()
            await self._opened.wait()
        return group.generation

    async def submit(
        self, command: Command, deadline: float | None = None, *, owner: str = "", generation: int | None = None
    ) -> Reply:
        """Execute `command` after all commands of its adapter that were submitted before it: rank 0's reply.

        The scheduler decides when the command is sent. A Forward of many micro-batches is sent as one part for each.

        command: do not change its arrays before it is answered.
        deadline: seconds from when the commands before it were answered; None = the pool's command_deadline.
        owner: the project that a command about an adapter belongs to. Projects share the devices equally.
        generation: the only group that may execute it, because the group holds what the command is about. None: the
        group that serves now, or the next one, for which the command waits start_deadline seconds at most.
        Raises the executor's error when the client has to know it (UserError, NotFoundError, ConflictError,
        StateLostError, StoreError), and ServerError for any other exception in the executor; DeadlineError when this
        command missed its deadline; SuspectError when the group ended while executing it, and any other
        GroupFailedError when the group ended before; TypeError or ValueError, with nothing sent, when the command
        cannot be encoded. Cancelling the caller leaves the command running.
        """
        seconds = self._config.command_deadline if deadline is None else deadline
        if generation is not None:
            return await self._execute(command, seconds, owner, generation)
        while True:
            with contextlib.suppress(_NotSentError):
                return await self._execute(command, seconds, owner, await self._next_to_serve())

    async def transfer(self, job: FetchState | WriteState, *, generation: int | None = None) -> Mapping[str, Digest]:
        """Have every process read or write its part of a state in the store, beside its commands: the files written.

        Only when `reaches_store`. generation: the only group that may do it; None: the one that serves now.
        Raises the error of a process, StoreAwayError when they take longer than a command may, and GroupFailedError
        when the group ends or serves no more.
        """
        group = self._serving()
        if group is None or generation not in (None, group.generation):
            raise GroupFailedError(f"worker group {generation or self._generation} serves no more")
        seconds = self._config.command_deadline
        try:
            async with asyncio.timeout(seconds):
                return await group.transfer(job)
        except (TimeoutError, StoreAwayError) as error:
            self._detour_until = asyncio.get_running_loop().time() + DETOUR_SECONDS
            if isinstance(error, StoreAwayError):
                raise
            raise StoreAwayError(f"{type(job).__name__} took longer than {seconds:g} s") from None

    async def _execute(self, command: Command, seconds: float, owner: str, generation: int) -> Reply:
        parent = tracing.current.get()  # the scheduler sends from elsewhere
        parts = in_parts(command, self._scheduler.microbatch, self.info.fsdp, self.info.attention_tokens)
        if len(parts) == 1:
            send_all = partial(self._send, generation, command, seconds, parent)
            return await self._scheduler.submit(command, send_all, owner)
        sent: list[asyncio.Future[Reply]] = []

        def send(part: Command) -> asyncio.Future[Reply]:
            for earlier in sent:
                if earlier.done():
                    earlier.result()  # nothing follows a part that has failed
            sent.append(self._send(generation, part, seconds, parent))
            return sent[-1]

        waiting = [self._scheduler.submit(part, partial(send, part), owner) for part in parts]
        replies = await asyncio.gather(*waiting, return_exceptions=True)
        failed = [reply for reply in replies if isinstance(reply, BaseException)]
        if failed:  # the group may have ended while it executed another part than the first that has failed
            raise min(
                failed, key=lambda error: isinstance(error, GroupFailedError) and not isinstance(error, SuspectError)
            )
        return waiting[-1].result()

    def _send(self, generation: int, command: Command, deadline: float, parent: str | None) -> asyncio.Future[Reply]:
        group = self._serving()
        if group is None or group.generation != generation:
            why = "" if self._last_error is None else f": {self._last_error}"
            raise _NotSentError(f"worker group {generation} serves no more{why}")
        return group.submit(command, deadline, parent)

    async def _next_to_serve(self) -> int:
        try:
            async with asyncio.timeout(self._config.start_deadline), self._entrance:
                return await self.serving()
        except TimeoutError:
            why = f": {self._last_error}" if self._last_error else ""
            seconds = self._config.start_deadline
            raise GroupFailedError(f"no worker group was ready within {seconds:g} s{why}") from None

    async def losses(self) -> AsyncIterator[GroupLost]:
        """Every generation that ends, as soon as it does; for one consumer. Ends when the pool is stopped.

        The next generation takes commands only after the consumer has come back for the next item, so state that the
        loop's body marks as lost cannot belong to the new generation. Begin before the first command that matters.
        """
        self._consumed = True
        try:
            while (lost := await self._losses.get()) is not None:
                try:
                    yield lost
                finally:
                    self._losses.task_done()
        finally:  # nobody waits for a consumer that left
            self._consumed = False
            while not self._losses.empty():
                self._losses.get_nowait()
                self._losses.task_done()

    async def notices(self) -> AsyncIterator[str]:
        """Why the serving group is about to end, as when its machine is taken away; for one consumer.

        The group is ended when the consumer has come back for the next notice, or after NOTICE_SECONDS.
        """
        self._heeded = True
        try:
            while True:
                cause = await self._notices.get()
                try:
                    yield cause
                finally:
                    self._notices.task_done()
        finally:
            self._heeded = False

    def _noticed(self, cause: str) -> None:
        if self._leaving is None or self._leaving.done():
            self._leaving = asyncio.get_running_loop().create_task(self._leave(cause), name="leaving")

    async def _leave(self, cause: str) -> None:
        log.warning("%s; what is on its devices is saved first", cause)
        group = self._group
        if self._heeded and group is not None:
            self._notices.put_nowait(cause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NOTICE_SECONDS):
                    await self._notices.join()
        if group is not None:
            group.end(GroupFailedError(cause))

    async def stop(self) -> None:
        """End all workers, fail everything outstanding with GroupFailedError, and return when no process is left."""
        self._stopped = True
        self._opened.set()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._leaving is not None:
            self._leaving.cancel()
        if self._group is not None:
            self._group.end(GroupFailedError("the worker pool was stopped"))
            await self._group.ended
        self._losses.put_nowait(None)

    async def __aenter__(self) -> Self:
        """The pool itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the pool."""
        await self.stop()

    # ------------------------------------------------------------------ one generation after the other
    def _serving(self) -> Group | None:
        return self._group if self._open and self._group is not None and self._group.failure is None else None

    async def _keep(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            steady = True
            if self._group is not None:
                began = clock()
                error = await asyncio.shield(self._group.ended)
                steady = clock() - began > STEADY_SECONDS or not self._group.crashed
                self._probation = self._group.probation_of_next
                self._losses.put_nowait(GroupLost(self._group.generation, error.message))
                self._last_error = error
                self._group, self.draining = None, False
            while True:
                self.pausing = True
                await asyncio.sleep(self._restarts.pause(steady=steady))
                self.pausing = False
                await self._wanted.wait()
                steady = False
                try:
                    if await self._launch():
                        break
                except Exception as error:  # for example the base model's files cannot be read: they may come back
                    log.exception("worker group %d cannot be started", self._generation)
                    self._last_error = GroupFailedError(f"worker group {self._generation} cannot be started: {error!r}")
                if self._on_demand:
                    self.trouble = str(self._last_error)
                    self._wanted.clear()

    async def _launch(self) -> bool:
        """Start the next generation; whether it stands."""
        self._generation += 1
        self._open = False
        plan = await asyncio.to_thread(self._config.digest)
        await self._wait_for_room()
        config, generation = self._config, self._generation
        places = self._site.take(config.processes, plan)
        self._on_progress(f"starting worker group {generation}: {config.processes} process(es)")
        group = Group(config, self._site, self._on_progress, generation, self._probation, self._noticed)
        try:
            info = await group.launch(places, plan)
        except TinkerflowError as error:
            self._last_error = error
            log.error("worker group %d did not start: %s", generation, error)
            return False
        self._group = group  # from here on stop() ends it
        self._scheduler.serve(info)
        if self._consumed:
            await self._losses.join()
        if group.failure is None:
            self._info = info
            self._open = True
            self.trouble = ""
            self._opened.set()
        return True

    async def _wait_for_room(self) -> None:
        """Return when the site has room for all processes; until the next await nobody else takes it."""
        site, processes, waited = self._site, self._config.processes, False
        while (lack := site.lack(processes)) or waited:
            waited = self.lacks_room = bool(lack)
            if lack:
                self._on_progress(lack)
            try:
                await self._on_waiting(lack or f"worker group {self._generation} is being started")
            except Exception:
                log.exception("on_waiting failed")
            if lack and lack == site.lack(processes):
                await site.changed()
