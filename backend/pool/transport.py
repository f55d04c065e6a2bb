"""Frames over TCP, and how both ends prove that they know a secret: the generation's, or (as generation 0) the group's.

    frame = magic | u32 generation | u64 index | u64 length | body (codec.py)

A frame of another generation, or one without the magic, is an error: it can only come from a mistake.
The secret reaches the worker through its standard input and never crosses the socket (HMAC-SHA256 over fresh nonces of
both sides, with the role in it, so that neither side's proof serves as the other's). Frames themselves are neither
encrypted nor signed: between hosts they need a network that nobody else can read or write.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinkerflow.backend.pool.codec import Buffer

log = logging.getLogger(__name__)

_HEADER = struct.Struct("!4sIQQ")
_MAGIC = b"TkF1"
_HELLO = struct.Struct("!4sII32s")  # magic, generation, rank, nonce
_PROOF = 32
_PIECE = 1 << 20  # bytes that are sent at once
_AGAIN_SECONDS = 1.0
_LARGEST = 1 << 36  # bytes of one body: the state of a large adapter is a few gigabytes


@dataclass(frozen=True)
class Frame:
    """One received message, not yet decoded."""

    index: int
    body: memoryview


def header(generation: int, index: int, body: Sequence[Buffer]) -> bytes:
    """The bytes that go before `body`."""
    return _HEADER.pack(_MAGIC, generation, index, sum(map(len, body)))


def _parse(raw: bytes | bytearray, generation: int) -> tuple[int, int]:
    magic, theirs, index, length = _HEADER.unpack(raw)
    if magic != _MAGIC or length > _LARGEST:
        raise ValueError(f"garbage instead of a frame: {bytes(raw[:16])!r}")
    if theirs != generation:
        raise ValueError(f"a frame of generation {theirs} in generation {generation}")
    return index, length


def _proof(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    """`hello` names generation, rank and the worker's nonce; `nonce` is the driver's."""
    return hmac.new(secret, role + b"|" + hello + b"|" + nonce, hashlib.sha256).digest()


# ------------------------------------------------------------------ the worker's end: blocking
class WorkerLink:
    """The worker's connection to the driver. One thread may read while another writes."""

    def __init__(self, sock: socket.socket, generation: int) -> None:
        """`sock` is connected and authenticated."""
        self._sock = sock
        self._generation = generation

    @classmethod
    def connect(
        cls, host: str, port: int, secret: bytes, generation: int, rank: int, timeout: float = 30.0
    ) -> WorkerLink:
        """Connect to the driver. Raises PermissionError when it does not know the secret, OSError for all else.

        ConnectionRefusedError: nobody listens, or the driver hung up: it is ending, or did not like what we sent.
        """
        sock = socket.create_connection((host, port), timeout=timeout)
        try:
            if sock.getsockname() == sock.getpeername():  # TCP's simultaneous open: our own port was the one asked for
                raise ConnectionRefusedError(f"nobody but we ourselves on port {port}")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = _HELLO.pack(_MAGIC, generation, rank, os.urandom(32))
            sock.sendall(hello)
            try:
                answer = bytes(_read(sock, 32 + _PROOF))
            except EOFError as error:
                raise ConnectionRefusedError(f"the driver refused rank {rank} of generation {generation}") from error
            nonce, proof = answer[:32], answer[32:]
            if not hmac.compare_digest(proof, _proof(secret, b"driver", hello, nonce)):
                raise PermissionError(f"who listens on port {port} does not know the secret of generation {generation}")
            sock.sendall(_proof(secret, b"worker", hello, nonce))
        except BaseException:
            sock.close()
            raise
        sock.settimeout(None)
        return cls(sock, generation)

    def read(self) -> Frame:
        """The next frame. Raises EOFError when the driver is gone, ValueError for garbage."""
        index, length = _parse(_read(self._sock, _HEADER.size), self._generation)
        return Frame(index, memoryview(_read(self._sock, length)))

    def write(self, index: int, body: Sequence[Buffer]) -> None:
        """Send one frame. Callers take turns (a lock)."""
        first = header(self._generation, index, body)
        if len(body) == 1:
            self._sock.sendall(first + body[0])  # one packet, one wake-up of the driver
            return
        self._sock.sendall(first)
        for part in body:
            self._sock.sendall(part)

    def hang_up(self) -> None:
        """End the connection under whoever reads or writes: they get EOFError or OSError."""
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def to_loop(self) -> LoopLink:
        """The same connection for use in an event loop; this object must not be used any more."""
        self._sock.setblocking(False)
        return LoopLink(self._sock, self._generation, 0)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]
    return data


# ------------------------------------------------------------------ the driver's end, and an agent's: asyncio
async def next_connection(listener: socket.socket) -> socket.socket:
    """Wait for a connection on `listener` (which does not block) and accept it.

    `loop.sock_accept` accepts in a callback: cancelled in the same turn of the loop, it loses the accepted socket.
    Here nothing lies between accepting and returning.
    """
    loop = asyncio.get_running_loop()
    while True:
        readable = asyncio.Event()
        loop.add_reader(listener, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(listener)
        try:
            return listener.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            continue  # it went away again
        except OSError as error:  # too many open files, say, and not for ever
            log.warning("a connection cannot be accepted, and is tried again: %s", error)
            await asyncio.sleep(_AGAIN_SECONDS)


class LoopLink:
    """The driver's connection to one worker or agent, or the agent's. One task may read while another writes."""

    def __init__(self, sock: socket.socket, generation: int, rank: int) -> None:
        """`sock` is connected, authenticated and does not block."""
        self.rank = rank
        self.on_bytes: Callable[[], None] = lambda: None  # called when some were received, or another MiB was sent
        self._sock = sock
        self._generation = generation

    @classmethod
    async def accept(cls, sock: socket.socket, secret: bytes, generation: int, ranks: int) -> LoopLink:
        """Authenticate who connected. Raises PermissionError (and closes) when it does not know the secret."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        try:
            hello = bytes(await _receive(sock, _HELLO.size))
            magic, claimed, rank, _ = _HELLO.unpack(hello)
            if magic != _MAGIC or claimed != generation or rank >= ranks:
                raise PermissionError(
                    f"no worker of generation {generation}: it said {magic!r}, {claimed}, rank {rank}"
                )
            nonce = os.urandom(32)
            await loop.sock_sendall(sock, nonce + _proof(secret, b"driver", hello, nonce))
            proof = bytes(await _receive(sock, _PROOF))
            if not hmac.compare_digest(proof, _proof(secret, b"worker", hello, nonce)):
                raise PermissionError(f"who says to be rank {rank} does not know the secret of generation {generation}")
        except BaseException:
            sock.close()
            raise
        return cls(sock, generation, rank)

    @property
    def address(self) -> str:
        """The address of this end."""
        return str(self._sock.getsockname()[0])

    async def read(self) -> Frame:
        """The next frame. Raises EOFError when the other end is gone, ValueError for garbage."""
        index, length = _parse(await _receive(self._sock, _HEADER.size, self.on_bytes), self._generation)
        return Frame(index, memoryview(await _receive(self._sock, length, self.on_bytes)))

    async def write(self, index: int, body: Sequence[Buffer]) -> None:
        """Send one frame."""
        loop = asyncio.get_running_loop()
        first = header(self._generation, index, body)
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
                    self.on_bytes()

    def close(self) -> None:
        """Close the socket; call it when no task reads or writes any more."""
        self._sock.close()


async def _receive(sock: socket.socket, size: int, on_bytes: Callable[[], None] = lambda: None) -> bytearray:
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
