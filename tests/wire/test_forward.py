"""Decoding of the SDK's forward_backward requests, and errors that name invalid content."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.wire.conftest import datum, forward_body
from tinker import types

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.spec.limits import MAX_IMAGE_TOKENS
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.backend.wire import (
    decode_forward,
    forward,
    forward_backward_header,
    images,
    read_forward,
    training_tokens,
)
from tinkerflow.backend.wire import tinker_pb2 as pb

VOCAB, CONTEXT = 100, 64
SEES = ImageProcessor(token=99, side=8, least=64, most=4096, mean=(0.0,) * 3, deviation=(1.0,) * 3)


def decode(body: bytes, max_context: int = CONTEXT, processor: ImageProcessor | None = None) -> Any:
    return decode_forward(read_forward(body), vocab_size=VOCAB, max_context=max_context, processor=processor)


def message_of(*args: Any) -> pb.ForwardBackwardRequest:
    return pb.ForwardBackwardRequest.FromString(forward_body(*args))


def policy(n: int, **more: Any) -> dict[str, Any]:
    return {"weights": None, "logprobs": np.zeros(n, np.float32), "advantages": np.ones(n, np.float32), **more}


def test_header_is_read_without_the_data() -> None:
    assert forward_backward_header(forward_body([datum([1, 2])])) == ("sess-1:train:0", 7, False)
    assert forward_backward_header(forward_body([datum([1, 2])], forward_only=True)).forward_only


@example(b"\x80\x80\x80\x80\x88\x00\x00", 0)  # a tag with more bytes than a tag may have
@given(st.binary(max_size=60), st.integers(0, 60))
@settings(max_examples=200)
def test_header_reader_agrees_with_the_protobuf_parser(more: bytes, cut: int) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=2**31 - 1, loss_fn="custom", data=[pb.Datum()] * 2)
    message.loss_fn_config["x"] = 1.0
    fields = message.SerializeToString()
    for body in (fields + more, more + fields, fields[:-cut] + more):
        try:
            header = forward_backward_header(body)
        except UserError:
            continue
        expected = pb.ForwardBackwardHeader.FromString(body)
        assert header == (expected.model_id, expected.seq_id, expected.forward_only)


def test_header_is_not_searched_among_a_million_fields() -> None:
    with pytest.raises(UserError, match="more than 65536 fields"):
        forward_backward_header(b"\x20\x01" * 2**20 + b"\x0a\x01m")


def test_cross_entropy_from_the_sdk() -> None:
    first = datum([1, 2, 3], target_tokens=np.array([2, 3, 4]), weights=np.array([0.0, -1.5, 1.0], np.float32))
    command = decode(forward_body([first, datum([5])]))
    assert (command.adapter_id, command.loss, command.backward, command.config) == (
        "sess-1:train:0", "cross_entropy", True, {},
    )  # fmt: skip
    example = command.examples[0]
    assert example.flat
    assert example.tokens_T.dtype == np.int32
    assert example.tokens_T.tolist() == [1, 2, 3]
    assert example.targets_TK.dtype == np.int32
    assert example.targets_TK.tolist() == [[2], [3], [4]]
    assert example.weights_TK.dtype == np.float32
    assert example.weights_TK.tolist() == [[0.0], [-1.5], [1.0]]
    assert example.inputs == {}
    assert len(command.examples[1].tokens_T) == 1


def test_forward_only_request_computes_no_backward() -> None:
    assert not decode(forward_body([datum([1])], forward_only=True)).backward


def test_chunks_of_one_prompt_are_joined() -> None:
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])]
    inputs = {"target_tokens": np.array([1, 2, 3]), "weights": np.ones(3, np.float32)}
    command = decode(forward_body([types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)]))
    assert command.examples[0].tokens_T.tolist() == [1, 2, 3]


def test_integer_weights_and_an_absent_shape() -> None:
    message = message_of([datum([1, 2], weights=np.array([0, 3]))])
    del message.data[0].loss_fn_inputs["weights"].shape[:]
    example = decode(message.SerializeToString()).examples[0]
    assert example.weights_TK.dtype == np.float32
    assert example.weights_TK.tolist() == [[0.0], [3.0]]


@pytest.mark.parametrize(
    ("loss", "given_config", "config"),
    [
        ("importance_sampling", None, {"mask_low_threshold": 0.0, "mask_high_threshold": math.inf}),
        ("ppo", None, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("ppo", {"clip_high_threshold": 1.5}, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}),
        ("cispo", None, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        ("dro", {"beta": 0.1}, {"beta": 0.1}),
        ("dro", None, {"beta": 0.05}),
    ],
)
def test_policy_losses(loss: str, given_config: Any, config: Any) -> None:
    command = decode(forward_body([datum([1, 2], **policy(2))], loss, given_config))
    assert (command.loss, command.config) == (loss, config)
    example = command.examples[0]
    assert example.weights_TK.tolist() == [[1.0], [1.0]]
    assert example.inputs["logprobs"].shape == example.inputs["advantages"].shape == (2, 1)


def test_old_config_map_is_read_without_the_new_one() -> None:
    message = message_of([datum([1], **policy(1))], "dro", {"beta": 0.2})
    message.loss_fn_config_v2.clear()
    assert decode(message.SerializeToString()).config == {"beta": 0.2}


@given(st.data())
@settings(max_examples=50)
def test_two_dimensional_targets_dense_or_sparse(data: st.DataObject) -> None:
    from tinker.proto.request_conv import _tensor_data_to_proto

    rows, width = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    targets = torch.tensor(rng.integers(0, VOCAB, (rows, width)) * (rng.random((rows, width)) < 0.3))
    weights = torch.tensor(rng.normal(size=(rows, width)) * (rng.random((rows, width)) < 0.3), dtype=torch.float32)
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    one = message.data.add()
    one.model_input.add().encoded_text.tokens = np.arange(rows, dtype=np.int32).tobytes()
    for key, tensor in (("target_tokens", targets), ("weights", weights)):
        made = (
            types.TensorData.from_torch_sparse(tensor)
            if data.draw(st.booleans())
            else types.TensorData.from_torch(tensor)
        )
        one.loss_fn_inputs[key].MergeFromString(_tensor_data_to_proto(made).SerializeToString())
    example = decode(message.SerializeToString()).examples[0]
    assert not example.flat
    assert np.array_equal(example.targets_TK, targets.numpy())
    assert np.array_equal(example.weights_TK, weights.numpy())


def one(message: pb.ForwardBackwardRequest) -> Any:
    return message.data[1]


def put(message: pb.ForwardBackwardRequest, key: str, values: Any, dtype: int = pb.DTYPE_FLOAT32) -> None:
    tensor = one(message).loss_fn_inputs[key]
    array = np.asarray(values, {1: np.float32, 2: np.int64}[dtype])
    tensor.Clear()
    tensor.dense, tensor.dtype = array.tobytes(), dtype
    tensor.shape.extend(array.shape)


WRONG: list[tuple[str, str, Callable[[Any], object], str]] = [
    ("unknown loss", "cross_entropy", lambda m: setattr(m, "loss_fn", "dpo"),
     f"loss_fn is 'dpo': must be one of {', '.join(LOSSES)}"),
    ("no data", "cross_entropy", lambda m: m.ClearField("data"), "data is []: must be at least one datum"),
    ("config of a loss without", "cross_entropy", lambda m: m.loss_fn_config.update({"beta": 1.0}),
     "loss_fn_config has the key 'beta': must be absent, cross_entropy takes no config"),
    ("unknown config key", "ppo", lambda m: m.loss_fn_config.update({"clip": 1.0}),
     "loss_fn_config has the key 'clip': must be one of clip_low_threshold, clip_high_threshold"),
    ("config not finite", "dro", lambda m: m.loss_fn_config.update({"beta": float("nan")}),
     "loss_fn_config['beta'] is nan: must be a finite number >= 0"),
    ("config crossed", "ppo", lambda m: m.loss_fn_config.update({"clip_low_threshold": 2.0}),
     "loss_fn_config['clip_low_threshold'] is 2.0: must be <= clip_high_threshold, 1.2"),
    ("config of an epsilon", "ppo", lambda m: m.loss_fn_config.update({"clip_high_threshold": 0.28}),
     "must be <= clip_high_threshold, 0.28; thresholds are ratios: 1.28 = 1 + 0.28"),
    ("text config", "ppo", lambda m: setattr(m.loss_fn_config_v2["clip_low_threshold"], "text", "a"),
     "loss_fn_config['clip_low_threshold'] is 'a': must be a finite number >= 0"),
    ("missing targets", "cross_entropy", lambda m: one(m).loss_fn_inputs.pop("target_tokens"),
     "data[1].loss_fn_inputs lacks 'target_tokens': cross_entropy needs target_tokens, weights"),
    ("missing advantages", "ppo", lambda m: one(m).loss_fn_inputs.pop("advantages"),
     "data[1].loss_fn_inputs lacks 'advantages': ppo needs advantages, logprobs, target_tokens"),
    ("unknown input", "cross_entropy", lambda m: put(m, "mask", [1.0, 1.0, 1.0]),
     "data[1].loss_fn_inputs has 'mask': cross_entropy takes target_tokens, weights"),
    ("short targets", "cross_entropy", lambda m: put(m, "target_tokens", [1, 2], pb.DTYPE_INT64),
     "data[1].loss_fn_inputs['target_tokens'] has 2 positions: must be 3, one for each token of model_input"),
    ("long weights", "cross_entropy", lambda m: put(m, "weights", [1.0] * 4),
     "data[1].loss_fn_inputs['weights'].shape is [4]: must be [3], the shape of target_tokens"),
    ("token too high", "cross_entropy", lambda m: put(m, "target_tokens", [1, 2, 100], pb.DTYPE_INT64),
     "data[1].loss_fn_inputs['target_tokens'] at position 2 is 100: must be >= 0 and < 100, the model's vocabulary"),
    ("token far too high", "cross_entropy", lambda m: put(m, "target_tokens", [1, 2**40, 0], pb.DTYPE_INT64),
     "data[1].loss_fn_inputs['target_tokens'] at position 1 is 1099511627776: must be"),
    ("token negative", "cross_entropy",
     lambda m: setattr(one(m).model_input[0].encoded_text, "tokens", np.array([1, -1, 2], np.int32).tobytes()),
     "data[1].model_input at position 1 is -1: must be >= 0 and < 100"),
    ("float targets", "cross_entropy", lambda m: put(m, "target_tokens", [1.0, 2.0, 3.0]),
     "data[1].loss_fn_inputs['target_tokens'].dtype is 'float32': must be int64"),
    ("weight not finite", "cross_entropy", lambda m: put(m, "weights", [1.0, float("nan"), 1.0]),
     "data[1].loss_fn_inputs['weights'] at position 1 is nan: must be a finite number"),
    ("advantage infinite", "ppo", lambda m: put(m, "advantages", [float("inf"), 0, 0]),
     "data[1].loss_fn_inputs['advantages'] at position 0 is inf: must be a finite number"),
    ("empty sequence", "cross_entropy", lambda m: one(m).ClearField("model_input"),
     "data[1].model_input has 0 tokens: must be 1 to 64, the model's context"),
    ("too long", "cross_entropy",
     lambda m: setattr(one(m).model_input[0].encoded_text, "tokens", bytes(4 * 65)),
     "data[1].model_input has 65 tokens: must be 1 to 64, the model's context"),
    ("torn tokens", "cross_entropy", lambda m: setattr(one(m).model_input[0].encoded_text, "tokens", bytes(11)),
     "data[1].model_input has 11 bytes of tokens: must be a multiple of 4 (int32)"),
    ("image", "cross_entropy", lambda m: setattr(one(m).model_input.add().image, "format", "png"),
     "data[1].model_input.chunks[1] is image: must be encoded_text, because the model accepts no images"),
    ("audio", "cross_entropy", lambda m: setattr(one(m).model_input.add().dmel, "dmel", b"x"),
     "data[1].model_input.chunks[1] is dmel: must be encoded_text"),
    ("empty chunk", "cross_entropy", lambda m: one(m).model_input.add(), "data[1].model_input.chunks[1] is empty"),
    ("bfloat16", "cross_entropy", lambda m: setattr(one(m).loss_fn_inputs["weights"], "dtype", pb.DTYPE_BFLOAT16),
     "data[1].loss_fn_inputs['weights'].dtype is 4: must be FLOAT32 (1), INT64 (2) or INT32 (3)"),
    ("torn tensor", "cross_entropy", lambda m: setattr(one(m).loss_fn_inputs["weights"], "dense", bytes(13)),
     "data[1].loss_fn_inputs['weights'] has 13 bytes of data: 3 values of float32 need 12"),
    ("wide", "cross_entropy", lambda m: one(m).loss_fn_inputs["target_tokens"].shape.append(2**40),
     "data[1].loss_fn_inputs['target_tokens'].shape is [3, 1099511627776]: must be [T] or [T, K] with 1 <= K <= 256"),
    ("three dimensions", "cross_entropy", lambda m: one(m).loss_fn_inputs["target_tokens"].shape.extend([1, 1]),
     "data[1].loss_fn_inputs['target_tokens'].shape is [3, 1, 1]: must be [T] or [T, K]"),
    ("negative dimension", "cross_entropy", lambda m: one(m).loss_fn_inputs["weights"].shape.__setitem__(0, -3),
     "data[1].loss_fn_inputs['weights'].shape is [-3]: must be [T] or [T, K]"),
    ("huge dimension", "cross_entropy", lambda m: one(m).loss_fn_inputs["weights"].shape.__setitem__(0, 2**62),
     "data[1].loss_fn_inputs['weights'].shape is [4611686018427387904]: must be [T] or [T, K], with sizes up to"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "change", "text"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_invalid_content_is_named(loss: str, change: Callable[[Any], object], text: str) -> None:
    inputs = {} if loss == "cross_entropy" else policy(3)
    message = message_of([datum([1, 2, 3], **inputs)] * 2, loss)
    change(message)
    with pytest.raises(UserError, match=re.escape(text)):
        decode(message.SerializeToString())


@pytest.mark.parametrize(
    ("crow", "cols", "text"),
    [
        ([0, 1, 2], [0, 1, 0], "crow_indices must start at 0, never fall, and end at 3"),
        ([0, 2, 1], [0, 1, 1], "crow_indices must start"),
        ([0, 2, 3], [0, 2, 1], "col_indices has values from 0 to 2: must be >= 0 and < 2"),
        ([0, 2, 3], [1, 1, 1], "col_indices must rise strictly within each row"),
        ([0, 2], [0, 1, 1], "crow_indices has 16 bytes of data: 3 values of int64 need 24"),
    ],
)
def test_a_broken_sparse_tensor_is_named(crow: Any, cols: Any, text: str) -> None:
    message = message_of([datum([1, 2])])
    for key in ("target_tokens", "weights"):
        tensor = message.data[0].loss_fn_inputs[key]
        dtype = np.int64 if key == "target_tokens" else np.float32
        tensor.sparse_csr.values = np.ones(3, dtype).tobytes()
        tensor.sparse_csr.crow_indices = np.asarray(crow, np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.asarray(cols, np.int64).tobytes()
        del tensor.shape[:]
        tensor.shape.extend([2, 2])
    with pytest.raises(UserError, match=f"target_tokens.*{re.escape(text)}"):
        decode(message.SerializeToString())


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_random_bytes_decode_or_raise_a_user_error(data: bytes) -> None:
    for read in (decode, forward_backward_header):
        try:
            read(data)
        except UserError as e:
            assert e.message


def test_decoding_makes_as_many_calls_for_long_rows_as_for_short_ones() -> None:
    def calls(tokens: int) -> int:
        message, found = forward_body([datum(list(range(tokens))) for _ in range(16)]), []
        decode(message)
        sys.setprofile(lambda frame, event, argument: found.append(event))
        try:
            decode(message)
        finally:
            sys.setprofile(None)
        return sum(event in ("call", "c_call") for event in found)

    assert calls(60) == calls(6)


def test_an_image_is_a_run_of_placeholders_and_its_pixels() -> None:
    out = io.BytesIO()
    Image.new("RGB", (24, 16), (1, 2, 3)).save(out, "png")
    image = types.ImageChunk(data=out.getvalue(), format="png", expected_tokens=6)
    chunks = [image, types.EncodedTextChunk(tokens=[1, 2]), image]
    inputs = {"target_tokens": np.zeros(14, np.int64), "weights": np.ones(14, np.float32)}
    sent = forward_body([types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)])
    assert training_tokens(sent) == 14
    (example,) = decode(sent, processor=SEES).examples
    assert example.tokens_T.tolist() == [99] * 6 + [1, 2] + [99] * 6
    assert [one.start for one in example.images] == [0, 8]
    assert example.images[1].pixels_HWC.tolist() == [[[1, 2, 3]] * 24] * 16
    with pytest.raises(UserError, match=r"more than 7 tokens up to chunks\[1\]: must be 1 to 7, the model's context"):
        decode(sent, 7, processor=SEES)
    message = pb.ForwardBackwardRequest.FromString(sent)
    first, second, _ = message.data[0].model_input

    def refuse(error: str) -> None:
        with pytest.raises(UserError, match=error):
            decode(message.SerializeToString(), processor=SEES)

    first.image.override_dimensions.width = 8
    refuse(r"chunks\[0\].override_dimensions is '8 x 0': must be absent")
    first.image.ClearField("override_dimensions")
    second.dmel.dmel = b"x"
    refuse(r"chunks\[1\] is dmel: must be encoded_text or image, because the model accepts no dmels")
    second.encoded_text.tokens = b"abc"
    refuse("has 27 bytes of tokens: must be a multiple of 4")
    first.image.ClearField("expected_tokens")
    assert training_tokens(message.SerializeToString()) == MAX_IMAGE_TOKENS + 0 + 6


def test_the_pixels_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    Image.new("RGB", (16, 16)).save(out, "jpeg")
    image = types.ImageChunk(data=out.getvalue(), format="jpeg", expected_tokens=4)
    inputs = {"target_tokens": np.zeros(4, np.int64), "weights": np.ones(4, np.float32)}
    data = [types.Datum(model_input=types.ModelInput(chunks=[image]), loss_fn_inputs=inputs)] * 3
    monkeypatch.setattr(images, "MAX_REQUEST_PIXEL_BYTES", 2 * 3 * 16 * 16)
    with pytest.raises(UserError, match=r"more than 1536 bytes of pixels up to data\[2\], .*: must be at most 1536"):
        decode(forward_body(data), processor=SEES)


def test_the_number_of_data_and_of_cells_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes can declare sparse tensors of any size."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(4):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.int32([1, 2]).tobytes()
        for key, dtype in (("target_tokens", pb.DTYPE_INT64), ("weights", pb.DTYPE_FLOAT32)):
            tensor = datum.loss_fn_inputs[key]
            tensor.dtype = dtype
            tensor.shape.extend([2, 100])
            tensor.sparse_csr.crow_indices = np.zeros(3, np.int64).tobytes()
    request = message.SerializeToString()
    assert len(decode(request).examples) == 4
    for limit, value, error in (
        ("MAX_DATA", 3, "data has 4 entries: must be at most 3"),
        ("MAX_REQUEST_CELLS", 500, r"data has 600 target cells up to data\[2\]: must be at most 500"),
        ("MAX_REQUEST_CELLS", 300, r"data\[0\].loss_fn_inputs has 400 cells: must be at most 300"),
        ("MAX_INPUT_CELLS", 900, r"data has 1200 input cells up to data\[2\]: must be at most 900"),
    ):
        with monkeypatch.context() as patched, pytest.raises(UserError, match=error):
            patched.setattr(forward, limit, value)
            decode(request)
