"""One generation: N worker processes that live and die together.

The first fault ends the group. Faults are: a process ends, is silent, differs from the others or sends garbage, or a
command misses its deadline. Then all processes are killed, and all outstanding commands fail with an error that names
the rank and the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence

from tinkerflow.backend.core.errors import DeadlineError, GroupFailedError, TinkerflowError
from tinkerflow.backend.pool.config import PoolConfig
from tinkerflow.backend.pool.host.places import Site, WorkerSlot
from tinkerflow.backend.pool.member import Member
from tinkerflow.backend.pool.outstanding import OutstandingCommands, OutstandingTransfers
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.frames import LoopLink
from tinkerflow.backend.pool.protocol.messages import (
    Failed,
    Fatal,
    KeepAlive,
    Progress,
    Ready,
    Rejoined,
    TerminationNotice,
    Traced,
    Transfer,
    Transferred,
    to_error,
)
from tinkerflow.backend.pool.rendezvous import Rendezvous
from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.commands import Command, FetchState, GroupInfo, Reply, SampleStep, WriteState
from tinkerflow.backend.spec.pool_message import PoolMessage

log = logging.getLogger(__name__)

_REAP_SECONDS = 10.0


class Phase(enum.Enum):
    """The life of a group."""

    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"  # its processes are killed
    ENDED = "ended"  # all processes have ended


_NEXT = {
    Phase.STARTING: {Phase.READY, Phase.ENDING},
    Phase.READY: {Phase.ENDING},
    Phase.ENDING: {Phase.ENDED},
    Phase.ENDED: set[Phase](),
}


class TaskSet:
    """Tasks that are cancelled together. on_error: called with the exception of each task that fails."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def run(self, work: Coroutine[None, None, None]) -> None:
        """Start a task. After `close`, do nothing."""
        if self._closed:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def close(self) -> None:
        """Stop starting tasks. Running tasks continue."""
        self._closed = True

    async def cancel(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)


class Group:
    """One generation. `launch` starts it. `ended` resolves to the cause when the last process has ended."""

    def __init__(
        self,
        config: PoolConfig,
        site: Site,
        on_progress: Callable[[str], None],
        generation: int,
        probation: int = 0,
        on_notice: Callable[[str], None] = lambda cause: None,
    ) -> None:
        """Nothing starts before `launch`.

        config: the configuration of all generations.
        site: where the processes are started.
        on_progress: called with lines for people, from rank 0.
        generation: the number of this group, from 1.
        probation: how many commands are sent one at a time. Otherwise two commands may be in progress when the group
        ends, and it is unknown which of them caused the end.
        on_notice: called with the reason to end the group soon, when one of its processes gets SIGTERM.
        """
        loop = asyncio.get_running_loop()
        self.generation = generation
        self.ended: asyncio.Future[TinkerflowError] = loop.create_future()
        self.crashed = False  # whether the group ended by itself; valid once it has ended
        self._phase = Phase.STARTING
        self._config = config
        self._on_progress = on_progress
        self._on_notice = on_notice
        self._loop = loop
        self._slots: Sequence[WorkerSlot] = ()
        self._tasks = TaskSet(self._note_fault)
        self._rendezvous = Rendezvous(config, site, generation, self._tasks.run, self._fail)
        self._members = self._rendezvous.members
        self._reaper: asyncio.Task[None] | None = None
        self._commands = OutstandingCommands(config, generation, probation, self._send, self._fail, self._dump_stacks)
        self._transfers = OutstandingTransfers(config.processes)
        self._failure: TinkerflowError | None = None
        self._accused: int | None = None  # the rank that caused the end
        self._confessed = False  # whether the accused rank reported its own end, which identifies the command

    # ------------------------------------------------------------------ for the pool
    @property
    def is_ready(self) -> bool:
        """Whether the group accepts commands."""
        return self._phase is Phase.READY

    @property
    def failure(self) -> TinkerflowError | None:
        """The cause of the group's end; None if it has not begun to end."""
        return self._failure

    @property
    def probation_of_next(self) -> int:
        """The probation of the next generation: in full after an unexplained death, else what remains of this one."""
        return self._config.probation if self.crashed and not self._confessed else self._commands.probation

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(member.process.pid for member in self._members)

    async def launch(self, slots: Sequence[WorkerSlot], plan: str) -> GroupInfo:
        """Start a process in each slot, wait until the executors are ready, and return the group's description.

        slots: released when all processes have ended. plan: PoolConfig.digest.
        UserError: raised by the constructor of the executor. GroupFailedError, DeadlineError: any other failure.
        If this raises or is cancelled, all processes have ended.
        """
        self._slots = slots
        generation, seconds = self.generation, self._config.start_deadline
        try:
            async with asyncio.timeout(seconds):
                return await self._rendezvous.meet(slots, plan, self._watch_process, self._serve)
        except TimeoutError:
            late = self._rendezvous.late
            text = f"worker group {generation} was not ready within {seconds:g} s: no message from rank {late}"
            self.end(DeadlineError(text))
            raise await self.ended from None
        except TinkerflowError:
            await self.ended
            raise
        except Exception as error:
            self.end(GroupFailedError(f"worker group {generation} could not be started: {error!r}"))
            raise await self.ended from error
        except asyncio.CancelledError:
            self.end(GroupFailedError(f"the start of worker group {generation} was cancelled"))
            await self.ended
            raise

    def submit(self, command: Command, deadline: float, parent: str | None = None) -> asyncio.Future[Reply]:
        """Send `command` to every rank. The future resolves to rank 0's reply or the error (see Pool.submit).

        deadline: in seconds. parent: the context of the command's span.
        """
        if self._failure is not None:
            raise self._failure
        if self._commands.probation and isinstance(command, SampleStep):
            command = command.copy_with(wait=True)  # otherwise unfinished work could be blamed on the next command
        body = codec.encode(command if parent is None else Traced(parent, command))
        return self._commands.submit(type(command).__name__, body, deadline)

    def transfer(self, job: FetchState | WriteState) -> asyncio.Future[Mapping[str, Digest]]:
        """Make every rank read or write its part of a state while commands run. Returns a future of written files."""
        if self._failure is not None:
            raise self._failure
        number, future = self._transfers.begin()
        self._send(0, codec.encode(Transfer(number, job)))
        return future

    def end(self, error: TinkerflowError, *, crashed: bool = False) -> None:
        """Kill all processes and fail all outstanding work. crashed: whether the group ended by itself."""
        if self._failure is not None:
            return
        self._enter(Phase.ENDING)
        self._failure, self.crashed = error, crashed
        self._tasks.close()
        for member in self._members:
            member.process.signal(signal.SIGKILL)
        self._commands.fail_all(error, crashed=crashed, confessed=self._accused if self._confessed else None)
        self._transfers.fail_all(error)
        self._rendezvous.give_up(error)
        self._reaper = self._loop.create_task(self._reap(error))

    def take_out(self, why: str) -> None:
        """End the group for the reason `why`, and start no more processes on its hosts."""
        for slot in self._slots:
            slot.take_out(why)
        self.end(GroupFailedError(f"worker group {self.generation} was taken out of service: {why}"))

    # ------------------------------------------------------------------ messages
    def _send(self, index: int, body: Sequence[codec.Buffer]) -> None:
        for member in self._members:
            member.send(index, body)

    def _serve(self, member: Member, link: LoopLink) -> None:
        """Start exchanging frames with a rank that has connected."""
        self._tasks.run(member.write(link))
        self._tasks.run(self._read(member, link))
        self._tasks.run(self._watch_silence(member, link))

    async def _read(self, member: Member, link: LoopLink) -> None:
        try:
            await member.read(link, lambda index, message: self._handle(member, index, message))
        except ValueError as error:
            self._fail(f"rank {member.rank} sent an invalid message: {error}")
        else:
            await self._note_lost(member, "closed its connection")

    def _handle(self, member: Member, index: int, message: PoolMessage) -> None:
        """Handle a message from a rank. ValueError: the message is unexpected."""
        match message:
            case _ if index:
                self._commands.answer(member.rank, index, message)
            case KeepAlive():
                pass
            case Progress():
                if member.rank == 0:
                    self._on_progress(message.text)
            case Rejoined() if member.rejoined is None:
                self._rendezvous.note_rejoined(member, message)
            case Ready() if member.ready is None:
                if self._rendezvous.note_ready(member, message):
                    self._enter(Phase.READY)
            case Transferred():
                self._transfers.answer(member.rank, message)
            case TerminationNotice():
                cause = f"rank {member.rank} received SIGTERM"
                if self._phase is Phase.READY:
                    self._on_notice(f"worker group {self.generation} ended: {cause}")
                else:  # a group that is not ready has no state to save
                    self._fail(cause, crashed=False)
            case Fatal():
                self._note_confession(member.rank, message.failed)
            case _:
                raise ValueError(f"unexpected {type(message).__name__}")

    # ------------------------------------------------------------------ failures
    def _dump_stacks(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._members[rank].process.signal(signal.SIGUSR1)

    async def _watch_silence(self, member: Member, link: LoopLink) -> None:
        seconds = await member.silence(link, self._config.heartbeat_timeout)
        self._fail(f"rank {member.rank} sent no heartbeat for {seconds:g} s (stopped?)", crashed=False)

    def _watch_process(self, member: Member) -> None:
        async def watch() -> None:
            await member.end()
            await self._note_lost(member, "ended")

        self._tasks.run(watch())

    def _note_confession(self, rank: int, failed: Failed) -> None:
        if self._accused is not None:
            return
        self._accused, self._confessed = rank, True
        error = to_error(failed)
        if error.category == "user" and self._phase is Phase.STARTING:
            self.end(error)  # the configuration is wrong
        else:
            self._fail(f"rank {rank} failed: {failed.message}")

    async def _note_lost(self, member: Member, how: str) -> None:
        # When a rank dies, the others fail milliseconds later, so only the first loss counts.
        if self._accused is not None:
            return
        self._accused = member.rank
        crashed = False  # unless the exit status indicates a crash
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.exit_seconds):
                ending = await member.process.ended()
                how, crashed = ending.how, ending.crashed
        self._fail(f"rank {member.rank} {how}", crashed=crashed)

    def _fail(self, cause: str, *, crashed: bool = True) -> None:
        if self._failure is None:
            text = f"worker group {self.generation} ended: {cause}"
            log.error("%s; %d commands outstanding", text, len(self._commands))
            self.end(GroupFailedError(text), crashed=crashed)

    async def _reap(self, error: TinkerflowError) -> None:
        for member in self._members:
            try:
                async with asyncio.timeout(_REAP_SECONDS):
                    await member.process.ended()
            except TimeoutError:
                log.error("process %d (rank %d) has not ended", member.process.pid, member.rank)
        await self._tasks.cancel()
        for member in self._members:
            if member.link is not None:
                member.link.close()
        for slot in self._slots:
            slot.release()
        self._enter(Phase.ENDED)
        self.ended.set_result(error)

    # ------------------------------------------------------------------ phases
    def _enter(self, phase: Phase) -> None:
        assert phase in _NEXT[self._phase], f"{self._phase} to {phase}"
        self._phase = phase

    def _note_fault(self, error: BaseException) -> None:
        log.error("a task of worker group %d failed", self.generation, exc_info=error)
        self._fail(f"the supervisor failed: {error!r}")
