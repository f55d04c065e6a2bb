"""Who is next on the devices: training and sampling take turns, and so do the models that are trained.

A worker group executes commands one after the other, in the order in which they are sent. What is sent too early nobody
can overtake, so commands wait here, and the group has hardly more than what it executes: of training, work for one
micro-batch (and one command beyond it while nobody samples, so that the next is there when one ends), and a step of the
sampler. A forward of many micro-batches goes as so many commands (`in_parts`). Where both sides want more than there
is, a micro-batch is followed by `chunks` steps of the sampler: with 1, training waits for one chunk, and between two
steps of the sampler there is one micro-batch. The commands of one adapter keep their order, and adapters take turns,
with up to a micro-batch each (deficit round robin: Shreedhar and Varghese, SIGCOMM 1995).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tinkerflow.backend.commands import (
    Command,
    Forward,
    NextMicroBatch,
    Reply,
    SampleProgress,
    SampleStep,
)
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.backend.spec.packing import micro_batches

_LITTLE = 1 / 16  # of a micro-batch: what commands count that compute for no tokens
_ENOUGH = 1 - 1e-9


def in_parts(command: Command, microbatch_tokens: int, fsdp: int) -> Sequence[Command]:
    """The command, or what is to be executed in its stead, a micro-batch each; the last one's reply is its own."""
    if not isinstance(command, Forward) or not command.examples:
        return (command,)
    lengths = [len(example.tokens_T) for example in command.examples]
    a_pass = micro_batches(lengths, microbatch_tokens=microbatch_tokens, row_multiple=fsdp)
    count = a_pass * LOSSES[command.loss].passes(backward=command.backward)
    if count == 1:
        return (command,)
    return (replace(command, by_micro_batch=True), *[NextMicroBatch(command.adapter_id)] * (count - 1))


@dataclass(eq=False)
class _Place:
    """A command in line. `send` is called when its turn comes, at once, so that nothing gets between the two.

    adapter: whose commands it keeps its order with; "" = nobody's. size: in micro-batches. samples: it is a step of the
    sampler. reply: what its caller waits for; a caller that gives up cancels that, and the command goes its way.
    """

    adapter: str
    size: float
    samples: bool
    send: Callable[[], asyncio.Future[Reply]]
    reply: asyncio.Future[Reply]


@dataclass
class CommandScheduler:
    """The lines before one worker group. chunks: steps of the sampler for each micro-batch, of `microbatch` tokens."""

    chunks: float
    microbatch: int = 1
    step_seconds: float = 0.05  # the engine takes so long at most between two steps of the sampler
    _lines: dict[str, deque[_Place]] = field(default_factory=dict)  # by adapter, the least recently served first
    _steps: deque[_Place] = field(default_factory=deque)
    _served: str = ""  # the adapter that was served last
    _spent: float = 0.0  # what it was sent in a row: a step's small commands stay together, and so do their answers
    _training: int = 0  # commands that the group has
    _ahead: float = 0.0  # their size
    _stepping: int = 0  # steps of the sampler that it has
    _expected: asyncio.TimerHandle | None = None  # while another step is to come, as the last reply said
    _owed: float = 0.0  # steps that the sampler may make before training goes on

    def submit(self, command: Command, send: Callable[[], asyncio.Future[Reply]]) -> asyncio.Future[Reply]:
        """Call `send` when it is the command's turn; what that gives. What neither trains nor samples has it now."""
        reply = asyncio.get_running_loop().create_future()
        samples = isinstance(command, SampleStep)
        place = _Place(getattr(command, "adapter_id", ""), self._size(command), samples, send, reply)
        if samples:
            self._expect(None)
            self._steps.append(place)
        elif place.adapter:
            self._lines.setdefault(place.adapter, deque()).append(place)
        else:
            self._send(place)
        self._go_on()
        return reply

    def _size(self, command: Command) -> float:
        match command:
            case Forward(by_micro_batch=True) | NextMicroBatch():
                return 1.0
            case Forward():
                tokens = sum(len(example.tokens_T) for example in command.examples)
                return min(1.0, max(_LITTLE, tokens / self.microbatch))
            case _:
                return _LITTLE

    def _go_on(self) -> None:
        """Send all whose turn it is now. Nobody overtakes the adapter that comes first."""
        while True:
            if self._steps and self._may_sample():
                self._stepping += 1
                self._owed = max(0.0, self._owed - 1)
                self._send(self._steps.popleft())
            elif self._lines and self._may_train((line := next(iter(self._lines.values())))[0].size):
                place = line.popleft()
                self._spent = place.size + (self._spent if self._served == place.adapter else 0.0)
                self._served = place.adapter
                if not line or self._spent + line[0].size > 1:
                    del self._lines[place.adapter]
                if line:
                    self._lines.setdefault(place.adapter, line)  # behind the others, or where it was
                self._training += 1
                self._ahead += place.size
                self._owed = min(self._owed + self.chunks * place.size, max(1.0, self.chunks))
                self._send(place)
            else:
                return

    def _may_sample(self) -> bool:
        return self._owed >= _ENOUGH or not (self._training or self._lines)  # or nobody trains

    def _may_train(self, size: float) -> bool:
        asked = bool(self._steps or self._stepping or self._expected)
        if asked and self._owed >= _ENOUGH:
            return False
        return not self._training or self._ahead + size <= 1 or (not asked and self._ahead <= 1)

    def _send(self, place: _Place) -> None:
        try:
            sent = place.send()
        except Exception as error:  # noqa: BLE001  the caller's
            sent = asyncio.get_running_loop().create_future()
            sent.set_exception(error)
        sent.add_done_callback(partial(self._answered, place))

    def _answered(self, place: _Place, sent: asyncio.Future[Reply]) -> None:
        error = None if sent.cancelled() else sent.exception()
        reply = None if sent.cancelled() or error else sent.result()
        if place.samples:
            self._stepping -= 1
            more = isinstance(reply, SampleProgress) and (reply.active or reply.waiting)
            self._expect(self.step_seconds if more else None)
        elif place.adapter:
            self._training -= 1
            self._ahead = self._ahead - place.size if self._training else 0.0
        if not place.reply.done():  # else its caller has given up
            if error is not None:
                place.reply.set_exception(error)
            elif reply is not None:
                place.reply.set_result(reply)
            else:
                place.reply.cancel()
        self._go_on()

    def _expect(self, seconds: float | None) -> None:
        """Another step of the sampler is to come within so many seconds, or none."""
        if self._expected is not None:
            self._expected.cancel()
        loop = asyncio.get_running_loop()
        self._expected = None if seconds is None else loop.call_later(seconds, self._nobody_came)

    def _nobody_came(self) -> None:
        self._expected = None
        self._go_on()
