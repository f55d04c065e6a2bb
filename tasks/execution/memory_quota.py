"""Memory quotas of projects for one use: the images of their requests, or the bodies while they are read.

A project's requests wait for its own earlier requests, never for another project's. Images count from before they are
decoded until the answer. A request may use at most half of a project's image quota (`MAX_REQUEST_PIXEL_BYTES`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tinkerflow.backend.spec.limits import MAX_REQUEST_PIXEL_BYTES

IMAGES = 2 * MAX_REQUEST_PIXEL_BYTES  # bytes of one project's pixels
BODIES = 2**26  # bytes of one project's bodies, while they are read


@dataclass
class _Share:
    """The bytes that one project has reserved, and its waiting requests, oldest first."""

    reserved: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock)


class MemoryQuota:
    """The quotas of all projects for one use."""

    def __init__(self, quota: int = IMAGES) -> None:
        """quota: bytes of each project. A request that exceeds the quota runs alone."""
        self._quota = quota
        self._shares: dict[str, _Share] = {}

    def reserved(self, owner: str) -> int:
        """The number of bytes that a project has reserved."""
        return self._shares[owner].reserved if owner in self._shares else 0

    @asynccontextmanager
    async def reserve(self, owner: str, size: int) -> AsyncIterator[asyncio.Lock]:
        """Reserve `size` bytes of the project's quota for the block. The project's requests enter in order of arrival.

        Yields the project's lock. Hold it while an image is decoded: the image may be much larger before it is resized.
        """
        share = self._shares.setdefault(owner, _Share())
        admitted = asyncio.get_running_loop().create_future()
        share.waiting.append((size, admitted))
        self._admit(share)
        try:
            await admitted
            yield share.decoding
        finally:
            if admitted.cancelled():
                share.waiting = deque(entry for entry in share.waiting if entry[1] is not admitted)
            else:
                share.reserved -= size
            self._admit(share)
            if not share.reserved and not share.waiting:
                self._shares.pop(owner, None)

    def _admit(self, share: _Share) -> None:
        while share.waiting and (not share.reserved or share.reserved + share.waiting[0][0] <= self._quota):
            size, admitted = share.waiting.popleft()
            if not admitted.cancelled():
                share.reserved += size
                admitted.set_result(None)
