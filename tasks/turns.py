"""Operations of one model overlap, but command the pool and are answered in order of their sequence ids."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType

from backend.errors import GroupFailedError


@dataclass
class Line:
    """The line that turns follow each other in. broken: one was interrupted, so no later one may be answered."""

    broken: bool = False


class Turn:
    """The place of one operation in its model's line.

        async with turn:                    # everybody before has sent what they had to send
            reply = runtime.send(command)
        ... await reply                     # meanwhile the next one sends

    `await turn.to_answer()` waits until everybody before is answered. `end()` lets the later ones go in any case.
    """

    def __init__(self, after: Turn | None = None) -> None:
        """The turn that follows `after`; None: the first one."""
        self.line: Line = after.line if after else Line()
        self._sent = asyncio.Event()
        self._answered = asyncio.Event()
        self._may_send: asyncio.Event = after._sent if after else _set_event()
        self._may_answer: asyncio.Event = after._answered if after else _set_event()

    async def __aenter__(self) -> None:
        """Wait for one's turn to send commands."""
        await self._may_send.wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Pass it on."""
        self._sent.set()

    async def to_answer(self) -> None:
        """Wait until every earlier operation of the model is answered; GroupFailedError when that will not be."""
        await self._may_answer.wait()
        if self.line.broken:
            raise GroupFailedError("an earlier operation was interrupted")

    async def end(self) -> None:
        """Nothing more will be sent or answered: pass on both turns, in order."""
        await self._may_send.wait()
        self._sent.set()
        await self._may_answer.wait()
        self._answered.set()


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
