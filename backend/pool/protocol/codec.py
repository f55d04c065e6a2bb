"""Messages as bytes: a msgspec header, followed by the arrays as raw bytes. No pickle.

    body = u32 length of the header | header | padding | array 0 | padding | array 1 | ...

The header stores the dtype, shape and offset of each array. Arrays are copied neither when a message is encoded nor
when it is decoded: `decode` returns read-only views of its input.
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, cast, get_args, get_type_hints

import msgspec
import numpy as np

from tinkerflow.backend.pool.protocol.messages import HostMessage, WorkerMessage
from tinkerflow.backend.spec.commands import Command, Reply
from tinkerflow.backend.spec.pool_message import PoolMessage

Buffer = bytes | memoryview
AnyMessage = Command | Reply | WorkerMessage | HostMessage

_ALIGNMENT = 64  # XLA on CPU can use arrays in place if they are aligned to 64 bytes
_SMALL = 65536  # bytes below which copying a buffer is cheaper than another system call
_LENGTH = struct.Struct("!I")
_DTYPE_KINDS = "biuf"  # bool, int, unsigned, float
_UNDECODABLE = (struct.error, msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


def fingerprint() -> str:
    """A short digest of all message types. Processes can communicate only if their fingerprints are equal."""
    classes = {kind.__name__: kind.__annotations__ for kind in _classes(AnyMessage)}
    return hashlib.sha256(repr(sorted(classes.items())).encode()).hexdigest()[:12]


def _classes(hint: Any) -> Iterator[type]:
    """All messages and dataclasses in a type hint, and in the hints of their fields."""
    if isinstance(hint, type) and (issubclass(hint, PoolMessage) or is_dataclass(hint)):
        yield hint
        for inner in get_type_hints(hint).values():
            yield from _classes(inner)
    for argument in get_args(hint):
        yield from _classes(argument)


def encode(message: PoolMessage) -> list[Buffer]:
    """The body of a frame for `message`, as buffers to be sent one after another.

    Large arrays are not copied, so do not change them until the buffers are sent. TypeError: a field is not plain data.
    ValueError: an integer needs more than 64 bits, or a text is not Unicode.
    """
    arrays, end = list[memoryview](), 0

    def encode_other(value: object) -> object:
        nonlocal end
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot encode a {type(value).__name__} in a {type(message).__name__}")
        if value.dtype.kind not in _DTYPE_KINDS:
            raise TypeError(
                f"cannot encode an array of {value.dtype}: its elements must be booleans, integers or floats"
            )
        arrays.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        start, end = end, end + len(arrays[-1]) + _padding(len(arrays[-1]))
        return value.dtype.str, value.shape, start

    try:
        header = msgspec.msgpack.encode(message, enc_hook=encode_other)
    except OverflowError as error:
        raise ValueError(f"cannot encode a {type(message).__name__}: an integer needs more than 64 bits") from error
    buffers: list[Buffer] = []
    small = bytearray(_LENGTH.pack(len(header)) + header)
    small += bytes(_padding(len(small)))
    for raw in arrays:
        if len(raw) < _SMALL:
            small += raw
        else:
            buffers += [bytes(small), raw]
            small.clear()
        small += bytes(_padding(len(raw)))
    return [*buffers, bytes(small)] if small else buffers


def decode(body: bytes | bytearray | memoryview) -> PoolMessage:
    """The message that `body` encodes. ValueError: the bytes are not an encoded message."""
    view = memoryview(body).toreadonly()
    try:
        (length,) = _LENGTH.unpack_from(view)
        start = _LENGTH.size + length
        return _decoder.decode(view[_LENGTH.size : start], view[start + _padding(start) :])
    except _UNDECODABLE as error:
        raise ValueError(f"{len(view)} bytes are not a message: {type(error).__name__}: {error}") from error


class _Decoder(threading.local):
    """Decodes headers. Each thread has its own decoder, because the decoder stores the body of the current message."""

    def __init__(self) -> None:
        self._header = msgspec.msgpack.Decoder(AnyMessage, dec_hook=self._array)
        self._arrays = memoryview(b"")

    def decode(self, header: memoryview, arrays: memoryview) -> PoolMessage:
        self._arrays = arrays
        try:
            return cast(PoolMessage, self._header.decode(header))
        finally:
            self._arrays = memoryview(b"")

    def _array(self, kind: type, encoded: Any) -> np.ndarray[Any, Any]:
        dtype_name, shape, offset = encoded
        dtype = np.dtype(dtype_name)
        if dtype.kind not in _DTYPE_KINDS or any(size < 0 for size in shape):
            raise ValueError(f"an array of {dtype} and shape {shape}")
        count = math.prod(shape)
        return np.frombuffer(self._arrays, dtype, count, offset).reshape(shape) if count else np.empty(shape, dtype)


_decoder = _Decoder()


def _padding(length: int) -> int:
    return -length % _ALIGNMENT
