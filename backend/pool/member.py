"""One rank of a group, as its driver sees it: a process, and its connection once it has connected."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from tinkerflow.backend.pool.host.places import WorkerProcess
from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.codec import Buffer
from tinkerflow.backend.pool.protocol.frames import LoopLink
from tinkerflow.backend.pool.protocol.messages import KeepAlive, Ready, Rejoined
from tinkerflow.backend.spec.pool_message import PoolMessage
from tinkerflow.backend.supervise import Ending, HeartbeatMonitor

log = logging.getLogger(__name__)

_LAST_FRAMES_SECONDS = 1.0  # from the end of a process until the frames that it sent before have been read
_KEEP_ALIVE = codec.encode(KeepAlive())


class Member:
    """One rank. ready, rejoined: the messages of these kinds that it has sent."""

    def __init__(self, rank: int, process: WorkerProcess) -> None:
        """The process has not connected yet."""
        self.rank = rank
        self.process = process
        self.link: LoopLink | None = None
        self.ready: Ready | None = None
        self.rejoined: Rejoined | None = None
        self._outbox: asyncio.Queue[tuple[int, Sequence[Buffer]]] = asyncio.Queue()
        self._drained = asyncio.Event()  # all that it sent has been read

    def send(self, index: int, body: Sequence[Buffer]) -> None:
        """Send a frame after the earlier ones. index: of a command, 0 = none."""
        self._outbox.put_nowait((index, body))

    async def write(self, link: LoopLink) -> None:
        """Write the frames that are sent until the connection breaks."""
        try:
            while True:
                await link.write(*await self._outbox.get())
        except OSError as error:  # `read` ends, too, once it has read the last frames
            log.info("the connection to rank %d broke (%s)", self.rank, error)

    async def read(self, link: LoopLink, take: Callable[[int, PoolMessage], None]) -> None:
        """Give each received message to `take` with its frame's index, until the connection is closed.

        ValueError for bytes that are no message, and as `take` raises it for a message that is not due.
        """
        try:
            while True:
                frame = await link.read()
                take(frame.index, codec.decode(frame.body))
        except (EOFError, OSError):
            self._drained.set()

    async def silence(self, link: LoopLink, timeout: float) -> float:
        """Send keep-alives until signs of life stay away for `timeout` seconds: for how many seconds they did."""

        async def keep_alive() -> None:
            self.send(0, _KEEP_ALIVE)

        # The bytes of a large frame, which delay keep-alives, are signs of life, too.
        return await HeartbeatMonitor(timeout, lambda: link.signs, keep_alive, lambda: self.ready is None).silence()

    async def end(self) -> Ending:
        """Wait until the process has ended. If it crashed, its last frames have been read: they may tell the reason."""
        ending = await self.process.ended()
        if ending.crashed and self.link is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_FRAMES_SECONDS):
                    await self._drained.wait()
        return ending
