"""Messages of every class arrive bit for bit, and garbage is refused with a clear error."""

from __future__ import annotations

import struct
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tinkerflow.backend.pool.protocol import codec
from tinkerflow.backend.pool.protocol.messages import Start
from tinkerflow.backend.spec import commands as c
from tinkerflow.backend.spec.checkpoint import BLOCK, Digest
from tinkerflow.backend.spec.pool_message import PoolMessage

PLAIN: Mapping[type, st.SearchStrategy[Any]] = {
    str: st.text(max_size=12),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(),
    bool: st.booleans(),
    bytes: st.binary(max_size=40),
    type(None): st.none(),
    Digest: st.builds(Digest, st.integers(0, BLOCK), st.text(), st.tuples(st.text())),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field with this type may have."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if hasattr(origin, "__value__"):  # an alias of the newest NumPy
        return values(origin.__value__[arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is np.ndarray:
        kind = get_args(arguments[1])[0]
        shapes = hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=6)
        return hnp.arrays(np.float32 if kind is Any else kind, shapes)
    if origin is tuple and arguments[-1] is ...:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    return st.builds(hint, **{name: values(inner) for name, inner in get_type_hints(hint).items()})


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in type and in every bit (NaN and -0.0 included)."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, PoolMessage):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


def through(message: PoolMessage) -> Any:
    return codec.decode(b"".join(codec.encode(message)))


@pytest.mark.parametrize("kind", get_args(codec.AnyMessage), ids=lambda kind: kind.__name__)
@settings(max_examples=10)
@given(data=st.data())
def test_messages_survive_a_round_trip(kind: type, data: st.DataObject) -> None:
    message = data.draw(values(kind))
    assert same(through(message), message)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", ">f4"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (300, 70)])
def test_arrays_keep_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back = through(c.ForwardResult((array, array.T, array), 0.0))
    assert same(back.logprobs, (array, np.ascontiguousarray(array.T).reshape(array.T.shape), array))


def test_large_arrays_are_not_copied() -> None:
    array = np.zeros((1 << 20,), np.float32)
    state = c.AdapterState(c.LoraSpec(1), 0, {"a": array, "b": np.ones(3, np.float32)})
    buffers = codec.encode(state)
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in buffers if len(part) == array.nbytes)
    body = bytearray(b"".join(buffers))
    decoded = codec.decode(body)
    assert isinstance(decoded, c.AdapterState)
    assert np.shares_memory(decoded.weights["a"], np.frombuffer(body, np.uint8))
    assert not decoded.weights["a"].flags.writeable
    # the offset of every array in the body is aligned, so that XLA can use it in place
    offset = decoded.weights["b"].ctypes.data - np.frombuffer(body, np.uint8).ctypes.data
    assert offset % 64 == 0


def test_numpy_scalars_become_numbers() -> None:
    assert through(c.OptimResult(np.float32(0.5), np.int64(3))) == c.OptimResult(0.5, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "error", "named"),
    [
        (object(), TypeError, "object in a DropAdapter"),
        (np.array(["a"]), TypeError, "<U1"),
        (np.array([object()]), TypeError, "object"),
        (2**64, ValueError, "DropAdapter.*64 bits"),
        ("\ud800", ValueError, "surrogates not allowed"),
    ],
)
def test_unencodable_value_is_named(value: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        codec.encode(c.DropAdapter(value))


@settings(max_examples=100)
@given(st.binary(max_size=80))
def test_garbage_raises_a_value_error(body: bytes) -> None:
    try:
        codec.decode(body)
    except ValueError as error:
        assert "are not a message" in str(error)


@settings(max_examples=50)
@given(st.data())
def test_damaged_message_is_a_value_error_or_a_valid_message(data: st.DataObject) -> None:
    body = bytearray(b"".join(codec.encode(data.draw(values(c.Forward)))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, min(len(body) - 1, 200)))] = data.draw(st.integers(0, 255))
    try:
        codec.decode(body[: data.draw(st.integers(0, len(body)))])
    except ValueError as error:
        assert "are not a message" in str(error)


@pytest.mark.parametrize(
    "header",
    [
        ["ForwardResult", [["<f4", [9], 0]], 0.0],
        ["ForwardResult", [["|O", [1], 0]], 0.0],
        ["ForwardResult", [["<f4", [-1], 0]], 0.0],
        ["ForwardResult", [["<f4", "x", 0]], 0.0],
        ["ForwardResult", [7], 0.0],
        ["Popen", "sh"],
        ["DropAdapter"],
        ["DropAdapter", 1],
        [],
        [7],
        {"type": "Ping"},
    ],
)
def test_unknown_header_is_refused(header: object) -> None:
    packed = msgspec.msgpack.encode(header)
    with pytest.raises(ValueError, match="are not a message"):
        codec.decode(struct.pack("!I", len(packed)) + packed)


def test_the_fingerprint_follows_the_fields_of_every_class(monkeypatch: pytest.MonkeyPatch) -> None:
    before = codec.fingerprint()
    assert before == codec.fingerprint()
    for kind in (Start, c.GroupConfig, c.Example):
        with monkeypatch.context() as patch:
            patch.setitem(kind.__annotations__, "added", "int")
            assert codec.fingerprint() != before
