"""How much memory requests of a project may take, for one use: their images, or the bytes that they are read from.

Each project has room of its own, so its requests wait for its own earlier ones and never for another project's.
Images take theirs from before they are decoded to the answer; a request that may be sent has at most half of it
(`MAX_REQUEST_PIXEL_BYTES`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tinkerflow.backend.spec.limits import MAX_REQUEST_PIXEL_BYTES

IMAGES = 2 * MAX_REQUEST_PIXEL_BYTES  # bytes of pixels of one project
BODIES = 2**26  # bytes of one project's bodies, while they are read


@dataclass
class _Share:
    """What one project holds, and those of its requests that wait, the oldest first."""

    held: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock)


class ProjectRoom:
    """The room of all projects, for one kind of request: those that wait for room must not be waited for by others."""

    def __init__(self, room: int = IMAGES) -> None:
        """room: bytes of each project; a request with more than that has it alone."""
        self._room = room
        self._shares: dict[str, _Share] = {}

    def held(self, owner: str) -> int:
        """How many bytes a project holds."""
        return self._shares[owner].held if owner in self._shares else 0

    @asynccontextmanager
    async def hold(self, owner: str, size: int) -> AsyncIterator[asyncio.Lock]:
        """Inside, the project holds `size` bytes. Its requests come in one after the other, in the order of asking.

        Yields the project's lock: hold it while decoding. A file may be much larger before it is resized.
        """
        share = self._shares.setdefault(owner, _Share())
        turn = asyncio.get_running_loop().create_future()
        share.waiting.append((size, turn))
        self._admit(share)
        try:
            await turn
            yield share.decoding
        finally:
            if turn.cancelled():
                share.waiting = deque(entry for entry in share.waiting if entry[1] is not turn)
            else:
                share.held -= size
            self._admit(share)
            if not share.held and not share.waiting:
                self._shares.pop(owner, None)

    def _admit(self, share: _Share) -> None:
        while share.waiting and (not share.held or share.held + share.waiting[0][0] <= self._room):
            size, turn = share.waiting.popleft()
            if not turn.cancelled():
                share.held += size
                turn.set_result(None)
