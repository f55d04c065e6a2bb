"""Connecting a worker or a host's agent to the driver: both ends prove that they know a secret.

The secret is the generation's, or (as generation 0) the group's. A worker reads it from its standard input; it never
crosses the socket (HMAC-SHA256 over fresh nonces of both sides, with the role in it, so that neither side's proof
serves as the other's). Frames themselves are neither encrypted nor signed: between hosts they need a network that
nobody else can read or write.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import socket
import struct
from dataclasses import asdict, dataclass
from typing import Self

from tinkerflow.backend.pool.protocol.frames import MAGIC, LoopLink, WorkerLink, receive, receive_now

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0  # that who connects may take to prove that it knows the secret
_HELLO = struct.Struct("!4sII32s")  # magic, generation, rank, nonce
_PROOF = 32


@dataclass(frozen=True)
class LaunchSpec:
    """A driver that a worker is to serve: a line of its standard input, for everybody could read its arguments.

    secret: the generation's, as hex. parent: id of the process that started the worker, and that it does not outlive.
    compile_cache_dir: the host's folder, in place of the folder that the driver names; "" = the driver's.
    """

    host: str
    port: int
    secret: str
    generation: int
    rank: int
    parent: int
    compile_cache_dir: str

    def to_line(self) -> bytes:
        """The line that holds it."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """The inverse of `to_line`."""
        return cls(**json.loads(line))


def _proof(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    """`hello` names generation, rank and the worker's nonce; `nonce` is the driver's."""
    return hmac.new(secret, role + b"|" + hello + b"|" + nonce, hashlib.sha256).digest()


def connect(host: str, port: int, secret: bytes, generation: int, rank: int, timeout: float = 30.0) -> WorkerLink:
    """Connect to the driver that listens on `host`:`port`.

    secret, generation: the generation's, or with generation 0 the group's secret. rank: of this worker, 0 for an agent.
    timeout: seconds for the connection, and for each message of the handshake.
    Raises PermissionError when the driver does not know the secret, and OSError for all else. ConnectionRefusedError:
    nobody listens, or the driver hung up because it is ending or refuses this rank or generation.
    """
    sock = socket.create_connection((host, port), timeout=timeout)
    try:
        if sock.getsockname() == sock.getpeername():  # TCP's simultaneous open: our own port was the one asked for
            # Closed without waiting, or the driver that comes back could not listen at its port for a minute.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise ConnectionRefusedError(f"nobody but we ourselves on port {port}")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _HELLO.pack(MAGIC, generation, rank, os.urandom(32))
        sock.sendall(hello)
        try:
            answer = bytes(receive_now(sock, 32 + _PROOF))
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
    return WorkerLink(sock, generation)


async def next_connection(listener: socket.socket, retry_seconds: float = 1.0) -> socket.socket:
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
            await asyncio.sleep(retry_seconds)


async def accept(sock: socket.socket, secret: bytes, generation: int, ranks: int) -> LoopLink:
    """Authenticate who connected. Raises PermissionError (and closes) when it does not know the secret."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    loop = asyncio.get_running_loop()
    try:
        hello = bytes(await receive(sock, _HELLO.size))
        magic, claimed, rank, _ = _HELLO.unpack(hello)
        if magic != MAGIC or claimed != generation or rank >= ranks:
            raise PermissionError(f"no worker of generation {generation}: it said {magic!r}, {claimed}, rank {rank}")
        nonce = os.urandom(32)
        await loop.sock_sendall(sock, nonce + _proof(secret, b"driver", hello, nonce))
        proof = bytes(await receive(sock, _PROOF))
        if not hmac.compare_digest(proof, _proof(secret, b"worker", hello, nonce)):
            raise PermissionError(f"who says to be rank {rank} does not know the secret of generation {generation}")
    except BaseException:
        sock.close()
        raise
    return LoopLink(sock, generation, rank)
