"""The order in which commands are sent to the serving group.

A worker group executes commands in the order in which they are sent, and no command can overtake another in the group.
Commands therefore wait here, and the group holds few commands besides the command that it executes. `TrainingQueue`
shares training between projects and, within a project, between its adapters. `CommandScheduler` alternates between
training and the steps of the sampler. A large `Forward` is sent in parts of one micro-batch (`in_parts`), so other
commands need not wait for the whole command.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tinkerflow.backend.core.errors import GroupFailedError, SuspectError
from tinkerflow.backend.core.fairness import FairQueue
from tinkerflow.backend.spec.commands import (
    Command,
    Forward,
    GroupInfo,
    NextMicroBatch,
    Reply,
    SampleProgress,
    SampleStep,
)
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.backend.spec.packing import ATTENTION_TOKENS, micro_batches
from tinkerflow.backend.spec.prefix_trees import prefix_trees
from tinkerflow.backend.spec.traced_work import STEP_OPERATIONS, loss_steps

_SMALL_SIZE = 1 / 16  # of a micro-batch: the size of commands that process no tokens
_ENOUGH = 1 - 1e-9
_TURN = 1.0  # micro-batches that an adapter sends per turn


def in_parts(
    command: Command,
    microbatch_tokens: int,
    fsdp: int,
    attention_tokens: int = ATTENTION_TOKENS,
    *,
    branch_tokens: int = 0,
    context_parallel: int = 1,
    few_shapes: bool = False,
) -> Sequence[Command]:
    """Split a command into one command per micro-batch and per step of a custom loss.

    The reply to the last part is the reply to `command`.

    microbatch_tokens, attention_tokens, branch_tokens, few_shapes: see GroupInfo. fsdp: the size of the mesh axis that
    splits the rows. context_parallel: see GroupConfig.
    """
    if not isinstance(command, Forward) or not command.examples:
        return (command,)
    lengths = [len(example.tokens_T) for example in command.examples]
    loss = LOSSES[command.loss]
    a_pass = micro_batches(
        lengths,
        microbatch_tokens=microbatch_tokens,
        row_multiple=fsdp,
        attention_tokens=attention_tokens,
        branch_tokens=branch_tokens,
        context_parallel=context_parallel,
        few_shapes=few_shapes,
        trees=partial(prefix_trees, command.examples, loss.of_pass, branch_tokens),
    )
    micro_batch, loss_step = NextMicroBatch(command.adapter_id), NextMicroBatch(command.adapter_id, of_loss=True)
    passes = loss.passes(backward=command.backward)
    parts = [*[micro_batch] * a_pass, *[loss_step] * loss_steps(command), *[micro_batch] * (a_pass * (passes - 1))]
    return (command,) if len(parts) == 1 else (command.copy_with(by_micro_batch=True), *parts[1:])


@dataclass(eq=False)
class QueuedCommand:
    """A command that waits until it is sent.

    owner: the project of the command.
    adapter: the adapter whose commands keep their order; "": none.
    size: in micro-batches.
    samples: whether the command is a step of the sampler.
    send: sends the command; called once.
    reply: resolved with the group's reply. The command is sent even if its caller gives up and cancels the reply.
    """

    owner: str
    adapter: str
    size: float
    samples: bool
    send: Callable[[], asyncio.Future[Reply]]
    reply: asyncio.Future[Reply]


class TrainingQueue:
    """The training commands of all projects. Each project gets an equal share, regardless of its number of adapters.

    Two levels of start-time fair queueing: between projects with commands, and between the adapters of each project.
    The selected adapter sends up to one micro-batch, so the small commands of an optimizer step stay together.
    """

    def __init__(self) -> None:
        self._owners: FairQueue[None] = FairQueue()  # a ticket for each project waiting for its turn
        self._adapters: dict[str, FairQueue[None]] = {}  # by project: a ticket for each waiting adapter
        self._commands: dict[str, deque[QueuedCommand]] = {}  # by adapter: its commands, if any
        self._turn: tuple[str, str] | None = None  # the project and adapter whose turn it is, without tickets
        self._spent = 0.0  # micro-batches sent during this turn

    def __len__(self) -> int:
        """The number of adapters with commands."""
        return len(self._commands)

    def push(self, queued: QueuedCommand) -> None:
        """Add a command behind the earlier commands of its adapter."""
        if commands := self._commands.get(queued.adapter):
            commands.append(queued)
            return
        self._commands[queued.adapter] = deque((queued,))
        self._await_turn(queued.owner, queued.adapter)

    def peek(self) -> QueuedCommand | None:
        """The next command; None if the queue is empty."""
        if self._turn is not None:
            return self._commands[self._turn[1]][0]
        if (project := self._owners.peek()) is None:
            return None
        adapter = self._adapters[project.owner].peek()
        assert adapter is not None, "a project that waits has an adapter that waits"
        return self._commands[adapter.owner][0]

    def pop(self) -> QueuedCommand:
        """Remove and return the next command, and charge its size."""
        owner, adapter = self._turn or self._begin_turn()
        commands = self._commands[adapter]
        queued = commands.popleft()
        self._spent += queued.size
        self.charge(owner, adapter, queued.size)
        if not commands:
            del self._commands[adapter]
        if not commands or self._spent + commands[0].size > _TURN:
            self._end_turn(owner, adapter)
        return queued

    def charge(self, owner: str, adapter: str, micro_batches: float) -> None:
        """Charge an adapter's work to its project, and to the adapter within the project."""
        self._owners.charge(owner, micro_batches)
        if owner in self._adapters:
            self._adapters[owner].charge(adapter, micro_batches)

    def _await_turn(self, owner: str, adapter: str) -> None:
        self._adapters.setdefault(owner, FairQueue()).push(adapter, None, cost=0.0)
        if not self._owners.waits(owner) and (self._turn is None or self._turn[0] != owner):
            self._owners.push(owner, None, cost=0.0)

    def _begin_turn(self) -> tuple[str, str]:
        project = next(iter(self._owners))
        adapter = next(iter(self._adapters[project.owner]))
        self._owners.serve(project)
        self._adapters[project.owner].serve(adapter)
        self._turn, self._spent = (project.owner, adapter.owner), 0.0
        return self._turn

    def _end_turn(self, owner: str, adapter: str) -> None:
        self._turn = None
        if adapter in self._commands:
            self._await_turn(owner, adapter)
        elif self._adapters[owner]:
            self._owners.push(owner, None, cost=0.0)
        self._adapters = {name: queue for name, queue in self._adapters.items() if queue or self._owners.owes(name)}


@dataclass
class CommandScheduler:
    """Sends each command when it is due. Training and sampling take turns.

    The group holds training commands for at most one micro-batch, and one step of the sampler. While no sampling is
    expected, it holds one more training command, so that the devices never wait. When both training and sampling wait,
    `chunks` steps of the sampler follow each micro-batch. With 1, training waits for one chunk, and sampling for one
    micro-batch.

    chunks: steps of the sampler per micro-batch.
    microbatch: tokens in a micro-batch.
    microbatch_work: floating-point operations per device for a micro-batch.
    step_seconds: the longest time that the engine usually needs between two steps of the sampler.
    """

    chunks: float
    microbatch: int = 1
    microbatch_work: float = math.inf
    step_seconds: float = 0.05
    _waiting: TrainingQueue = field(default_factory=TrainingQueue)
    _steps: deque[QueuedCommand] = field(default_factory=deque)
    _training: int = 0  # training commands that the group holds
    _ahead: float = 0.0  # the size of these training commands
    _stepping: int = 0  # steps of the sampler that the group holds
    _expected: asyncio.TimerHandle | None = None  # runs while another step of the sampler is expected
    _owed: float = 0.0  # steps that the sampler may make before training continues

    @property
    def idle(self) -> bool:
        """Whether no training command and no step of the sampler waits or is being executed."""
        return not (self._waiting or self._steps or self._training or self._stepping)

    def serve(self, info: GroupInfo) -> None:
        """Schedule commands for the group that `info` describes."""
        self.microbatch = info.microbatch_tokens
        # A token costs 2 operations per parameter in the forward pass, and 4 in the backward pass.
        self.microbatch_work = 6.0 * info.parameters * info.microbatch_tokens / len(info.devices)

    def submit(
        self, command: Command, send: Callable[[], asyncio.Future[Reply]], owner: str = ""
    ) -> asyncio.Future[Reply]:
        """Call `send` when the command is due. The future resolves to the reply.

        A command that neither trains nor samples does not wait. owner: the project that pays for the command.
        """
        reply = asyncio.get_running_loop().create_future()
        samples = isinstance(command, SampleStep)
        queued = QueuedCommand(owner, getattr(command, "adapter_id", ""), self._size(command), samples, send, reply)
        if samples:
            self._expect(None)
            self._steps.append(queued)
        elif queued.adapter:
            self._waiting.push(queued)
        else:
            self._send(queued)
        self._send_due()
        return reply

    async def submit_parts(
        self, parts: Sequence[Command], send: Callable[[Command], asyncio.Future[Reply]], owner: str = ""
    ) -> Reply:
        """Submit the parts of a command (`in_parts`), and return the reply to the last part.

        When a part fails, later parts are not sent. The first error that is not a failure of the group is raised,
        because the group may have ended during a later part. send: sends a part. owner: see `submit`.
        """
        sent: list[asyncio.Future[Reply]] = []

        def send_next(part: Command) -> asyncio.Future[Reply]:
            for earlier in sent:
                if earlier.done():
                    earlier.result()  # raises if an earlier part has failed
            sent.append(send(part))
            return sent[-1]

        waiting = [self.submit(part, partial(send_next, part), owner) for part in parts]
        replies = await asyncio.gather(*waiting, return_exceptions=True)
        failed = [reply for reply in replies if isinstance(reply, BaseException)]
        if failed:
            raise min(
                failed, key=lambda error: isinstance(error, GroupFailedError) and not isinstance(error, SuspectError)
            )
        return waiting[-1].result()

    def _size(self, command: Command) -> float:
        match command:
            case NextMicroBatch(of_loss=True):  # may take longer than a micro-batch of a small model
                return max(1.0, STEP_OPERATIONS / self.microbatch_work)
            case Forward(by_micro_batch=True) | NextMicroBatch():
                return 1.0
            case Forward():
                tokens = sum(len(example.tokens_T) for example in command.examples)
                return min(1.0, max(_SMALL_SIZE, tokens / self.microbatch))
            case _:
                return _SMALL_SIZE

    def _send_due(self) -> None:
        while True:
            if self._steps and self._may_sample():
                self._stepping += 1
                self._owed = max(0.0, self._owed - 1)
                self._send(self._steps.popleft())
            elif (first := self._waiting.peek()) is not None and self._may_train(first.size):
                queued = self._waiting.pop()
                self._training += 1
                self._ahead += queued.size
                self._owed = min(self._owed + self.chunks * queued.size, max(1.0, self.chunks))
                self._send(queued)
            else:
                return

    def _may_sample(self) -> bool:
        return self._owed >= _ENOUGH or not (self._training or self._waiting)

    def _may_train(self, size: float) -> bool:
        sampling = bool(self._steps or self._stepping or self._expected)
        if sampling and self._owed >= _ENOUGH:
            return False
        return not self._training or self._ahead + size <= 1 or (not sampling and self._ahead <= 1)

    def _send(self, queued: QueuedCommand) -> None:
        try:
            sent = queued.send()
        except Exception as error:  # noqa: BLE001  re-raised in the caller
            sent = asyncio.get_running_loop().create_future()
            sent.set_exception(error)
        sent.add_done_callback(partial(self._answered, queued))

    def _answered(self, queued: QueuedCommand, sent: asyncio.Future[Reply]) -> None:
        error = None if sent.cancelled() else sent.exception()
        reply = None if sent.cancelled() or error else sent.result()
        if queued.samples:
            self._stepping -= 1
            more = isinstance(reply, SampleProgress) and (reply.active or reply.waiting)
            self._expect(self.step_seconds if more else None)
        elif queued.adapter:
            self._training -= 1
            self._ahead = self._ahead - queued.size if self._training else 0.0
            if not (self._training or self._waiting):
                self._waiting = TrainingQueue()  # clears all debts when the group is idle
        if not queued.reply.done():  # the caller may have given up
            if error is not None:
                queued.reply.set_exception(error)
            elif reply is not None:
                queued.reply.set_result(reply)
            else:
                queued.reply.cancel()
        self._send_due()

    def _expect(self, seconds: float | None) -> None:
        """Expect another step of the sampler within `seconds`; None: expect none."""
        if self._expected is not None:
            self._expected.cancel()
        loop = asyncio.get_running_loop()
        self._expected = None if seconds is None else loop.call_later(seconds, self._stop_expecting)

    def _stop_expecting(self) -> None:
        self._expected = None
        self._send_due()
