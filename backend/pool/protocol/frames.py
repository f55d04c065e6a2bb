"""Frames over TCP: the messages of one connection, in order.

    frame = magic | u32 generation | u64 index | u64 length | body

The body is a message that codec.py has encoded. A frame of another generation, or without the magic number, is an
error, because only a faulty program sends such frames. handshake.py makes the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinkerflow.backend.pool.protocol.codec import Buffer

MAGIC = b"TkF1"
_HEADER = struct.Struct("!4sIQQ")
_PIECE = 1 << 20  # bytes in one call to send
_LARGEST = 1 << 36  # bytes of one body; the state of a large adapter is a few gigabytes
LARGEST_OF_HOSTS = 1 << 20  # bytes of one body between a driver and an agent


@dataclass(frozen=True)
class Frame:
    """One received message, not yet decoded."""

    index: int
    body: memoryview


def header(generation: int, index: int, body: Sequence[Buffer]) -> bytes:
    """The header of a frame with this body."""
    return _HEADER.pack(MAGIC, generation, index, sum(map(len, body)))


def _parse(raw: bytes | bytearray, generation: int, largest: int) -> tuple[int, int]:
    magic, theirs, index, length = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise ValueError(f"invalid bytes instead of a frame: {bytes(raw[:16])!r}")
    if length > largest:
        raise ValueError(f"a frame of {length} bytes is over the limit of {largest} bytes")
    if theirs != generation:
        raise ValueError(f"a frame of generation {theirs} in generation {generation}")
    return index, length


# ------------------------------------------------------------------ the worker's end: blocking
class WorkerLink:
    """The worker's connection to the driver. One thread may read while another writes."""

    def __init__(self, sock: socket.socket, generation: int) -> None:
        """sock: a connected, authenticated socket."""
        self._sock = sock
        self._generation = generation

    def read(self) -> Frame:
        """Receive the next frame. EOFError: the driver is gone. ValueError: the bytes are garbage."""
        index, length = _parse(receive_now(self._sock, _HEADER.size), self._generation, _LARGEST)
        return Frame(index, memoryview(receive_now(self._sock, length)))

    def write(self, index: int, body: Sequence[Buffer]) -> None:
        """Send one frame. Callers must hold a lock."""
        first = header(self._generation, index, body)
        if len(body) == 1:
            self._sock.sendall(first + body[0])  # one packet, one wake-up of the driver
            return
        self._sock.sendall(first)
        for part in body:
            self._sock.sendall(part)

    def hang_up(self) -> None:
        """End the connection. Threads that read or write get EOFError or OSError."""
        with contextlib.suppress(OSError):  # the connection has already ended
            self._sock.shutdown(socket.SHUT_RDWR)

    def to_loop(self) -> LoopLink:
        """Convert the connection for use in an event loop. This object must not be used afterwards."""
        self._sock.setblocking(False)
        return LoopLink(self._sock, self._generation, 0)

    def close(self) -> None:
        self._sock.close()


def receive_now(sock: socket.socket, size: int) -> bytearray:
    """Receive `size` bytes from a blocking socket. EOFError: the other end closed it."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]
    return data


# ------------------------------------------------------------------ the driver's end, and an agent's: asyncio
class LoopLink:
    """A connection from driver to worker or agent, or from agent to driver. One task may read, another write."""

    def __init__(self, sock: socket.socket, generation: int, rank: int) -> None:
        """sock: a connected, authenticated, non-blocking socket."""
        self.rank = rank
        self.signs = 0  # signs of life: how often bytes were received, or a MiB was sent (HeartbeatMonitor)
        self.sent = 0  # bytes
        self._sock = sock
        self._generation = generation

    @property
    def address(self) -> str:
        return str(self._sock.getsockname()[0])

    async def read(self, largest: int = _LARGEST) -> Frame:
        """Receive the next frame. EOFError: the other end is gone. ValueError: the bytes are garbage.

        largest: the most bytes in the body. Memory is allocated only after the length is checked.
        """
        index, length = _parse(await receive(self._sock, _HEADER.size, self._count), self._generation, largest)
        return Frame(index, memoryview(await receive(self._sock, length, self._count)))

    async def write(self, index: int, body: Sequence[Buffer]) -> None:
        """Send one frame."""
        loop = asyncio.get_running_loop()
        first = header(self._generation, index, body)
        self.sent += len(first) + sum(map(len, body))
        if len(body) == 1 and len(body[0]) < _PIECE:
            await loop.sock_sendall(self._sock, first + body[0])
            return
        await loop.sock_sendall(self._sock, first)
        sent = 0
        for part in body:
            view = memoryview(part)
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                await loop.sock_sendall(self._sock, piece)
                sent += len(piece)
                if sent >= _PIECE:
                    sent = 0
                    self._count()

    def _count(self) -> None:
        self.signs += 1

    def close(self) -> None:
        """Close the socket. No task may read or write afterwards."""
        self._sock.close()


async def receive(sock: socket.socket, size: int, on_bytes: Callable[[], None] = lambda: None) -> bytearray:
    """Receive `size` bytes from a non-blocking socket. EOFError: the other end closed it."""
    loop = asyncio.get_running_loop()
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = await loop.sock_recv_into(sock, view)
        if not count:
            raise EOFError("the connection was closed")
        on_bytes()
        view = view[count:]
    return data
