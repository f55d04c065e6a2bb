"""Which models of which all parameters were trained are sampled at a time: as many as the workers' memory may hold.

Their weights wait in each worker's host memory while they are sampled, so requests for other ones wait here. All of
them stand in one line, which owners share by requests (start-time fair queueing, as in the sampler's scheduler). The
first in line waits until there is room for its weights, and whoever comes later waits behind it, also for weights that
are there: else requests that never cease would keep others out for ever.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class _InLine:
    start: int
    owner: str
    weights: str
    turn: asyncio.Future[None]


class WholeTurns:
    """The line of one base model's requests for such models."""

    def __init__(self, host_bytes: int = 0) -> None:
        """host_bytes: what the weights may take of each worker's memory, beside those of one model."""
        self.host_bytes = host_bytes
        self._size = 0  # of one model's weights; 0: none was loaded so far
        self._users: Counter[str] = Counter()
        self._line: list[_InLine] = []
        self._now = 0
        self._next: dict[str, int] = {}  # of owners that wait

    @property
    def most(self) -> int:
        """How many models are sampled at a time."""
        return 1 + (self.host_bytes // self._size if self._size else 0)

    def loaded(self, size: int) -> None:
        """The weights of one model take so many bytes: as many as of any other one."""
        self._size = size
        self._advance()

    @asynccontextmanager
    async def hold(self, owner: str, weights: str) -> AsyncIterator[None]:
        """Inside, a request of the owner's may have these weights loaded, and sample them."""
        start = max(self._now, self._next.get(owner, 0))
        self._next[owner] = start + 1
        own = _InLine(start, owner, weights, asyncio.get_running_loop().create_future())
        bisect.insort(self._line, own, key=lambda one: one.start)
        self._advance()
        try:
            await own.turn
            yield
        finally:
            if own.turn.cancelled():
                self._line.remove(own)
            else:
                self._users -= Counter((weights,))  # without what comes to 0
            self._advance()

    def _advance(self) -> None:
        while self._line:
            first = self._line[0]
            if first.weights not in self._users and len(self._users) >= self.most:
                break
            del self._line[0]
            self._now = first.start
            self._users[first.weights] += 1
            first.turn.set_result(None)
        waiting = {one.owner for one in self._line}
        self._next = {owner: start for owner, start in self._next.items() if owner in waiting}
