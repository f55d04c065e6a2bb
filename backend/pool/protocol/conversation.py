"""Messages between the driver and a host's agent while both are alive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.frames import LARGEST_OF_HOSTS, LoopLink
from tinkerflow.backend.pool.protocol.messages import KeepAlive
from tinkerflow.backend.spec.pool_message import PoolMessage
from tinkerflow.backend.supervise import HeartbeatMonitor


class Conversation:
    """One connection that carries messages and heartbeats in both directions.

    The conversation ends with the connection, when the other end is silent, or through `end`.
    """

    def __init__(self, link: LoopLink, silence: float) -> None:
        """link: closed at the end of `run`. silence: seconds after which a silent other end counts as lost."""
        self.closed = False  # whether the other end closed the connection, for example because its process ended
        self._link = link
        self._monitor = HeartbeatMonitor(silence, lambda: link.signs, self._beat)
        self._outbox: asyncio.Queue[PoolMessage] = asyncio.Queue()
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> str | None:
        """Why the conversation has ended; None while it continues."""
        return self._over.result() if self._over.done() else None

    def send(self, message: PoolMessage) -> None:
        """Queue a message behind the earlier messages. Messages are lost when the conversation ends."""
        self._outbox.put_nowait(message)

    def end(self, why: str) -> None:
        """End the conversation. `run` returns `why` unless the conversation has ended for another reason."""
        if not self._over.done():
            self._over.set_result(why)

    async def run(self, handle: Callable[[PoolMessage], Awaitable[None]]) -> str:
        """Call `handle` with each received message, in order, until the conversation ends. Returns why it ended.

        handle: raises ValueError for a message that the other end should not have sent, which ends the conversation.
        Raises any other error of `handle`.
        """
        works = [asyncio.create_task(work) for work in (self._send(), self._receive(handle), self._watch_silence())]
        try:
            await asyncio.wait((*works, self._over), return_when=asyncio.FIRST_COMPLETED)
            for task in works:
                if task.done():
                    self.end(task.result())
            return await self._over
        finally:
            self.end("it was closed by this side")
            for task in works:
                task.cancel()
            try:
                await asyncio.gather(*works, return_exceptions=True)
            finally:  # also if this task is cancelled meanwhile
                self._link.close()

    async def _send(self) -> str:
        try:
            while True:
                await self._link.write(0, codec.encode(await self._outbox.get()))
        except OSError as error:
            return f"its connection broke ({error})"

    async def _receive(self, handle: Callable[[PoolMessage], Awaitable[None]]) -> str:
        try:
            while True:
                frame = await self._link.read(LARGEST_OF_HOSTS)
                message = codec.decode(frame.body)
                if not isinstance(message, KeepAlive):
                    await handle(message)
        except (EOFError, ConnectionResetError):
            self.closed = True
            return "it closed the connection"
        except OSError as error:
            return f"its connection broke ({error})"
        except ValueError as error:
            return f"it sent an invalid message: {error}"

    async def _beat(self) -> None:
        self.send(KeepAlive())

    async def _watch_silence(self) -> str:
        return f"it sent no heartbeat for {await self._monitor.silence():g} s (unreachable, or stopped?)"
