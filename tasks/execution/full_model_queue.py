"""The queue for full-parameter models: only as many are sampled at once as fit into the workers' host memory.

The weights of such a model stay in each worker's host memory while it is sampled, so requests for other models wait
here. All requests wait in one queue, which owners share fairly (`FairQueue`, one request costs one). The first request
waits until its weights fit. Later requests wait behind it, even if their weights are already loaded. Otherwise a steady
stream of requests for one model would starve the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tinkerflow.backend.core.fairness import FairQueue


@dataclass(frozen=True, eq=False)
class _FullModelRequest:
    weights: str
    admitted: asyncio.Future[None]


class FullModelQueue:
    """The queue of one base model's requests for full-parameter models."""

    def __init__(self, host_bytes: int = 0) -> None:
        """host_bytes: bytes of each worker's memory for the weights of such models, excluding the first one's."""
        self.host_bytes = host_bytes
        self._size = 0  # bytes of one model's weights; 0: none has been loaded
        self._users: Counter[str] = Counter()
        self._queue: FairQueue[_FullModelRequest] = FairQueue()

    @property
    def most(self) -> int:
        """The number of models that may be sampled at the same time."""
        return 1 + (self.host_bytes // self._size if self._size else 0)

    def loaded(self, size: int) -> None:
        """Note the size of one model's weights in bytes. All models on one base model have the same size."""
        self._size = size
        self._advance()

    @asynccontextmanager
    async def reserve(self, owner: str, weights: str) -> AsyncIterator[None]:
        """Wait until the owner's request may load these weights and sample them. It does so inside the block."""
        waiting = _FullModelRequest(weights, asyncio.get_running_loop().create_future())
        self._queue.push(owner, waiting)
        self._advance()
        try:
            await waiting.admitted
            yield
        finally:
            if not waiting.admitted.cancelled():
                self._users -= Counter((weights,))  # drops weights whose count is 0
            self._advance()

    def _advance(self) -> None:
        while (ticket := self._queue.peek()) is not None:
            if ticket.item.admitted.cancelled():  # perhaps before its task has noticed
                self._queue.withdraw(ticket)
                continue
            if ticket.item.weights not in self._users and len(self._users) >= self.most:
                break
            first = self._queue.serve(ticket)
            self._users[first.weights] += 1
            first.admitted.set_result(None)
