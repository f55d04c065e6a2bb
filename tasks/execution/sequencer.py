"""Operations of one model overlap, but command the pool and are answered in order of their sequence ids.

All but saves: once its state is copied and everybody before is answered, a save under a name steps aside, and one
without a name when it is answered itself. Those behind it are answered meanwhile, and what depends on the stored state
(a later save, a load, the end of the model, the record of a snapshot) waits until it is settled. See recovery.py for
why nothing is lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType

from tinkerflow.backend.errors import GroupFailedError

MOST_ASIDE = 4  # saves of one model that are written at once wait: each holds a copy of the model


@dataclass
class Line:
    """The line that turns follow each other in. broken: one was interrupted, so no later one may be answered.

    failing: what was tried last for somebody aside has failed, and is tried again. aside: those that let later ones go
    first, and have not ended yet, by their number in the line.
    """

    broken: bool = False
    failing: bool = False
    aside: dict[int, asyncio.Event] = field(default_factory=dict)


class Slot:
    """The place of one operation in its model's line.

        async with slot:                    # everybody before has sent what they had to send
            reply = context.send(command)
        ... await reply                     # meanwhile the next one sends

    `await slot.to_answer()` waits until everybody before is answered or aside. `end()` lets the later ones go in any
    case; `step_aside()` lets them go although this one has not ended.
    """

    def __init__(self, after: Slot | None = None) -> None:
        """The slot that follows `after`; None: the first one."""
        self.line: Line = after.line if after else Line()
        self._number: int = after._number + 1 if after else 0
        self._sent = asyncio.Event()
        self._answered = asyncio.Event()
        self._may_send: asyncio.Event = after._sent if after else _set_event()
        self._may_answer: asyncio.Event = after._answered if after else _set_event()

    async def __aenter__(self) -> None:
        """Wait until every earlier operation has sent its commands."""
        await self._may_send.wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Pass it on."""
        self._sent.set()

    async def to_answer(self) -> None:
        """Wait until every earlier operation of the model has ended or is aside; GroupFailedError when it will not.

        Whoever is aside has waited, and is touched by nothing that happens to the line since.
        """
        await self._may_answer.wait()
        if self.line.broken and self._number not in self.line.aside:
            raise GroupFailedError("an earlier operation was interrupted")

    async def step_aside(self) -> None:
        """Let later ones go before this one, which has sent all it sends; waits while too many are aside."""
        await self.to_answer()
        while len(self.line.aside) >= MOST_ASIDE:
            await next(iter(self.line.aside.values())).wait()
        self.line.aside[self._number] = asyncio.Event()
        self._sent.set()
        self._answered.set()

    async def passed(self) -> None:
        """Wait until this one is answered or aside."""
        await self._answered.wait()

    async def settled(self) -> None:
        """Of somebody who has waited `to_answer`: wait until everybody before has ended, those aside too."""
        for settled in [event for number, event in self.line.aside.items() if number < self._number]:
            await settled.wait()

    async def end(self) -> None:
        """Nothing more will be sent or answered: pass on both turns, in order."""
        await self._may_send.wait()
        self._sent.set()
        await self._may_answer.wait()
        self._answered.set()
        if (settled := self.line.aside.pop(self._number, None)) is not None:
            settled.set()

    def anew(self) -> Slot:
        """The beginning of another line, when this one is broken: nobody is in it but those who are aside."""
        slot = Slot()
        slot.line.aside = self.line.aside
        slot._number = self._number + 1
        slot._sent.set()
        slot._answered.set()
        return slot


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
