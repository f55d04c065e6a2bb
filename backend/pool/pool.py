"""The pool: the object through which the engine commands the worker group of a base model."""

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

DETOUR_SECONDS = 600.0  # how long states go through the engine after a process could not reach the store


class _NotSentError(GroupFailedError):
    """The group ended before the command was sent to it."""


def _without_errors(report: Callable[[str], None]) -> Callable[[str], None]:
    """Wrap `report` so that its failure, such as a closed terminal, is logged and does not end the group."""

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

    Created by `await Pool.start(...)`. Use it from the event loop in which it was started.
    """

    def __init__(self, config: PoolConfig, scheduler: CommandScheduler, generations: Generations) -> None:
        """Use `start`."""
        self._config = config
        self._scheduler = scheduler
        self._generations = generations
        self._entrance = asyncio.Lock()  # fair: commands that wait for a generation keep their order
        self._detour_until = 0.0  # until then, processes do not access the store

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
        """Create a pool, and start its first generation unless groups run on demand.

        config: the configuration of every generation.
        site: where processes are started: `ThisMachine`, or the `Hosts` that joined. The start of each generation waits
        until the site has capacity.
        on_progress: called in this event loop with lines for people about the start-up or a long command.
        on_waiting: called with the reason why a generation cannot be started yet, and again when it is started.
        on_demand: no group runs before `begin`, and after `release` or a failed start, none runs until `begin` again.
        With ThisMachine, call this in a thread that lives as long as the pool. The kernel kills the workers when the
        thread ends.
        UserError: the executor refused the configuration. GroupFailedError: no group became ready in three attempts.
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
        """Announce that the serving group will be released soon. Callers must then start no new work on it."""
        self._generations.drain()

    def release(self, cause: str) -> None:
        """End the serving group after a termination notice, and start no group until `begin`."""
        self._generations.release(cause)

    def take_out(self, generation: int, why: str) -> None:
        """End the group `generation` if it serves, and start no other group on its hosts before a person restarts them.

        The pool waits for other hosts. Other pools of the site may share these hosts; their groups continue to run.
        why: shown to people and to waiting clients.
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
        """Whether the group serves, and has neither training nor sampler steps to do."""
        return self.ready and not self.ending and self._scheduler.idle

    @property
    def resting(self) -> bool:
        """Whether no group is running or starting, and none will be started before `begin`."""
        state = self._generations.state
        return not self._generations.is_wanted and state in (PoolState.RESTING, PoolState.PAUSING)

    @property
    def pausing(self) -> bool:
        """Whether the pool pauses before the next start, because the last group ended or did not start."""
        return self._generations.state is PoolState.PAUSING

    @property
    def lacks_capacity(self) -> bool:
        """Whether the start of a group is waiting for hosts with capacity."""
        return self._generations.state is PoolState.WAITING

    @property
    def trouble(self) -> str:
        """Why the last start on demand failed; "" if it did not fail."""
        return self._generations.start_failure

    @property
    def info(self) -> GroupInfo:
        """The description of the newest generation that became ready."""
        if self._generations.info is None:
            raise GroupFailedError("no worker group has been ready yet")
        return self._generations.info

    @property
    def generation(self) -> int:
        """The number of the generation that serves, or that served last: 1, 2, …"""
        return self.info.generation

    @property
    def ready(self) -> bool:
        """Whether a generation is serving now."""
        return self._generations.serving is not None

    @property
    def reaches_store(self) -> bool:
        """Whether the processes of the newest generation read and write states themselves (`transfer`).

        False for DETOUR_SECONDS after a process failed to do so. Meanwhile, states go through the engine.
        """
        return self.info.reaches_store and asyncio.get_running_loop().time() >= self._detour_until

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the serving workers, by rank; empty if none serve."""
        group = self._generations.serving
        return group.pids if group else ()

    async def serving(self) -> int:
        """Wait until a generation serves, and return its number. GroupFailedError: the pool was stopped."""
        return (await self._generations.wait_for_serving()).generation

    # ------------------------------------------------------------------ commands
    async def submit(
        self, command: Command, deadline: float | None = None, *, owner: str = "", generation: int | None = None
    ) -> Reply:
        """Execute `command` after all earlier commands of its adapter, and return rank 0's reply.

        The scheduler decides when the command is sent. A Forward of many micro-batches is sent in parts of one
        micro-batch. Cancelling the caller leaves the command running.

        command: do not change its arrays before it is answered.
        deadline: seconds, counted from the answers to all commands before it; None: the pool's command_deadline.
        owner: the project of a command about an adapter. Projects share the devices equally.
        generation: the only group that may execute the command, because the command refers to that group's state.
        None: the group that serves now. Without a group, the command waits for the next one, up to start_deadline
        seconds.

        The executor's errors for clients are raised unchanged (UserError, NotFoundError, ConflictError, StateLostError,
        StoreError). ServerError: the executor raised any other exception. DeadlineError: the command missed its
        deadline. SuspectError: the group ended while executing it. GroupFailedError: the group ended before. TypeError,
        ValueError: the command cannot be encoded, and nothing was sent.
        """
        seconds = self._config.command_deadline if deadline is None else deadline
        if generation is not None:
            return await self._execute(command, seconds, owner, generation)
        while True:
            with contextlib.suppress(_NotSentError):
                return await self._execute(command, seconds, owner, await self._next_to_serve())

    async def transfer(self, job: FetchState | WriteState, *, generation: int | None = None) -> Mapping[str, Digest]:
        """Make every process read or write its part of a state in the store while it executes commands.

        Call this only if `reaches_store`. Returns the digest of each written file.

        generation: the only group that may do the transfer; None: the group that serves now.
        Raises the error of a process. StoreAwayError: the transfer took longer than a command may. GroupFailedError:
        the group ended or no longer serves.
        """
        group = self._generations.serving
        if group is None or generation not in (None, group.generation):
            raise GroupFailedError(f"worker group {generation or self._generations.number} no longer serves")
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
            error = self._generations.error_of(generation)
            raise _NotSentError(f"worker group {generation} no longer serves{'' if error is None else f': {error}'}")
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

        The next generation accepts commands only after the consumer has requested the next item. State that the loop's
        body marks as lost therefore cannot belong to the new generation. Start iterating before the first command.
        """
        return self._generations.losses.consume()

    def notices(self) -> AsyncIterator[str]:
        """Yield the reason whenever the serving group is about to end, such as a preempted machine. For one consumer.

        The group ends when the consumer has requested the next notice, or after NOTICE_SECONDS.
        """
        return self._generations.notices.consume()

    async def stop(self) -> None:
        """End all workers, fail all outstanding commands with GroupFailedError, and wait until no process is left."""
        await self._generations.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
