"""Frames over TCP, and what is in them: commands, replies and messages as msgpack, arrays as raw bytes, no pickle.

    frame = magic | u32 generation | u64 index | u64 length | body
    body = u32 length of the tree | tree | padding | array 0 | padding | array 1 | ...

In the tree a dataclass is the list [class name, field, field, ...], a tuple is [nil, item, item, ...], a mapping is a
map, and an array is an extension value (dtype, shape, offset). Arrays are neither copied into the tree when encoding
nor out of the body when decoding: decode() returns read-only views of the bytes that it is given.

A frame of another generation, or a frame without the magic, is an error: only a mistake can have sent it.
handshake.py makes the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

import msgpack
import numpy as np

from tinkerflow.backend.pool.protocol.messages import HostMessage, WorkerMessage
from tinkerflow.backend.spec.commands import Command, GroupConfig, GroupInfo, Reply
from tinkerflow.backend.spec.optimizers import OPTIMIZERS

Buffer = bytes | memoryview


def _dataclasses(hint: Any) -> Iterator[type]:
    """Every dataclass in a type hint, and in the hints of its fields."""
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
        for inner in get_type_hints(hint).values():
            yield from _dataclasses(inner)
    for argument in get_args(hint):
        yield from _dataclasses(argument)


_CROSSES = Command | Reply | GroupConfig | GroupInfo | WorkerMessage | HostMessage
_PARAMS = [spec.params for spec in OPTIMIZERS.values()]  # what OptimStep carries
CLASSES = tuple(dict.fromkeys([*_dataclasses(_CROSSES), *_PARAMS]))
_FIELDS: dict[type, tuple[str, ...]] = {kind: tuple(f.name for f in fields(kind)) for kind in CLASSES}
_BY_NAME: dict[str, type] = {kind.__name__: kind for kind in CLASSES}
_ARRAY = 1  # msgpack extension code
_ALIGN = 64  # XLA on CPU can use arrays in place when they are aligned to this
_SMALL = 65536  # below this, copying a buffer is cheaper than another system call
_HEAD = struct.Struct("!I")
_KINDS = "biuf"  # bool, int, unsigned, float: what NumPy itself understands everywhere
_UNDECODABLE = (struct.error, msgpack.UnpackException, ValueError, TypeError, KeyError, RecursionError, OverflowError)
_HEADER = struct.Struct("!4sIQQ")
_PIECE = 1 << 20  # bytes that are sent at once
_LARGEST = 1 << 36  # bytes of one body: the state of a large adapter is a few gigabytes
MAGIC = b"TkF1"


def fingerprint() -> str:
    """A short text that differs where the messages do: processes understand each other when it is the same."""
    declared = sorted((kind.__name__, [(field.name, str(field.type)) for field in fields(kind)]) for kind in CLASSES)
    return hashlib.sha256(repr(declared).encode()).hexdigest()[:12]


def encode(value: object) -> list[Buffer]:
    """The body of a frame for `value`, as buffers to be sent one after the other.

    value: a tree of the dataclasses in CLASSES, tuples, mappings with text keys, NumPy arrays and scalars, text, bytes,
    numbers, booleans and None. Large arrays are not copied: do not change them until the buffers are sent.
    Raises TypeError for anything else, ValueError for integers beyond 64 bits.
    """
    arrays = _Arrays()
    try:
        tree: bytes = msgpack.packb(_flatten(value, arrays), unicode_errors="surrogatepass")
    except OverflowError as error:
        raise ValueError(f"cannot encode a {type(value).__name__}: an integer needs more than 64 bits") from error
    buffers: list[Buffer] = []
    small = bytearray(_HEAD.pack(len(tree)) + tree)
    small += bytes(-len(small) % _ALIGN)
    for raw in arrays.raw:
        if len(raw) < _SMALL:
            small += raw
        else:
            buffers += [bytes(small), raw]
            small.clear()
        small += bytes(-len(raw) % _ALIGN)
    return [*buffers, bytes(small)] if small else buffers


def decode(body: bytes | bytearray | memoryview) -> Any:
    """The value that `body` holds. Raises ValueError for bytes that encode() cannot have made."""
    view = memoryview(body).toreadonly()
    try:
        (length,) = _HEAD.unpack_from(view)
        start = _HEAD.size + length
        data = view[start + (-start % _ALIGN) :]
        tree = msgpack.unpackb(
            view[_HEAD.size : start],
            ext_hook=lambda code, raw: _array(code, raw, data),
            unicode_errors="surrogatepass",
        )
        return _build(tree)
    except _UNDECODABLE as error:
        raise ValueError(f"{len(view)} bytes are no message of ours: {type(error).__name__}: {error}") from error


class _Arrays:
    """The arrays met while flattening, as raw bytes, and where the next one will lie."""

    def __init__(self) -> None:
        self.raw: list[memoryview] = []
        self._end = 0

    def add(self, array: np.ndarray[Any, Any]) -> msgpack.ExtType:
        if array.dtype.kind not in _KINDS:
            raise TypeError(
                f"cannot encode an array of {array.dtype}: its elements must be booleans, integers or floats"
            )
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        offset, self._end = self._end, self._end + len(raw) + (-len(raw) % _ALIGN)
        self.raw.append(raw)
        return msgpack.ExtType(_ARRAY, msgpack.packb([array.dtype.str, array.shape, offset]))


def _flatten(value: object, arrays: _Arrays) -> object:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    names = _FIELDS.get(type(value))
    if names is not None:
        return [type(value).__name__, *(_flatten(getattr(value, name), arrays) for name in names)]
    if isinstance(value, tuple):
        return [None, *(_flatten(item, arrays) for item in value)]
    if isinstance(value, np.ndarray):
        return arrays.add(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"cannot encode a mapping with the key {key!r}: keys must be text")
        return {key: _flatten(item, arrays) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode a {type(value).__name__}: it is neither plain data nor a message (frames.CLASSES)")


def _build(tree: Any) -> Any:
    if isinstance(tree, list):
        name, *items = tree
        built = [_build(item) for item in items]
        if name is None:
            return tuple(built)
        kind = _BY_NAME[name]
        if len(built) != len(_FIELDS[kind]):
            raise ValueError(
                f"{name} with {len(built)} fields, not {len(_FIELDS[kind])}: is one process of another version?"
            )
        return kind(*built)
    if isinstance(tree, dict):
        return {key: _build(item) for key, item in tree.items()}
    return tree


def _array(code: int, raw: bytes, data: memoryview) -> np.ndarray[Any, Any]:
    if code != _ARRAY:
        raise ValueError(f"extension code {code} is unknown")
    dtype_name, shape, offset = msgpack.unpackb(raw)
    dtype = np.dtype(dtype_name)
    if dtype.kind not in _KINDS:
        raise ValueError(f"an array of {dtype}")
    count = math.prod(shape)
    return np.frombuffer(data, dtype, count, offset).reshape(shape) if count else np.empty(shape, dtype)


# ------------------------------------------------------------------ frames
@dataclass(frozen=True)
class Frame:
    """One received message, not yet decoded."""

    index: int
    body: memoryview


def header(generation: int, index: int, body: Sequence[Buffer]) -> bytes:
    """The bytes that go before `body`."""
    return _HEADER.pack(MAGIC, generation, index, sum(map(len, body)))


def _parse(raw: bytes | bytearray, generation: int) -> tuple[int, int]:
    magic, theirs, index, length = _HEADER.unpack(raw)
    if magic != MAGIC or length > _LARGEST:
        raise ValueError(f"garbage instead of a frame: {bytes(raw[:16])!r}")
    if theirs != generation:
        raise ValueError(f"a frame of generation {theirs} in generation {generation}")
    return index, length


# ------------------------------------------------------------------ the worker's end: blocking
class WorkerLink:
    """The worker's connection to the driver. One thread may read while another writes."""

    def __init__(self, sock: socket.socket, generation: int) -> None:
        """`sock` is connected and authenticated."""
        self._sock = sock
        self._generation = generation

    def read(self) -> Frame:
        """The next frame. Raises EOFError when the driver is gone, ValueError for garbage."""
        index, length = _parse(receive_now(self._sock, _HEADER.size), self._generation)
        return Frame(index, memoryview(receive_now(self._sock, length)))

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


def receive_now(sock: socket.socket, size: int) -> bytearray:
    """The next `size` bytes of a blocking socket. EOFError when the other end has closed it."""
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
    """The driver's connection to one worker or agent, or the agent's. One task may read while another writes."""

    def __init__(self, sock: socket.socket, generation: int, rank: int) -> None:
        """`sock` is connected, authenticated and does not block."""
        self.rank = rank
        self.signs = 0  # of life: how often bytes were received, or another MiB was sent (see HeartbeatMonitor)
        self.sent = 0  # bytes
        self._sock = sock
        self._generation = generation

    @property
    def address(self) -> str:
        """The address of this end."""
        return str(self._sock.getsockname()[0])

    async def read(self) -> Frame:
        """The next frame. Raises EOFError when the other end is gone, ValueError for garbage."""
        index, length = _parse(await receive(self._sock, _HEADER.size, self._count), self._generation)
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
        """Close the socket; call it when no task reads or writes any more."""
        self._sock.close()


async def receive(sock: socket.socket, size: int, on_bytes: Callable[[], None] = lambda: None) -> bytearray:
    """The next `size` bytes of a socket that does not block. EOFError when the other end has closed it."""
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
