"""Commands, replies and messages as bytes: msgpack for the tree, raw bytes for the arrays, no pickle.

    body = u32 length of the tree | tree | padding | array 0 | padding | array 1 | ...

In the tree a dataclass is the list [class name, field, field, ...], a tuple is [nil, item, item, ...], a mapping is a
map, and an array is an extension value (dtype, shape, offset). Arrays are neither copied into the tree when encoding
nor out of the body when decoding: what decode() returns are read-only views of the bytes it was given.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np

from tinkerflow.backend import commands
from tinkerflow.backend.pool import host_messages, messages

Buffer = bytes | memoryview

CLASSES: tuple[type, ...] = (
    commands.LoraSpec,
    commands.Example,
    commands.CustomLoss,
    commands.StabilityInfo,
    commands.AdamParams,
    commands.DimuonParams,
    commands.PromptWishes,
    commands.SampleRequest,
    commands.Candidates,
    commands.SampledSequence,
    commands.SampleResult,
    commands.CreateAdapter,
    commands.DropAdapter,
    commands.Forward,
    commands.NextMicroBatch,
    commands.OptimStep,
    commands.ExportAdapter,
    commands.ImportAdapter,
    commands.PublishSnapshot,
    commands.LoadSnapshot,
    commands.MoveSnapshot,
    commands.DropSnapshot,
    commands.SampleStep,
    commands.Ping,
    commands.ReadCompileStatus,
    commands.Done,
    commands.ForwardResult,
    commands.OptimResult,
    commands.AdapterState,
    commands.SnapshotHeld,
    commands.SampleProgress,
    commands.CompileStatus,
    commands.GroupConfig,
    commands.GroupInfo,
    messages.Start,
    messages.Ready,
    messages.Progress,
    messages.Left,
    messages.Beat,
    messages.Failed,
    messages.Ack,
    messages.Fatal,
    host_messages.Offer,
    host_messages.Held,
    host_messages.TakeOver,
    host_messages.Welcome,
    host_messages.Refusal,
    host_messages.Spawn,
    host_messages.Signal,
    host_messages.Spawned,
    host_messages.Ended,
)

_FIELDS: dict[type, tuple[str, ...]] = {kind: tuple(f.name for f in fields(kind)) for kind in CLASSES}
_BY_NAME: dict[str, type] = {kind.__name__: kind for kind in CLASSES}
_ARRAY = 1  # msgpack extension code
_ALIGN = 64  # XLA on CPU can use arrays in place when they are aligned to this
_SMALL = 65536  # below this, copying a buffer is cheaper than another system call
_HEAD = struct.Struct("!I")
_KINDS = "biuf"  # bool, int, unsigned, float: what NumPy itself understands everywhere
_UNDECODABLE = (struct.error, msgpack.UnpackException, ValueError, TypeError, KeyError, RecursionError, OverflowError)


def fingerprint() -> str:
    """A short text that differs where the messages do: processes understand each other when it is the same."""
    told = sorted((kind.__name__, names) for kind, names in _FIELDS.items())
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


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
    raise TypeError(f"cannot encode a {type(value).__name__}: it is neither plain data nor listed in codec.CLASSES")


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
