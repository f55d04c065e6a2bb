"""The pool: the one object through which the engine commands the worker groups of a base model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Self

from tinkerflow.backend.core import tracing
from tinkerflow.backend.core.errors import GroupFailedError, StoreAwayError
from tinkerflow.backend.pool.config import PoolConfig
from tinkerflow.backend.pool.generations import Generations, GroupLost, PoolState
from tinkerflow.backend.pool.host.places import Site
from tinkerflow.backend.pool.scheduler import CommandScheduler, in_parts
from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.commands import Command, FetchState, GroupInfo, Reply, WriteState

log = logging.getLogger(__name__)

DETOUR_SECONDS = 600.0  # states go through the engine for so long after a process could not reach the store


class _NotSentError(GroupFailedError):
    """The group ended before the command was sent to it."""


def _without_errors(report: Callable[[str], None]) -> Callable[[str], None]:
    """A version of `report` that logs its own failure, such as a closed terminal, and does not end the group."""

    def reported(text: str) -> None:
        try:
            report(text)
        except Exception:
            log.exception("on_progress failed for %r", text)

    return reported


async def _ignore(text: str) -> None:
    """Ignore the message."""


class Pool:
    """Executes commands in order on a group of worker processes, and replaces the group when it fails.

    Made by `await Pool.start(...)`. Use it from the event loop in which it was started.
    """

    def __init__(self, config: PoolConfig, scheduler: CommandScheduler, generations: Generations) -> None:
        """Use `start`."""
        self._config = config
        self._scheduler = scheduler
        self._generations = generations
        self._entrance = asyncio.Lock()  # fair: commands that wait for a generation keep their order
        self._detour_until = 0.0  # until then, processes do not reach the store

    @classmethod
    async def start(
        cls,
        config: PoolConfig,
        site: Site,
        *,
        on_progress: Callable[[str], None],
        on_waiting: Callable[[str], Awaitable[None]] = _ignore,
        on_demand: bool = False,
    ) -> Pool:
        """A pool whose first generation is ready to serve.

        config: the configuration of every generation.
        site: where processes are started: `ThisMachine`, or the `Hosts` that joined. The start of each generation waits
        until the site has capacity.
        on_progress: called in this event loop with lines for people about the start-up or a long command.
        on_waiting: called with the reason why a generation cannot be started yet, and again when it is started.
        on_demand: no group runs before `begin`, and none after `release` or a start that failed, until `begin` again.
        With ThisMachine, call this in a thread that lives as long as the pool. The kernel kills the workers when the
        thread ends.
        Raises UserError when the executor refuses the configuration, GroupFailedError when no group came up in three
        attempts.
        """
        scheduler = CommandScheduler(config.chunks_per_microbatch)
        generations = Generations(
            config, site, _without_errors(on_progress), on_waiting, scheduler.serve, on_demand=on_demand
        )
        await generations.start()
        return cls(config, scheduler, generations)

    # ------------------------------------------------------------------ its state
    def begin(self) -> None:
        """Start a group, and replace it whenever it fails."""
        self._generations.begin()

    def drain(self) -> None:
        """Announce that the serving group will be released soon. Callers then start no new work on it."""
        self._generations.drain()

    def release(self, cause: str) -> None:
        """End the serving group after a termination notice, and start none until `begin`."""
        self._generations.release(cause)

    def take_out(self, generation: int, why: str) -> None:
        """End the group `generation` if it serves, and start no other one on its hosts before a person restarts them.

        The pool waits for other hosts. Hosts are shared by the pools of a site; groups that run there go on. why: shown
        to people and to clients that wait.
        """
        self._generations.take_out(generation, why)

    @property
    def draining(self) -> bool:
        """Whether callers must start no new work, because the group will be released soon."""
        return self._generations.state is PoolState.DRAINING

    @property
    def ending(self) -> bool:
        """Whether the serving group will be released or is being released."""
        return self.draining or not self._generations.is_wanted

    @property
    def idle(self) -> bool:
        """Whether the group serves, and has neither training nor a step of the sampler to do."""
        return self.ready and not self.ending and self._scheduler.idle

    @property
    def resting(self) -> bool:
        """Whether no group runs or starts, and none will before `begin`."""
        state = self._generations.state
        return not self._generations.is_wanted and state in (PoolState.RESTING, PoolState.PAUSING)

    @property
    def pausing(self) -> bool:
        """Whether the pool pauses before the next start, because the last group ended or did not start."""
        return self._generations.state is PoolState.PAUSING

    @property
    def lacks_capacity(self) -> bool:
        """Whether a group waits to be started until hosts have capacity for it."""
        return self._generations.state is PoolState.WAITING

    @property
    def trouble(self) -> str:
        """Why the last start on demand failed; "" if it did not."""
        return self._generations.start_failure

    @property
    def info(self) -> GroupInfo:
        """The description of the newest generation that was ready."""
        if self._generations.info is None:
            raise GroupFailedError("no worker group has been ready yet")
        return self._generations.info

    @property
    def generation(self) -> int:
        """The number of the generation that serves, or that served last: 1, 2, …"""
        return self.info.generation

    @property
    def ready(self) -> bool:
        """Whether a generation serves at this moment."""
        return self._generations.serving is not None

    @property
    def reaches_store(self) -> bool:
        """Whether the processes of the newest generation read and write states themselves (`transfer`).

        False for DETOUR_SECONDS after one of them failed to. Meanwhile, states go through the engine.
        """
        return self.info.reaches_store and asyncio.get_running_loop().time() >= self._detour_until

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the serving workers, by rank; empty while none serve."""
        group = self._generations.serving
        return group.pids if group else ()

    async def serving(self) -> int:
        """Wait until a generation serves, and return its number. GroupFailedError when the pool is stopped."""
        return (await self._generations.wait_for_serving()).generation

    # ------------------------------------------------------------------ commands
    async def submit(
        self, command: Command, deadline: float | None = None, *, owner: str = "", generation: int | None = None
    ) -> Reply:
        """Execute `command` after all earlier commands of its adapter, and return rank 0's reply.

        The scheduler decides when the command is sent. A Forward of many micro-batches is sent in parts of one
        micro-batch. Cancelling the caller leaves the command running.

        command: do not change its arrays before it is answered.
        deadline: seconds, counted from the answers to all commands before it; None = the pool's command_deadline.
        owner: the project that a command about an adapter belongs to. Projects share the devices equally.
        generation: the only group that may execute the command, because the command is about the content of that group.
        None: the group that serves now. Without a group, the command waits for the next one, up to start_deadline
        seconds.

        Raises the executor's error when it is for the client (UserError, NotFoundError, ConflictError, StateLostError,
        StoreError), and ServerError for any other exception of the executor. DeadlineError when the command missed its
        deadline. SuspectError when the group ended while executing it. GroupFailedError when the group ended before.
        TypeError or ValueError when the command cannot be encoded, and nothing was sent.
        """
        seconds = self._config.command_deadline if deadline is None else deadline
        if generation is not None:
            return await self._execute(command, seconds, owner, generation)
        while True:
            with contextlib.suppress(_NotSentError):
                return await self._execute(command, seconds, owner, await self._next_to_serve())

    async def transfer(self, job: FetchState | WriteState, *, generation: int | None = None) -> Mapping[str, Digest]:
        """Have every process read or write its part of a state in the store while it executes commands.

        Call it only when `reaches_store`. Returns the digest of each written file.

        generation: the only group that may do the transfer; None: the group that serves now.
        Raises the error of a process, StoreAwayError when the transfer takes longer than a command may, and
        GroupFailedError when the group ends or no longer serves.
        """
        group = self._generations.serving
        if group is None or generation not in (None, group.generation):
            raise GroupFailedError(f"worker group {generation or self._generations.number} serves no more")
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
        parent = tracing.current.get()  # read here, because the scheduler sends from another task
        parts = in_parts(
            command,
            self._scheduler.microbatch,
            self.info.fsdp,
            self.info.attention_tokens,
            branch_tokens=self.info.branch_tokens,
            context_parallel=self._config.group.context_parallel,
            few_shapes=self.info.few_shapes,
        )

        def send(part: Command) -> asyncio.Future[Reply]:
            return self._send(generation, part, seconds, parent)

        if len(parts) == 1:
            return await self._scheduler.submit(command, partial(send, command), owner)
        return await self._scheduler.submit_parts(parts, send, owner)

    def _send(self, generation: int, command: Command, deadline: float, parent: str | None) -> asyncio.Future[Reply]:
        group = self._generations.serving
        if group is None or group.generation != generation:
            error = self._generations.last_error
            raise _NotSentError(f"worker group {generation} serves no more{'' if error is None else f': {error}'}")
        return group.submit(command, deadline, parent)

    async def _next_to_serve(self) -> int:
        seconds = self._config.start_deadline
        try:
            async with asyncio.timeout(seconds), self._entrance:
                return await self.serving()
        except TimeoutError:
            error = self._generations.last_error
            why = f": {error}" if error else ""
            raise GroupFailedError(f"no worker group was ready within {seconds:g} s{why}") from None

    # ------------------------------------------------------------------ events, and the end
    def losses(self) -> AsyncIterator[GroupLost]:
        """Yield each generation as soon as it ends, to one consumer, until the pool is stopped.

        The next generation takes commands only after the consumer has come back for the next item. So state that the
        loop's body marks as lost cannot belong to the new generation. Start iterating before the first command.
        """
        return self._generations.losses.consume()

    def notices(self) -> AsyncIterator[str]:
        """Yield the reason whenever the serving group is about to end, such as a preempted machine. For one consumer.

        The group ends when the consumer has come back for the next notice, or after NOTICE_SECONDS.
        """
        return self._generations.notices.consume()

    async def stop(self) -> None:
        """End all workers, fail all outstanding commands with GroupFailedError, and wait until no process is left."""
        await self._generations.stop()

    async def __aenter__(self) -> Self:
        """The pool itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the pool."""
        await self.stop()
