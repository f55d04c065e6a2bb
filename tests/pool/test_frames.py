"""What is sent arrives as it was, bit for bit, for every command and reply; and garbage is refused by name."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tinkerflow.backend.pool.protocol import frames
from tinkerflow.backend.pool.protocol import messages as m
from tinkerflow.backend.spec import commands as c
from tinkerflow.backend.spec.checkpoint import BLOCK, Digest
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.backend.spec.optimizers.adamw import AdamParams

shapes = hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=6)
floats32 = hnp.arrays(np.float32, shapes, elements=st.floats(width=32))
ints32 = hnp.arrays(np.int32, st.integers(0, 9).map(lambda n: (n,)))
texts = st.text(st.characters(), max_size=12)  # surrogates included: JSON can carry them
numbers = st.floats()
seeds = st.integers(-(2**63), 2**64 - 1)
arrays_by_name = st.dictionaries(texts, floats32, max_size=3)

specs = st.builds(c.LoraSpec, st.integers(1, 512), st.booleans(), st.booleans(), st.booleans())
examples = st.builds(c.Example, ints32, ints32, floats32, st.booleans(), arrays_by_name)
states = st.builds(c.AdapterState, specs, st.integers(0, 2**31), arrays_by_name, arrays_by_name)
digests = st.builds(Digest, st.integers(0, BLOCK), texts, texts.map(lambda text: (text,)))
stored = st.builds(
    c.StoredState, specs, st.integers(0, 2**31), texts, texts, st.dictionaries(texts, digests, max_size=3)
)
biases = st.lists(st.tuples(st.integers(0, 2**31), numbers), max_size=3).map(tuple)
sample_requests = st.builds(
    c.SampleRequest,
    request_id=texts,
    owner=texts,
    snapshot_id=st.none() | texts,
    prompt_T=ints32,
    num_samples=st.integers(1, 128),
    max_tokens=st.integers(0, 9999),
    temperature=numbers,
    top_k=st.integers(-1, 999),
    top_p=numbers,
    seed=seeds,
    stop_tokens=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    stop_strings=st.lists(texts, max_size=3).map(tuple),
    prompt_logprobs=st.booleans(),
    min_p=numbers,
    adjustments=st.none() | st.builds(c.Adjustments, numbers, numbers, numbers, biases),
    priority=st.sampled_from(["interactive", "batch"]),
    constraint=st.none()
    | st.builds(c.Constraint, st.sampled_from(["json_schema", "regex"]), texts, st.lists(seeds, max_size=2).map(tuple)),
)
sequences = st.builds(c.SampledSequence, ints32, floats32, st.sampled_from(["stop", "length"]))
sample_results = st.builds(
    c.SampleResult,
    texts,
    st.lists(sequences, max_size=2).map(tuple),
    st.none() | floats32,
    st.integers(0, 99),
    st.none() | texts,
)
adams = st.builds(AdamParams, numbers, numbers, numbers, numbers, numbers, numbers)
failures = st.builds(m.Failed, texts, texts)
by_use = st.dictionaries(texts, st.integers(0, 2**60), max_size=3)
configs = st.builds(
    c.GroupConfig,
    model_path=texts,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    fsdp=st.integers(1, 64),
    tensor=st.integers(1, 64),
    max_context=st.integers(1, 2**20),
    microbatch_tokens=st.integers(1, 2**20),
    sample_slots=st.integers(1, 512),
    decode_chunk=st.integers(1, 64),
    compile_cache_dir=texts,
    warm_up=st.booleans(),
)

MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    c.CreateAdapter: st.builds(c.CreateAdapter, texts, specs, seeds),
    c.DropAdapter: st.builds(c.DropAdapter, texts),
    c.Forward: st.builds(
        c.Forward,
        texts,
        st.lists(examples, max_size=3).map(tuple),
        st.sampled_from([*LOSSES]),
        st.dictionaries(texts, numbers, max_size=3),
        st.booleans(),
        st.none() | st.builds(c.CustomLoss, texts, st.dictionaries(texts, st.integers(0, 2), max_size=3), texts),
    ),
    c.NextMicroBatch: st.builds(c.NextMicroBatch, texts),
    c.OptimStep: st.builds(c.OptimStep, texts, adams),
    c.ExportAdapter: st.builds(c.ExportAdapter, texts, st.booleans(), texts),
    c.ImportAdapter: st.builds(c.ImportAdapter, texts, states | stored),
    c.PublishSnapshot: st.builds(c.PublishSnapshot, texts, texts),
    c.LoadSnapshot: st.builds(c.LoadSnapshot, texts, states | stored),
    c.MoveSnapshot: st.builds(c.MoveSnapshot, texts, texts),
    c.DropSnapshot: st.builds(c.DropSnapshot, texts),
    c.SampleStep: st.builds(
        c.SampleStep, st.lists(sample_requests, max_size=2).map(tuple), st.lists(texts, max_size=2).map(tuple)
    ),
    c.Ping: st.builds(c.Ping),
    c.ReadCompileStatus: st.builds(c.ReadCompileStatus),
    c.CompileStatus: st.builds(c.CompileStatus, *[st.integers(0, 2**40)] * 7),
    c.Done: st.builds(c.Done),
    c.SnapshotHeld: st.builds(c.SnapshotHeld, st.none() | st.integers(0, 2**40)),
    c.ForwardResult: st.builds(c.ForwardResult, st.lists(floats32, max_size=3).map(tuple), numbers),
    c.OptimResult: st.builds(c.OptimResult, numbers, st.integers(0, 2**31)),
    c.AdapterState: states,
    c.AdapterKept: st.builds(c.AdapterKept, specs, st.integers(0, 2**31), texts),
    c.SampleProgress: st.builds(
        c.SampleProgress, st.lists(sample_results, max_size=2).map(tuple), st.integers(0, 99), st.integers(0, 99)
    ),
    c.GroupInfo: st.builds(
        c.GroupInfo,
        st.lists(texts, max_size=3).map(tuple),
        st.integers(0, 2**40),
        st.integers(0, 2**31),
        st.integers(1, 64),
        st.integers(1, 2**20),
        st.integers(0, 2**31),
        texts,
        st.integers(0, 2**31),
        st.booleans(),
        by_use,
    ),
    m.Start: st.builds(
        m.Start, configs, st.integers(1, 64), texts, texts, numbers, st.lists(st.integers(0, 63), max_size=3).map(tuple)
    ),
    m.Ready: st.builds(
        m.Ready,
        st.lists(texts, max_size=3).map(tuple),
        st.integers(0, 2**40),
        st.integers(0, 2**31),
        st.integers(1, 64),
        st.integers(1, 2**20),
        st.booleans(),
        st.integers(0, 2**31),
        texts,
        by_use,
    ),
    m.Transfer: st.builds(
        m.Transfer,
        st.integers(0, 2**31),
        st.builds(c.FetchState, texts, stored) | st.builds(c.WriteState, texts, texts),
    ),
    m.Transferred: st.builds(
        m.Transferred, st.integers(0, 2**31), st.dictionaries(texts, digests, max_size=3), st.none() | failures
    ),
    m.Progress: st.builds(m.Progress, texts),
    m.Beat: st.builds(m.Beat),
    m.Ack: st.builds(m.Ack, st.none() | failures),
    m.Leaving: st.builds(m.Leaving),
    m.Fatal: st.builds(m.Fatal, failures),
}


def same(one: Any, other: Any) -> bool:
    """Equal in type and in every bit (NaN and -0.0 included)."""
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


def through(value: Any) -> Any:
    return frames.decode(b"".join(frames.encode(value)))


def test_every_command_and_reply_has_a_strategy() -> None:
    assert {*get_args(c.Command), *get_args(c.Reply)} <= set(MESSAGES)
    assert set(MESSAGES) <= set(frames.CLASSES)


def test_no_dataclass_that_crosses_is_missing_from_the_registry() -> None:
    for module in (c, m):
        defined = {
            v
            for v in vars(module).values()
            if isinstance(v, type) and is_dataclass(v) and v.__module__ == module.__name__
        }
        assert defined - {c.StabilityInfo} <= set(frames.CLASSES)  # the journal has it; no worker sees it


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_round_trip(kind: type, data: st.DataObject) -> None:
    value = data.draw(MESSAGES[kind])
    assert same(through(value), value)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", ">f4"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (300, 70)])
def test_arrays_keep_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    assert same(through((array, array.T, array)), (array, np.ascontiguousarray(array.T).reshape(array.T.shape), array))


def test_large_arrays_are_not_copied() -> None:
    array = np.zeros((1 << 20,), np.float32)
    state = c.AdapterState(c.LoraSpec(1), 0, {"a": array, "b": np.ones(3, np.float32)})
    buffers = frames.encode(state)
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in buffers if len(part) == array.nbytes)
    body = bytearray(b"".join(buffers))
    decoded = frames.decode(body)
    assert np.shares_memory(decoded.weights["a"], np.frombuffer(body, np.uint8))
    assert not decoded.weights["a"].flags.writeable
    # every array lies where XLA could use it in place, as seen from the body's start
    offset = decoded.weights["b"].ctypes.data - np.frombuffer(body, np.uint8).ctypes.data
    assert offset % 64 == 0


def test_numpy_scalars_become_numbers() -> None:
    assert through(c.OptimResult(np.float32(0.5), np.int64(3))) == c.OptimResult(0.5, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "object"),
        (c.ForwardResult(logprobs=[np.zeros(2)], loss_sum=0.0), "list"),  # type: ignore[arg-type]
        (np.array(["a"]), "<U1"),
        (np.array([object()]), "object"),
        ({1: 2.0}, "key 1"),
    ],
)
def test_what_cannot_be_encoded_is_named(value: object, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        frames.encode(value)


def test_integers_beyond_64_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"CreateAdapter.*64 bits"):
        frames.encode(c.CreateAdapter("a", c.LoraSpec(1), 2**64))


@settings(max_examples=300)
@given(st.binary(max_size=80))
def test_garbage_is_a_value_error(body: bytes) -> None:
    try:
        frames.decode(body)
    except ValueError as error:
        assert "no message of ours" in str(error)


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_message_is_a_value_error_or_a_message(data: st.DataObject) -> None:
    body = bytearray(b"".join(frames.encode(data.draw(MESSAGES[c.Forward]))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, min(len(body) - 1, 200)))] = data.draw(st.integers(0, 255))
    try:
        frames.decode(body[: data.draw(st.integers(0, len(body)))])
    except ValueError as error:
        assert "no message of ours" in str(error)


def test_a_tree_that_names_a_missing_array_or_class_is_refused() -> None:
    def body(tree: object) -> bytes:
        packed: bytes = msgpack.packb(tree)
        return struct.pack("!I", len(packed)) + packed

    for tree in (
        msgpack.ExtType(1, msgpack.packb(["<f4", [9], 0])),
        msgpack.ExtType(1, msgpack.packb(["|O", [1], 0])),
        msgpack.ExtType(2, b""),
        ["Popen", "sh"],
        ["Ping", 1],
        [],
        [7],
    ):
        with pytest.raises(ValueError, match="no message of ours"):
            frames.decode(body(tree))


def test_no_class_has_keyword_only_fields() -> None:
    # a decoded dataclass is built from all its fields by position: keyword-only ones would break it
    for kind in frames.CLASSES:
        assert not any(f.kw_only for f in fields(kind))
