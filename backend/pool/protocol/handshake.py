"""Connecting a worker or a host's agent to the driver. Both ends prove that they know the same secret.

A worker reads the secret of its generation from its standard input. An agent has the secret of the group, and connects
as generation 0. The secret never crosses the socket: each side sends an HMAC-SHA256 over fresh nonces of both sides.
The HMAC includes the role of its sender, so an attacker cannot send a proof back. Frames are neither encrypted nor
signed, so the network between hosts must be private.
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

HANDSHAKE_SECONDS = 10.0  # the longest time that a handshake may take
_HELLO = struct.Struct("!4sII32s")  # magic, generation, rank, nonce
_PROOF = 32


@dataclass(frozen=True)
class LaunchSpec:
    """The driver that a worker must serve. The worker reads this from standard input, because arguments are public.

    host, port: where the driver listens. secret: the secret of the generation, as hex. generation, rank: the worker's.
    parent: the id of the process that started the worker. The worker ends with it.
    compile_cache_dir: the folder for compiled programs on this host; "": the folder that the driver names.
    """

    host: str
    port: int
    secret: str
    generation: int
    rank: int
    parent: int
    compile_cache_dir: str

    def to_line(self) -> bytes:
        """Encode the spec as one line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Decode a line from `to_line`."""
        return cls(**json.loads(line))


def _proof(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    """The proof of `role`. hello: contains the generation, the rank and the worker's nonce. nonce: the driver's."""
    return hmac.new(secret, role + b"|" + hello + b"|" + nonce, hashlib.sha256).digest()


def connect(host: str, port: int, secret: bytes, generation: int, rank: int, timeout: float = 30.0) -> WorkerLink:
    """Connect to the driver that listens on `host`:`port`.

    secret: the secret of the generation, or of the group if `generation` is 0.
    rank: the rank of this worker; 0 for an agent.
    timeout: seconds for the connection, and for each message of the handshake.
    PermissionError: the driver has another secret. ConnectionRefusedError: no process listens, or the driver hung up
    because it is ending or refuses this rank or generation. OSError: any other failure.
    """
    sock = socket.create_connection((host, port), timeout=timeout)
    try:
        if sock.getsockname() == sock.getpeername():  # TCP's simultaneous open: the socket connected to itself
            # Reset the connection. Otherwise the next driver could not listen on its port for a minute.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise ConnectionRefusedError(f"no process listens on port {port}")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _HELLO.pack(MAGIC, generation, rank, os.urandom(32))
        sock.sendall(hello)
        try:
            answer = bytes(receive_now(sock, 32 + _PROOF))
        except EOFError as error:
            raise ConnectionRefusedError(f"the driver refused rank {rank} of generation {generation}") from error
        nonce, proof = answer[:32], answer[32:]
        if not hmac.compare_digest(proof, _proof(secret, b"driver", hello, nonce)):
            raise PermissionError(
                f"the process that listens on port {port} lacks the secret of generation {generation}"
            )
        sock.sendall(_proof(secret, b"worker", hello, nonce))
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return WorkerLink(sock, generation)


async def next_connection(listener: socket.socket, retry_seconds: float = 1.0) -> socket.socket:
    """Wait for a connection on `listener` (non-blocking) and accept it.

    `loop.sock_accept` accepts in a callback. If it is cancelled in the same iteration of the loop, the accepted socket
    is lost. This function returns immediately after it accepts.
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
            continue  # the client has closed the connection
        except OSError as error:  # for example too many open files, until other connections are closed
            log.warning("cannot accept a connection; trying again: %s", error)
            await asyncio.sleep(retry_seconds)


async def accept(sock: socket.socket, secret: bytes, generation: int, ranks: int) -> LoopLink:
    """Authenticate a connected client. PermissionError: the client lacks the secret. Any failure closes `sock`."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    loop = asyncio.get_running_loop()
    try:
        hello = bytes(await receive(sock, _HELLO.size))
        magic, claimed, rank, _ = _HELLO.unpack(hello)
        if magic != MAGIC or claimed != generation or rank >= ranks:
            raise PermissionError(
                f"not a worker of generation {generation}: its first bytes are {magic!r}, generation {claimed}, "
                f"rank {rank}"
            )
        nonce = os.urandom(32)
        await loop.sock_sendall(sock, nonce + _proof(secret, b"driver", hello, nonce))
        proof = bytes(await receive(sock, _PROOF))
        if not hmac.compare_digest(proof, _proof(secret, b"worker", hello, nonce)):
            raise PermissionError(f"the client for rank {rank} lacks the secret of generation {generation}")
    except BaseException:
        sock.close()
        raise
    return LoopLink(sock, generation, rank)
