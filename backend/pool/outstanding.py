"""The commands of one group that not every rank has answered: their order, their deadlines, and the suspect.

A command goes to every rank. When all ranks have answered alike, it is answered with the reply of rank 0. This module
handles no processes or sockets: its callers pass functions that send to all ranks and that end the group.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tinkerflow.backend.core.errors import (
    OUT_OF_MEMORY,
    AllocationError,
    DeadlineError,
    GroupFailedError,
    StoreAwayError,
    SuspectError,
    TinkerflowError,
)
from tinkerflow.backend.pool.config import PoolConfig
from tinkerflow.backend.pool.protocol.codec import Buffer
from tinkerflow.backend.pool.protocol.messages import Ack, Failed, Transferred, same_outcome, to_error
from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.commands import Reply
from tinkerflow.backend.spec.pool_message import PoolMessage

log = logging.getLogger(__name__)

_REPLIES = Reply.__args__


@dataclass(eq=False)
class _Command:
    """A command that not every rank has answered. body: the encoded command; None once sent."""

    index: int
    name: str
    body: Sequence[Buffer] | None
    deadline: float
    future: asyncio.Future[Reply]
    answers: dict[int, Reply | Failed | Ack] = field(default_factory=dict)
    overdue: DeadlineError | None = None


class OutstandingCommands:
    """The submitted commands that not every rank has answered, in order."""

    def __init__(
        self,
        config: PoolConfig,
        generation: int,
        probation: int,
        send: Callable[[int, Sequence[Buffer]], None],
        fail: Callable[[str], None],
        dump_stacks: Callable[[Sequence[int]], None],
    ) -> None:
        """No command is outstanding yet.

        config: the pool's configuration.
        generation: the number of the group, for messages.
        probation: how many commands are sent one at a time.
        send: sends a frame to every rank.
        fail: ends the group with a cause.
        dump_stacks: makes ranks log the stacks of their threads.
        """
        self._config = config
        self._generation = generation
        self.probation = probation
        self._send = send
        self._fail = fail
        self._dump_stacks = dump_stacks
        self._loop = asyncio.get_running_loop()
        self._commands: deque[_Command] = deque()
        self._last_index = 0
        self._timer: asyncio.TimerHandle | None = None  # for the oldest command's deadline

    def __len__(self) -> int:
        return len(self._commands)

    def submit(self, name: str, body: Sequence[Buffer], deadline: float) -> asyncio.Future[Reply]:
        """Send an encoded command to every rank when it is due. The future resolves to the reply.

        name: the command's name, for messages. body: the encoded command. deadline: seconds, counted from the time when
        the command becomes the oldest.
        """
        self._last_index += 1
        command = _Command(self._last_index, name, body, deadline, self._loop.create_future())
        self._commands.append(command)
        self._send_next()
        if len(self._commands) == 1:
            self._start_timer()
        return command.future

    def answer(self, rank: int, index: int, message: PoolMessage) -> None:
        """Record a rank's answer to the command `index`. ValueError: the answer is unexpected."""
        command = next((each for each in self._commands if rank not in each.answers), None)
        expected = (*_REPLIES, Failed) if rank == 0 else (Ack,)
        if command is None or command.index != index or not isinstance(message, expected):
            raise ValueError(f"{type(message).__name__} for command {index}, which was not expected")
        command.answers[rank] = message
        failed = message.failed if isinstance(message, Ack) else message
        if isinstance(failed, Failed) and failed.error == AllocationError.__name__:
            self._loop.call_later(self._config.agreement_seconds, self._require_agreement, command, rank)
        while self._commands and len(self._commands[0].answers) == self._config.processes:
            if not self._settle(self._commands[0]):
                return
            self._commands.popleft()
            self.probation = max(0, self.probation - 1)
            self._send_next()
            self._start_timer()

    def fail_all(self, error: TinkerflowError, *, crashed: bool, confessed: int | None) -> None:
        """Fail every command with `error`, because the group has ended.

        The oldest command without an answer was being executed, so it gets a SuspectError instead. A command that
        missed its deadline gets its DeadlineError.

        crashed: whether the group ended by itself. confessed: the rank that reported its own end while it executed its
        oldest unanswered command; None: no rank did.
        """
        if self._timer is not None:
            self._timer.cancel()
        executing = self._executing(confessed)
        for command in self._commands:
            if command is executing and command.overdue is None and isinstance(error, GroupFailedError):
                set_failure(command.future, SuspectError(error.message, crashed=crashed))
            else:
                set_failure(command.future, command.overdue or error)
        self._commands.clear()

    def _executing(self, confessed: int | None) -> _Command | None:
        sent = (command for command in self._commands if command.body is None)
        return next((command for command in sent if confessed is None or confessed not in command.answers), None)

    def _send_next(self) -> None:
        for command in self._commands:
            if command.body is None:
                continue
            if self.probation and command is not self._commands[0]:
                return
            self._send(command.index, command.body)
            command.body = None

    def _settle(self, command: _Command) -> bool:
        """Resolve a command that all ranks have answered. Returns False if the answers differ."""
        first = command.answers[0]
        failed = first if isinstance(first, Failed) else None
        for rank in range(1, self._config.processes):
            ack = command.answers[rank]
            if not isinstance(ack, Ack) or not same_outcome(failed, ack.failed):
                log.error("rank 0 and rank %d differ on %s: %s, %s", rank, command.name, failed or "done", ack)
                self._fail(f"rank {rank} and rank 0 differ on whether {command.name} succeeded")
                return False
        if failed is not None:
            set_failure(command.future, to_error(failed))
        elif not command.future.done() and not isinstance(first, (Failed, Ack)):
            command.future.set_result(first)
        return True

    def _require_agreement(self, command: _Command, rank: int) -> None:
        """Fail the group if other ranks may be waiting in a collective for a rank that ran out of memory."""
        if command not in self._commands:
            return
        silent = self._silent(command)
        if command is not self._commands[0]:  # other ranks are busy with an earlier command
            self._loop.call_later(self._config.agreement_seconds, self._require_agreement, command, rank)
        elif silent:
            text = f"rank {rank} had no memory left for {command.name} ({OUT_OF_MEMORY}), and rank {silent} continues"
            self._fail(text)

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._commands:
            self._timer = self._loop.call_later(self._commands[0].deadline, self._note_overdue, self._commands[0])

    def _note_overdue(self, command: _Command) -> None:
        self._dump_stacks(self._silent(command))
        self._loop.call_later(self._config.stack_seconds, self._give_up, command)

    def _give_up(self, command: _Command) -> None:
        if command not in self._commands:
            return  # the answer has arrived meanwhile
        silent = self._silent(command)
        command.overdue = DeadlineError(
            f"{command.name} did not answer within {command.deadline:g} s: "
            f"no answer from rank {silent} of worker group {self._generation}"
        )
        self._fail(f"rank {silent} missed the deadline of a command")

    def _silent(self, command: _Command) -> list[int]:
        return [rank for rank in range(self._config.processes) if rank not in command.answers]


class OutstandingTransfers:
    """The states that the ranks of one group read or write while commands run. Each rank handles its own part."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._numbers = count(1)
        self._transfers: dict[int, tuple[dict[int, Transferred], asyncio.Future[Mapping[str, Digest]]]] = {}

    def begin(self) -> tuple[int, asyncio.Future[Mapping[str, Digest]]]:
        """Register a new transfer. Returns its number, and a future of the written files."""
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._transfers[number] = {}, future
        return number, future

    def answer(self, rank: int, message: Transferred) -> None:
        """Record that a rank has completed its part, or has failed."""
        answers, future = self._transfers.get(message.number, ({}, None))
        answers[rank] = message
        if future is None or len(answers) < self._ranks:
            return
        del self._transfers[message.number]
        errors = [to_error(answer.failed) for _, answer in sorted(answers.items()) if answer.failed is not None]
        if errors:  # StoreAwayError takes precedence, because it may have caused the other errors
            set_failure(future, next((error for error in errors if isinstance(error, StoreAwayError)), errors[0]))
        elif not future.done():
            future.set_result({file: digest for answer in answers.values() for file, digest in answer.files.items()})

    def fail_all(self, error: TinkerflowError) -> None:
        """Fail every transfer, because the group has ended."""
        for _, future in self._transfers.values():
            set_failure(future, error)
        self._transfers.clear()


def set_failure(future: asyncio.Future[Any], error: TinkerflowError) -> None:
    """Fail a pending future with a copy of `error`, because raising one exception twice mixes tracebacks."""
    if not future.done():
        future.set_exception(copy.copy(error))
        future.exception()  # mark the exception as retrieved, because the caller may be gone
