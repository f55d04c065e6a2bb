"""Who is next on the devices: training and sampling take turns, and so do the models that are trained.

A worker group executes commands one after the other, in the order in which they are sent. What is sent too early nobody
can overtake, so commands wait here, and the group has hardly more than what it executes: of training, work for one
micro-batch (and one command beyond it while nobody samples, so that the next is there when one ends), and a step of the
sampler. A forward of many micro-batches goes as so many commands (`in_parts`). Where both sides want more than there
is, a micro-batch is followed by `chunks` steps of the sampler: with 1, training waits for at most one chunk, and a
sample for at most one micro-batch. The commands of one adapter keep their order, and adapters take turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from backend.commands import (
    TOKEN_LOSSES,
    Command,
    Forward,
    NextMicroBatch,
    Reply,
    SampleProgress,
    SampleStep,
)
from backend.compute.packing import micro_batches

_LITTLE = 1 / 16  # of a micro-batch: what commands count that compute for no tokens
_ENOUGH = 1 - 1e-9


def in_parts(command: Command, microbatch_tokens: int, fsdp: int) -> Sequence[Command]:
    """The command, or what is to be executed in its stead, a micro-batch each; the last one's reply is its own."""
    if not isinstance(command, Forward) or not command.examples:
        return (command,)
    lengths = [len(example.tokens_T) for example in command.examples]
    count = micro_batches(lengths, microbatch_tokens=microbatch_tokens, row_multiple=fsdp)
    if command.backward and command.loss not in TOKEN_LOSSES:
        count *= 2  # a loss of whole sequences takes a forward pass first
    if count == 1:
        return (command,)
    return (replace(command, by_micro_batch=True), *[NextMicroBatch(command.adapter_id)] * (count - 1))


@dataclass(eq=False)
class Place:
    """A command's place in line. `async with` waits for its turn; when the block ends, others have theirs.

    adapter: whose commands it keeps its order with; "" = nobody's. size: in micro-batches. samples: it is a step of the
    sampler. reply: to be set within the block. turn: until it has come.
    """

    sharing: Sharing
    adapter: str = ""
    size: float = 0.0
    samples: bool = False
    reply: Reply | None = None
    turn: asyncio.Future[None] | None = None
    has_turn: bool = False

    async def __aenter__(self) -> Self:
        """Wait."""
        if self.turn is not None and not self.has_turn:
            try:
                await self.turn
            except asyncio.CancelledError:
                self.sharing.leave(self)
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let others go on."""
        self.sharing.leave(self)


@dataclass
class Sharing:
    """The lines before one worker group. chunks: steps of the sampler for each micro-batch, of `microbatch` tokens."""

    chunks: float
    microbatch: int = 1
    _lines: dict[str, deque[Place]] = field(default_factory=dict)  # by adapter, the longest served first
    _steps: deque[Place] = field(default_factory=deque)
    _training: int = 0  # commands that the group has
    _ahead: float = 0.0  # their size
    _stepping: int = 0  # steps of the sampler that it has
    _decoding: bool = False  # and another one is to come
    _owed: float = 0.0  # steps that the sampler may make before training goes on

    def enter(self, command: Command) -> Place:
        """Take the next place in its line. What neither trains nor samples waits for nobody."""
        place = Place(self, getattr(command, "adapter_id", ""), self._size(command), isinstance(command, SampleStep))
        if place.samples or place.adapter:
            place.turn = asyncio.get_running_loop().create_future()
            line = self._steps if place.samples else self._lines.setdefault(place.adapter, deque())
            line.append(place)
            self._go_on()
        return place

    def leave(self, place: Place) -> None:
        """It is answered, or never will be."""
        if place.samples and place.has_turn:
            self._stepping -= 1
            self._decoding = isinstance(place.reply, SampleProgress) and bool(place.reply.active or place.reply.waiting)
        elif place.adapter and place.has_turn:
            self._training -= 1
            self._ahead = self._ahead - place.size if self._training else 0.0
        elif place.samples:
            self._steps.remove(place)
        elif place.adapter:
            line = self._lines[place.adapter]
            line.remove(place)
            if not line:
                del self._lines[place.adapter]
        self._go_on()

    def _size(self, command: Command) -> float:
        match command:
            case Forward(by_micro_batch=True) | NextMicroBatch():
                return 1.0
            case Forward():
                tokens = sum(len(example.tokens_T) for example in command.examples)
                return min(1.0, max(_LITTLE, tokens / self.microbatch))
            case _:
                return _LITTLE

    def _may_sample(self) -> bool:
        return self._owed >= _ENOUGH or not (self._training or self._lines)  # or nobody trains

    def _may_train(self, size: float) -> bool:
        asked = bool(self._steps) or self._stepping > 0
        if asked and self._owed >= _ENOUGH:
            return False
        if not self._training or self._ahead + size <= 1:
            return True
        return not (asked or self._decoding) and self._ahead <= 1

    def _go_on(self) -> None:
        """Give turns to all who may have theirs now. Nobody overtakes the adapter whose turn it is."""
        while True:
            if self._steps and self._may_sample():
                self._stepping += 1
                self._owed = max(0.0, self._owed - 1)
                _call(self._steps.popleft())
            elif self._lines and self._may_train((line := next(iter(self._lines.values())))[0].size):
                place = line.popleft()
                del self._lines[place.adapter]
                if line:
                    self._lines[place.adapter] = line  # behind the others
                self._training += 1
                self._ahead += place.size
                self._owed = min(self._owed + self.chunks * place.size, max(1.0, self.chunks))
                _call(place)
            else:
                return


def _call(place: Place) -> None:
    place.has_turn = True
    if place.turn is not None and not place.turn.done():
        place.turn.set_result(None)
