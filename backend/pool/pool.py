"""The pool: one worker group after the other, and commands that find their way to the one that serves."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from tinkerflow.backend.commands import Command, GroupConfig, GroupInfo, Reply
from tinkerflow.backend.errors import GroupFailedError, TinkerflowError, UserError
from tinkerflow.backend.pool.group import Group, Plan
from tinkerflow.backend.pool.host.places import Site, ThisMachine
from tinkerflow.backend.pool.scheduler import Scheduler, in_parts
from tinkerflow.backend.retry import backoff

log = logging.getLogger(__name__)

FIRST_STARTS = 3  # attempts before Pool.start gives up: a port may be taken between probing and binding it
_STEADY_SECONDS = 60.0  # a generation that served this long ends a row of failures


@dataclass(frozen=True)
class GroupLost:
    """A generation ended, and everything on its devices with it; `cause` names the rank and what happened to it."""

    generation: int
    cause: str


@dataclass(frozen=True, eq=False)
class _Ticket:
    """A command waiting for a generation; `sent` resolves to the future of its reply."""

    command: Command
    deadline: float
    sent: asyncio.Future[asyncio.Future[Reply]]


def _send(group: Group, ticket: _Ticket) -> None:
    try:
        ticket.sent.set_result(group.submit(ticket.command, ticket.deadline))
    except (TypeError, ValueError, MemoryError) as error:  # it cannot be encoded
        ticket.sent.set_exception(error)


def _quietly(show: Callable[[str], None]) -> Callable[[str], None]:
    """`show`, such that its failure (a closed terminal) is logged and does not end the group."""

    def shown(text: str) -> None:
        try:
            show(text)
        except Exception:
            log.exception("on_progress failed for %r", text)

    return shown


async def _say_nothing(text: str) -> None:
    """Nobody wants to know."""


class Pool:
    """Executes commands in order on a group of worker processes, and replaces the group when it fails.

    Made by `await Pool.start(...)`. Use it from the event loop in which it was started.
    """

    def __init__(
        self, plan: Plan, command_deadline: float, on_waiting: Callable[[str], Awaitable[None]], sharing: Scheduler
    ) -> None:
        """Use `start`."""
        self._plan = plan
        self._scheduler = sharing
        self._on_waiting = on_waiting
        self._command_deadline = command_deadline
        self._group: Group | None = None
        self._info: GroupInfo | None = None
        self._generation = 0
        self._open = False  # whether the group takes commands
        self._opened = asyncio.Event()
        self._failures = 0
        self._care = 0  # of the next generation
        self._last_error: TinkerflowError | None = None
        self._line: deque[_Ticket] = deque()
        self._losses: asyncio.Queue[GroupLost | None] = asyncio.Queue()
        self._consumed = False
        self._keeper: asyncio.Task[None] | None = None
        self._stopped = False

    @classmethod
    async def start(
        cls,
        config: GroupConfig,
        *,
        processes: int,
        command_deadline: float,
        start_deadline: float,
        on_progress: Callable[[str], None],
        executor: str = "tinkerflow.backend.compute.executor:Executor",
        log_dir: Path | None = None,
        heartbeat_timeout: float = 30.0,
        site: Site | None = None,
        on_waiting: Callable[[str], Awaitable[None]] = _say_nothing,
        chunks_per_microbatch: float = 1.0,
    ) -> Pool:
        """A pool whose first generation is ready to serve.

        config: what every process is told; its devices are divided evenly among the `processes`.
        command_deadline, start_deadline: seconds a command, or the start of a group, may take.
        on_progress: called in this event loop with lines for people: what the start-up or a long command is doing.
        executor: "module:attribute" of the class that each worker runs (tinkerflow.backend.pool.worker.Executor).
        log_dir: where workers append worker-<rank>.log; None = to our stderr. Hosts that joined have their own.
        heartbeat_timeout: seconds without a sign of life after which a process counts as stopped.
        site: where processes are started; None: as children of this one. It may have room for them only later: the
        start, and each later generation, waits for it.
        chunks_per_microbatch: steps of the sampler for each micro-batch of training, while both wait (sharing.py).
        on_waiting: told what a generation waits for before its processes can be started, and when it waits no more.
        Without a site, call it in a thread that lives as long as the pool: the kernel ends the workers with it.
        Raises ValueError for a mesh that cannot be divided, UserError when the executor refuses the configuration,
        GroupFailedError when no group came up in three attempts.
        """
        if processes < 1 or config.devices % processes:
            raise ValueError(
                f"a mesh of fsdp {config.fsdp} x expert {config.expert} x tensor {config.tensor} cannot be divided "
                f"among {processes} processes: their number must divide the number of devices"
            )
        where = site or ThisMachine(log_dir)
        plan = Plan(config, processes, executor, start_deadline, heartbeat_timeout, where, _quietly(on_progress))
        pool = cls(plan, command_deadline, on_waiting, Scheduler(chunks_per_microbatch))
        while not await pool._launch():
            if pool._failures >= FIRST_STARTS or isinstance(pool._last_error, UserError):
                raise pool._last_error or GroupFailedError("no worker group came up")
            await asyncio.sleep(backoff(pool._failures))
        pool._keeper = asyncio.get_running_loop().create_task(pool._keep(), name="pool")
        return pool

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

    async def submit(self, command: Command, deadline: float | None = None, *, generation: int | None = None) -> Reply:
        """Execute `command` after all of its adapter that were submitted before it, and return rank 0's reply.

        When its turn comes, says sharing.py; a Forward of many micro-batches has a turn for each when its generation
        is named.

        deadline: seconds from when the commands before it were answered; None = the pool's command_deadline.
        generation: the only one that may execute it, because it holds what the command is about; GroupFailedError when
        it does not serve any more. None: while no generation serves, the command waits for the next one,
        start_deadline seconds at most.
        Raises what the executor raised, when that is an error for the client (UserError, NotFoundError, ConflictError,
        StateLostError, StoreError); ServerError for any other exception in the executor; DeadlineError when this
        command missed its deadline; SuspectError when the group ended while executing it, and any other
        GroupFailedError when it ended before; TypeError or
        ValueError, with nothing sent, when the command holds what cannot be encoded.
        Cancelling the caller leaves the command running. Do not change the command's arrays before it is answered.
        """
        seconds = self._command_deadline if deadline is None else deadline
        if generation is None:
            return await self._scheduler.submit(command, partial(self._send, command, seconds))
        parts = in_parts(command, self._scheduler.microbatch, self._plan.config.fsdp)
        if len(parts) == 1:
            return await self._scheduler.submit(command, partial(self._send_to, generation, command, seconds))
        sent: list[asyncio.Future[Reply]] = []

        def send(part: Command) -> asyncio.Future[Reply]:
            for earlier in sent:
                if earlier.done():
                    earlier.result()  # nothing follows a part that has failed
            sent.append(self._send_to(generation, part, seconds))
            return sent[-1]

        waiting = [self._scheduler.submit(part, partial(send, part)) for part in parts]
        replies = await asyncio.gather(*waiting, return_exceptions=True)
        failed = [reply for reply in replies if isinstance(reply, BaseException)]
        if failed:  # the group may have ended while it executed another part than the first that has failed
            raise min(failed, key=lambda error: type(error) is GroupFailedError)
        return waiting[-1].result()

    def _send_to(self, generation: int, command: Command, deadline: float) -> asyncio.Future[Reply]:
        group = self._serving()
        if group is None or group.generation != generation:
            why = "" if self._last_error is None else f": {self._last_error}"
            raise GroupFailedError(f"worker group {generation} serves no more{why}")
        return group.submit(command, deadline)

    def _send(self, command: Command, deadline: float) -> asyncio.Future[Reply]:
        group = self._serving()
        if group is not None and not self._line:
            return group.submit(command, deadline)
        if self._stopped:
            raise GroupFailedError("the worker pool was stopped")
        ticket = _Ticket(command, deadline, asyncio.get_running_loop().create_future())
        self._line.append(ticket)
        return asyncio.ensure_future(self._wait_in_line(ticket))

    async def losses(self) -> AsyncIterator[GroupLost]:
        """Every generation that ends, at once; for one consumer. Ends when the pool is stopped.

        The next generation takes commands only after the consumer has come back for the next item, so whatever the
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

    async def stop(self) -> None:
        """End all workers, fail everything outstanding with GroupFailedError, and return when no process is left."""
        self._stopped = True
        self._opened.set()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._group is not None:
            self._group.end(GroupFailedError("the worker pool was stopped"))
            await self._group.ended
        for ticket in self._line:
            if not ticket.sent.done():
                ticket.sent.set_exception(GroupFailedError("the worker pool was stopped"))
        self._losses.put_nowait(None)

    async def __aenter__(self) -> Self:
        """The pool itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the pool."""
        await self.stop()

    # ------------------------------------------------------------------ one generation after the other
    def _serving(self) -> Group | None:
        return self._group if self._open and self._group is not None and self._group.failure is None else None

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            assert self._group is not None
            since = loop.time()
            error = await asyncio.shield(self._group.ended)
            steady = loop.time() - since > _STEADY_SECONDS or not self._group.crashed  # killed: not its fault
            self._failures = 1 if steady else self._failures + 1
            self._care = self._group.care
            self._losses.put_nowait(GroupLost(self._group.generation, error.message))
            self._last_error = error
            self._group = None
            while True:
                await asyncio.sleep(backoff(self._failures))
                try:
                    if await self._launch():
                        break
                except Exception as error:  # the files of the base model cannot be read, say: they may come back
                    log.exception("worker group %d cannot be started", self._generation)
                    self._failures += 1
                    self._last_error = GroupFailedError(f"worker group {self._generation} cannot be started: {error!r}")

    async def _launch(self) -> bool:
        """Start the next generation and, when it stands, give it the commands that wait in line."""
        self._generation += 1
        self._open = False
        await self._wait_for_room()
        places = self._plan.site.take(self._plan.processes, self._plan.digest)
        self._plan.on_progress(f"starting worker group {self._generation}: {self._plan.processes} process(es)")
        try:
            group, info = await Group.launch(self._plan, self._generation, places, self._care)
        except TinkerflowError as error:
            self._failures += 1
            self._last_error = error
            log.error("worker group %d did not start: %s", self._generation, error)
            return False
        self._group = group  # from here on stop() ends it
        self._scheduler.microbatch = info.microbatch_tokens
        if self._consumed:
            await self._losses.join()
        if group.failure is None:
            self._info = info
            self._open = True
            self._opened.set()
            while self._line:
                ticket = self._line.popleft()
                if not ticket.sent.done():
                    _send(group, ticket)
        return True

    async def _wait_for_room(self) -> None:
        """Return when the site has room for all processes; until the next await nobody else takes it."""
        site, waited = self._plan.site, False
        while (lack := site.lack(self._plan.processes)) or waited:
            waited = bool(lack)
            if lack:
                self._plan.on_progress(lack)
            try:
                await self._on_waiting(lack or f"worker group {self._generation} is being started")
            except Exception:
                log.exception("on_waiting failed")
            if lack and lack == site.lack(self._plan.processes):
                await site.changed()

    async def _wait_in_line(self, ticket: _Ticket) -> Reply:
        try:
            async with asyncio.timeout(self._plan.start_deadline):
                sent = await ticket.sent
        except TimeoutError:
            why = f": {self._last_error}" if self._last_error else ""
            raise GroupFailedError(f"no worker group was ready within {self._plan.start_deadline:g} s{why}") from None
        finally:
            if ticket in self._line:
                self._line.remove(ticket)
        return await sent
