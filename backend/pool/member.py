"""The driver's view of one rank of a group: a process, and its connection once it has connected."""

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

_LAST_FRAMES_SECONDS = 1.0  # the longest wait for the last frames of a process that has ended
_KEEP_ALIVE = codec.encode(KeepAlive())


class Member:
    """One rank. ready, rejoined: the message of this kind that the rank sent, or None."""

    def __init__(self, rank: int, process: WorkerProcess) -> None:
        """The process has not connected yet."""
        self.rank = rank
        self.process = process
        self.link: LoopLink | None = None
        self.ready: Ready | None = None
        self.rejoined: Rejoined | None = None
        self._outbox: asyncio.Queue[tuple[int, Sequence[Buffer]]] = asyncio.Queue()
        self._drained = asyncio.Event()  # all bytes that the process sent have been read

    def send(self, index: int, body: Sequence[Buffer]) -> None:
        """Queue a frame behind the earlier frames. index: the number of a command; 0: no command."""
        self._outbox.put_nowait((index, body))

    async def write(self, link: LoopLink) -> None:
        """Write the queued frames until the connection breaks."""
        try:
            while True:
                await link.write(*await self._outbox.get())
        except OSError as error:  # `read` also ends, once it has read the last frames
            log.info("the connection to rank %d broke (%s)", self.rank, error)

    async def read(self, link: LoopLink, handle: Callable[[int, PoolMessage], None]) -> None:
        """Call `handle` with the index and the message of each received frame, until the connection is closed.

        ValueError: the bytes are not a message, or `handle` refused the message.
        """
        try:
            while True:
                frame = await link.read()
                handle(frame.index, codec.decode(frame.body))
        except (EOFError, OSError):
            self._drained.set()

    async def silence(self, link: LoopLink, timeout: float) -> float:
        """Send keep-alives until the rank is silent for `timeout` seconds. Returns the seconds of silence."""

        async def keep_alive() -> None:
            self.send(0, _KEEP_ALIVE)

        # A large frame delays keep-alives, so its bytes also count as signs of life.
        return await HeartbeatMonitor(timeout, lambda: link.signs, keep_alive, lambda: self.ready is None).silence()

    async def end(self) -> Ending:
        """Wait until the process has ended. After a crash, also read its last frames, which may contain the reason."""
        ending = await self.process.ended()
        if ending.crashed and self.link is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_FRAMES_SECONDS):
                    await self._drained.wait()
        return ending
