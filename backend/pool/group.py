"""One generation: N worker processes that live and die together.

Every command goes to every rank, in order. It is answered when all ranks have answered it alike; the reply is rank 0's.
The first thing that goes wrong anywhere (a process ends, is silent, differs, sends garbage, or a command misses its
deadline) ends the group: all processes are killed and everything outstanding fails, naming rank and cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
import signal
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from tinkerflow.backend.core.errors import (
    OUT_OF_MEMORY,
    AllocationError,
    DeadlineError,
    GroupFailedError,
    StoreAwayError,
    SuspectError,
    TinkerflowError,
)
from tinkerflow.backend.pool.host.places import Launch, Site, WorkerProcess, WorkerSlot
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.frames import LoopLink
from tinkerflow.backend.pool.protocol.handshake import HANDSHAKE_SECONDS, accept, next_connection
from tinkerflow.backend.pool.protocol.messages import (
    Ack,
    Beat,
    Failed,
    Fatal,
    Leaving,
    Left,
    Progress,
    Ready,
    Start,
    Traced,
    Transfer,
    Transferred,
    same_outcome,
    to_error,
)
from tinkerflow.backend.pool.protocol.software import code_version, contents_version
from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.commands import (
    Command,
    FetchState,
    GroupConfig,
    GroupInfo,
    Reply,
    SampleStep,
    WriteState,
)
from tinkerflow.backend.supervise import HeartbeatMonitor

log = logging.getLogger(__name__)

_JOIN_SECONDS = 60.0  # that a rank may take to connect, and to end what an earlier driver left it with
_REAP_SECONDS = 10.0
_LAST_WORD_SECONDS = 1.0  # from the end of a process until what it sent before has been read
_REPLIES = Reply.__args__
_BEAT = codec.encode(Beat())


@dataclass(frozen=True)
class PoolConfig:
    """What all generations of a pool have in common, times in seconds.

    group: what every process is told. groups: how many groups the driver starts, which may share devices.
    command_deadline: the time a command may take, unless it brings its own deadline.
    start_deadline: the time the start of a group may take, and a command may wait for a group.
    executor: "module:attribute" of the class that each worker runs (tinkerflow.backend.pool.worker.CommandExecutor).
    heartbeat_timeout: a process without a sign of life for so long counts as stopped.
    chunks_per_microbatch: steps of the sampler for each micro-batch of training, while both wait.
    dump_grace: what a process that has missed a deadline gets to write its stacks to its log.
    ending: what a process that has closed its connection gets to end, so that its exit status is known.
    agreeing: after one rank's word that the devices have no memory left, the time until all ranks must have said so.
    probation: after an unexplained death so many commands go one at a time: a second death then identifies its command.
    """

    group: GroupConfig
    processes: int
    command_deadline: float
    start_deadline: float
    groups: int = 1
    executor: str = "tinkerflow.backend.compute.executor:Executor"
    heartbeat_timeout: float = 30.0
    chunks_per_microbatch: float = 1.0
    dump_grace: float = 1.0
    ending: float = 5.0
    agreeing: float = 10.0
    probation: int = 2**14

    def start(self, coordinator: str, places: Sequence[WorkerSlot]) -> list[codec.Buffer]:
        """What every process is told first, encoded. places: each rank's."""
        hosts = [place.host for place in places]
        numbers = tuple(hosts.index(host) for host in hosts)
        fitting = [math.ceil(place.room / hosts.count(place.host)) for place in places if place.room]
        groups = min(self.groups, max(fitting, default=self.groups))
        return codec.encode(
            Start(self.group, self.processes, coordinator, self.executor, self.heartbeat_timeout, numbers, groups)
        )

    def digest(self) -> str:
        """The same for pools whose processes can serve each other's drivers: told the same, from the same files.

        Reads files, for up to a second. OSError when one of them cannot be read.
        """
        model = Path(self.group.model_path)
        digest = hashlib.sha256(b"".join(self.start(coordinator="", places=())))
        digest.update(code_version().encode())
        digest.update(contents_version(model, model.glob("*")).encode())
        return digest.hexdigest()


@dataclass
class _Member:
    """One rank: its process, and once it has connected, its link."""

    rank: int
    process: WorkerProcess
    link: LoopLink | None = None
    outbox: asyncio.Queue[tuple[int, Sequence[codec.Buffer]]] = field(default_factory=asyncio.Queue)
    left: Left | None = None  # what it said of an earlier driver
    ready: Ready | None = None
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)  # all that it sent has been read


@dataclass
class _Outstanding:
    """A command that not every rank has answered."""

    index: int
    name: str
    body: Sequence[codec.Buffer] | None  # until it is sent
    deadline: float
    future: asyncio.Future[Reply]
    answers: dict[int, Reply | Failed | Ack] = field(default_factory=dict)
    overdue: DeadlineError | None = None


class Group:
    """One generation. `launch` starts it; `ended` resolves when its last process is gone."""

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

        config: what all generations have in common.
        site: where the processes are started.
        on_progress: called with lines for people, from rank 0.
        generation: the number of this group, from 1.
        probation: so many commands are sent one at a time. Without probation the next command may be begun while one is
        computed, and nobody knows which of the two ends the group.
        on_notice: called with why the group should end soon, when one of its processes was told to end.
        """
        loop = asyncio.get_running_loop()
        self.generation = generation
        self.ended: asyncio.Future[TinkerflowError] = loop.create_future()
        self.failure: TinkerflowError | None = None
        self.crashed = False  # it ended by itself, once it has ended
        self._config = config
        self._site = site
        self._on_progress = on_progress
        self._on_notice = on_notice
        self._probation = probation
        self._loop = loop
        self._places: Sequence[WorkerSlot] = ()
        self._started: asyncio.Future[GroupInfo] = loop.create_future()
        self._members: list[_Member] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.Task[None] | None = None
        self._outstanding: deque[_Outstanding] = deque()
        self._last_index = 0
        self._numbers = count(1)  # of transfers
        self._transfers: dict[int, tuple[dict[int, Transferred], asyncio.Future[Mapping[str, Digest]]]] = {}
        self._watch: asyncio.TimerHandle | None = None
        self._accused: int | None = None  # the rank that is named as the cause
        self._confessed = False  # the accused rank has said that it ends, and so of which command

    async def launch(self, places: Sequence[WorkerSlot], plan: str) -> GroupInfo:
        """Start one process in each of `places` and wait until their executors stand: what rank 0's says of itself.

        plan: PoolConfig.digest. The places are released when all processes have ended.
        Raises the error of the executor's constructor when that is a UserError, else GroupFailedError or DeadlineError.
        No process is left when it raises or is cancelled.
        """
        self._places = places
        generation, seconds = self.generation, self._config.start_deadline
        try:
            async with asyncio.timeout(seconds):
                await self._start(plan)
                return await asyncio.shield(self._started)
        except TimeoutError:
            ready = {m.rank for m in self._members if m.ready is not None}
            late = [rank for rank in range(self._config.processes) if rank not in ready]
            text = f"worker group {generation} was not ready in {seconds:g} s: no word from rank {late}"
            self.end(DeadlineError(text))
            raise await self.ended from None
        except TinkerflowError:
            await self.ended
            raise
        except Exception as error:
            self.end(GroupFailedError(f"worker group {generation} could not be started: {error!r}"))
            raise await self.ended from error
        except asyncio.CancelledError:
            self.end(GroupFailedError(f"the start of worker group {generation} was given up"))
            await self.ended
            raise

    @property
    def probation_of_next(self) -> int:
        """The probation of the next generation: a new one after an unexplained death, else the rest of this one's."""
        return self._config.probation if self.crashed and not self._confessed else self._probation

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(m.process.pid for m in self._members)

    def submit(self, command: Command, deadline: float, parent: str | None = None) -> asyncio.Future[Reply]:
        """Send `command` to every rank; the future gives rank 0's reply or the error (see Pool.submit).

        parent: the context of the span that it belongs to.
        """
        if self.failure is not None:
            raise self.failure
        if self._probation and isinstance(command, SampleStep):
            command = command.copy_with(wait=True)  # or what it leaves on the devices has the next command blamed
        body = codec.encode(command if parent is None else Traced(parent, command))
        self._last_index += 1
        entry = _Outstanding(self._last_index, type(command).__name__, body, deadline, self._loop.create_future())
        self._outstanding.append(entry)
        self._send_next()
        if len(self._outstanding) == 1:
            self._watch_first()
        return entry.future

    def transfer(self, job: FetchState | WriteState) -> asyncio.Future[Mapping[str, Digest]]:
        """Have every rank read or write its part of a state, beside the commands: the files that were written.

        The future's error is that of a rank, or says how the group ended.
        """
        if self.failure is not None:
            raise self.failure
        number, future = next(self._numbers), self._loop.create_future()
        self._transfers[number] = {}, future
        body = codec.encode(Transfer(number, job))
        for member in self._members:
            member.outbox.put_nowait((0, body))
        return future

    @property
    def bytes_sent(self) -> int:
        """How many bytes went to the processes, all together."""
        return sum(member.link.sent for member in self._members if member.link is not None)

    def _send_next(self) -> None:
        for entry in self._outstanding:
            if entry.body is None:
                continue
            if self._probation and entry is not self._outstanding[0]:
                return
            for member in self._members:
                member.outbox.put_nowait((entry.index, entry.body))
            entry.body = None

    def end(self, error: TinkerflowError, *, crashed: bool = False) -> None:
        """Kill every process and fail everything outstanding with `error`; a command past its deadline by name.

        The command that was being executed, or the first of them, gets a SuspectError. crashed: the group ended by
        itself.
        """
        if self.failure is not None:
            return
        self.failure, self.crashed = error, crashed
        if self._watch is not None:
            self._watch.cancel()
        for member in self._members:
            member.process.signal(signal.SIGKILL)
        executing = self._executing()
        if executing is not None and executing.overdue is None and isinstance(error, GroupFailedError):
            self._outstanding.remove(executing)
            _fail(executing.future, error, SuspectError(error.message, crashed=crashed))
        for entry in self._outstanding:
            _fail(entry.future, entry.overdue or error)
        self._outstanding.clear()
        for _, future in self._transfers.values():
            _fail(future, error)
        self._transfers.clear()
        _fail(self._started, error)
        self._reaper = self._loop.create_task(self._reap(error))

    def _executing(self) -> _Outstanding | None:
        """The oldest command that is not answered: by the rank that has said that it ends, if one has, else by all."""
        sent = (entry for entry in self._outstanding if entry.body is None)
        return next((entry for entry in sent if not self._confessed or self._accused not in entry.answers), None)

    # ------------------------------------------------------------------ start
    async def _start(self, plan: str) -> None:
        config, site = self._config, self._site
        salt = secrets.token_bytes(32)
        with socket.create_server((site.address, 0)) as listener:
            listener.setblocking(False)
            launch = Launch(self.generation, listener.getsockname()[1], salt, plan)
            for rank, place in enumerate(self._places):
                process = await place.spawn(launch, rank)
                self._members.append(_Member(rank, process))
            for member in self._members:
                self._do(self._notice_death(member))
            self._do(self._notice_absence())
            coordinator = self._members[0].process.coordinator if config.processes > 1 else ""
            start = config.start(coordinator, self._places)
            welcome = self._welcome(listener, site.secret(salt), start)
            doorman = self._loop.create_task(welcome)
            try:
                futures: set[asyncio.Future[Any]] = {doorman, self._started}
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            finally:
                doorman.cancel()
                await asyncio.gather(doorman, return_exceptions=True)  # before its socket is closed under it

    async def _welcome(self, listener: socket.socket, secret: bytes, start: Sequence[codec.Buffer]) -> None:
        while any(m.link is None for m in self._members):  # beside each other: a silent stranger holds nobody up
            self._do(self._greet(await next_connection(listener), secret, start))

    async def _greet(self, sock: socket.socket, secret: bytes, start: Sequence[codec.Buffer]) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                link = await accept(sock, secret, self.generation, len(self._members))
        except (OSError, EOFError, TimeoutError) as error:
            log.warning("a stranger connected to worker group %d: %r", self.generation, error)
            return
        member = self._members[link.rank]
        if member.link is not None:
            log.warning("a second rank %d connected to worker group %d", link.rank, self.generation)
            link.close()
            return
        member.link = link
        member.outbox.put_nowait((0, start))
        self._do(self._send(member, link))
        self._do(self._receive(member, link))
        self._do(self._notice_silence(member, link))

    # ------------------------------------------------------------------ while it runs
    async def _send(self, member: _Member, link: LoopLink) -> None:
        try:
            while True:
                await link.write(*await member.outbox.get())
        except OSError as error:  # who reads notices it, too: after its last word
            log.info("rank %d does not listen any more (%s)", member.rank, error)

    async def _receive(self, member: _Member, link: LoopLink) -> None:
        try:
            while True:
                frame = await link.read()
                self._take(member, frame.index, codec.decode(frame.body))
        except (EOFError, OSError):
            member.hung_up.set()
            await self._lost(member, "closed its connection")
        except ValueError as error:
            self._fail(f"rank {member.rank} sent garbage: {error}")

    def _take(self, member: _Member, index: int, message: object) -> None:
        if index:
            self._answer(member.rank, index, message)
        elif isinstance(message, Beat):
            pass
        elif isinstance(message, Progress):
            if member.rank == 0:
                self._on_progress(message.text)
        elif isinstance(message, Left) and member.left is None:
            member.left = message
            self._compare_left()
        elif isinstance(message, Ready) and member.ready is None:
            member.ready = message
            told = self._members[0].ready
            if told and all(m.ready for m in self._members) and not self._started.done():
                everybody = all(m.ready and m.ready.reaches_store for m in self._members)
                info = GroupInfo(**asdict(told.copy_with(reaches_store=everybody)), generation=self.generation)
                self._started.set_result(info)
        elif isinstance(message, Transferred):
            self._transferred(member.rank, message)
        elif isinstance(message, Leaving):
            cause = f"rank {member.rank} was told to end by SIGTERM"
            if self._started.done():
                self._on_notice(f"worker group {self.generation} ended: {cause}")
            else:  # there is nothing to save
                self._fail(cause, crashed=False)
        elif isinstance(message, Fatal):
            self._ended_itself(member.rank, message.failed)
        else:
            raise ValueError(f"{type(message).__name__}, for which nobody asked")

    def _transferred(self, rank: int, message: Transferred) -> None:
        answers, future = self._transfers.get(message.number, ({}, None))
        answers[rank] = message
        if future is None or len(answers) < len(self._members):
            return
        del self._transfers[message.number]
        errors = [to_error(one.failed) for _, one in sorted(answers.items()) if one.failed is not None]
        if errors:  # that the store is away says nothing about the state: what is damaged stays so
            _fail(future, next((error for error in errors if isinstance(error, StoreAwayError)), errors[0]))
        elif not future.done():
            future.set_result({file: digest for one in answers.values() for file, digest in one.files.items()})

    def _compare_left(self) -> None:
        """Give a group up that was left in the middle of something: where one rank waits for another in vain."""
        told = [member.left.commands for member in self._members if member.left is not None]
        if len(set(told)) > 1:
            self._fail(f"an earlier driver left its ranks at different commands: {sorted(set(told))}", crashed=False)
        elif len(told) == len(self._members):
            self._loop.call_later(_JOIN_SECONDS, self._give_up_what_was_left)

    def _give_up_what_was_left(self) -> None:
        if not self._started.done():
            self._fail(f"what an earlier driver left its ranks with took longer than {_JOIN_SECONDS:g} s")

    def _answer(self, rank: int, index: int, message: object) -> None:
        entry = next((e for e in self._outstanding if rank not in e.answers), None)
        wanted = (*_REPLIES, Failed) if rank == 0 else (Ack,)
        if entry is None or entry.index != index or not isinstance(message, wanted):
            raise ValueError(f"{type(message).__name__} for command {index}, which is not due")
        entry.answers[rank] = message
        failed = message.failed if isinstance(message, Ack) else message
        if isinstance(failed, Failed) and failed.error == AllocationError.__name__:
            self._loop.call_later(self._config.agreeing, self._give_up_agreement, entry, rank)
        while self._outstanding and len(self._outstanding[0].answers) == len(self._members):
            done = self._outstanding[0]
            if not self._settle(done):
                return
            self._outstanding.popleft()
            self._probation = max(0, self._probation - 1)
            self._send_next()
            self._watch_first()

    def _give_up_agreement(self, entry: _Outstanding, rank: int) -> None:
        """Where one rank had no memory left, the others may wait for it in a collective for ever."""
        silent = [m.rank for m in self._members if m.rank not in entry.answers]
        if entry in self._outstanding and entry is not self._outstanding[0]:  # they are busy with an earlier one
            self._loop.call_later(self._config.agreeing, self._give_up_agreement, entry, rank)
        elif silent and entry in self._outstanding:
            self._fail(f"rank {rank} had no memory left for {entry.name} ({OUT_OF_MEMORY}), and rank {silent} goes on")

    def _settle(self, entry: _Outstanding) -> bool:
        first = entry.answers[0]
        failed = first if isinstance(first, Failed) else None
        for rank in range(1, len(self._members)):
            ack = entry.answers[rank]
            if not isinstance(ack, Ack) or not same_outcome(failed, ack.failed):
                log.error("rank 0 and rank %d differ on %s: %s, %s", rank, entry.name, failed or "done", ack)
                self._fail(f"rank {rank} and rank 0 differ on whether {entry.name} succeeded")
                return False
        if not entry.future.done():
            if failed is not None:
                _fail(entry.future, to_error(failed))
            elif not isinstance(first, (Failed, Ack)):
                entry.future.set_result(first)
        return True

    # ------------------------------------------------------------------ what can go wrong
    def _watch_first(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._outstanding:
            entry = self._outstanding[0]
            self._watch = self._loop.call_later(entry.deadline, self._overdue, entry)

    def _overdue(self, entry: _Outstanding) -> None:
        for member in self._members:
            if member.rank not in entry.answers:
                member.process.signal(signal.SIGUSR1)  # stacks of all threads to its log
        self._loop.call_later(self._config.dump_grace, self._give_up_waiting, entry)

    def _give_up_waiting(self, entry: _Outstanding) -> None:
        if entry not in self._outstanding:
            return  # its answer lay here already: it was we who were late
        silent = [m.rank for m in self._members if m.rank not in entry.answers]
        entry.overdue = DeadlineError(
            f"{entry.name} did not answer in {entry.deadline:g} s: "
            f"no word from rank {silent} of worker group {self.generation}"
        )
        self._fail(f"rank {silent} missed the deadline of a command")

    async def _notice_absence(self) -> None:
        await asyncio.sleep(_JOIN_SECONDS)
        if absent := [m.rank for m in self._members if m.link is None]:
            self._fail(f"rank {absent} did not connect in {_JOIN_SECONDS:g} s (stopped?)", crashed=False)

    async def _notice_silence(self, member: _Member, link: LoopLink) -> None:
        async def beat() -> None:
            member.outbox.put_nowait((0, _BEAT))

        # The bytes of a large frame, which keeps beats waiting, are signs of life, too.
        timeout = self._config.heartbeat_timeout
        monitor = HeartbeatMonitor(timeout, lambda: link.signs, beat, lambda: member.ready is None)
        cause = f"rank {member.rank} was silent for {await monitor.silence():g} s (stopped?)"
        self._fail(cause, crashed=False)

    def _ended_itself(self, rank: int, why: Failed) -> None:
        if self._accused is not None:
            return
        self._accused, self._confessed = rank, True
        error = to_error(why)
        if error.category == "user" and not self._started.done():
            self.end(error)  # the configuration is wrong, and says how
        else:
            self._fail(f"rank {rank} ended itself: {why.message}")

    async def _notice_death(self, member: _Member) -> None:
        ending = await member.process.ended()
        if ending.crashed and member.link is not None:  # it may have said why
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_SECONDS):
                    await member.hung_up.wait()
        await self._lost(member, "ended")

    async def _lost(self, member: _Member, how: str) -> None:
        # The neighbours of a dead rank fail within milliseconds too: who was noticed first is named.
        if self._accused is not None:
            return
        self._accused = member.rank
        crashed = False  # as far as anybody knows
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.ending):
                ending = await member.process.ended()
                how, crashed = ending.how, ending.crashed
        self._fail(f"rank {member.rank} {how}", crashed=crashed)

    def _fail(self, cause: str, *, crashed: bool = True) -> None:
        if self.failure is None:
            text = f"worker group {self.generation} ended: {cause}"
            log.error("%s; %d commands outstanding", text, len(self._outstanding))
            self.end(GroupFailedError(text), crashed=crashed)

    async def _reap(self, error: TinkerflowError) -> None:
        for member in self._members:
            try:
                async with asyncio.timeout(_REAP_SECONDS):
                    await member.process.ended()
            except TimeoutError:
                log.error("process %d (rank %d) does not die", member.process.pid, member.rank)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self._members:
            if member.link is not None:
                member.link.close()
        for place in self._places:
            place.release()
        self.ended.set_result(error)

    def _do(self, work: Coroutine[None, None, None]) -> None:
        if self.failure is not None:
            work.close()
            return
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of worker group %d failed", self.generation, exc_info=error)
            self._fail(f"the supervisor itself failed: {error!r}")


def _fail(future: asyncio.Future[Any], error: TinkerflowError, own: TinkerflowError | None = None) -> None:
    if not future.done():
        # its own: an exception raised twice mixes its tracebacks
        future.set_exception(own or type(error)(error.message))
        future.exception()  # nobody need be waiting for it any more
