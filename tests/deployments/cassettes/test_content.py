"""The first field in which two requests differ."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import msgspec
import numpy as np
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from tinkerflow.backend.wire.tinker_pb2 import Datum, ForwardBackwardRequest
from tinkerflow.deployments.cassettes.content import difference, equal, fingerprint, tree_of
from tinkerflow.deployments.cassettes.requests import ClientRequest, asked


@pytest.mark.parametrize(
    ("now", "then", "text"),
    [
        ({"a": 1}, {"a": 1.0}, None),
        ({"a": float("nan")}, {"a": float("nan")}, None),
        ({"a": {"b": 2}}, {"a": {"b": 3}}, "a.b is 2, but was 3 in the recording"),
        ({"a": 1, "b": 2}, {"a": 1}, "b is 2, but was not given in the recording"),
        ({}, {"a": "x"}, "a is not given, but was 'x' in the recording"),
        ({"a": [1, 5]}, {"a": [1, 6]}, "a[1] is 5, but was 6 in the recording"),
        ({"a": [1]}, {"a": [1, 6]}, "a has 1 item, but had 2 in the recording"),
        ({"a": [2, 3]}, {"a": [1]}, "a has 2 items, but had 1 in the recording; a[0] is 2, but was 1 in the recording"),
        ({"a": [{"b": 1}]}, {"a": [{"b": "c" * 200}]}, f"a[0].b is 1, but was '{'c' * 78}… in the recording"),
        ({"a": b"12"}, {"a": b"123"}, "a is 2 bytes, but was 3 bytes in the recording"),
    ],
)
def test_differences(now: Any, then: Any, text: str | None) -> None:
    assert difference(now, then) == text


def chunk(tokens: list[int], weights: list[float], **more: Any) -> ClientRequest:
    """A forward_backward as the SDK sends it."""
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": np.array(tokens), "weights": np.array(weights, np.float32)},  # type: ignore[dict-item]
    )
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy", **more),
        model_id="sess-a:train:0",
        seq_id=1,
    )
    body = forward_backward_request_to_proto(request).SerializeToString()
    return asked("POST", "/api/v1/forward_backward", body)


def compare(now: ClientRequest, then: ClientRequest, ignore: tuple[str, ...] = ()) -> str | None:
    assert equal(now, then, ignore) is (difference(tree_of(now, ignore), tree_of(then, ignore)) is None)
    return difference(tree_of(now, ignore), tree_of(then, ignore))


def test_training_data_are_compared_as_numbers() -> None:
    then = chunk([1, 2, 3], [1.0, 1.0, 0.5])
    assert compare(chunk([1, 2, 3], [1.0, 1.0, 0.5]), then) is None
    weights = "data[0].loss_fn_inputs.weights.data"
    assert compare(chunk([1, 2, 3], [1.0, 0.25, 0.5]), then) == f"{weights}[1] is 0.25, but was 1.0 in the recording"
    tokens = "data[0].model_input[0].encoded_text.tokens"
    assert str(compare(chunk([1, 9, 3], [1.0] * 3), then)).startswith(f"{tokens}[1] is 9, but was 2")
    assert str(compare(chunk([1, 2], [1.0] * 2), then)).startswith(f"{tokens} has 2 items, but had 3")


def in_order(body: bytes, names: tuple[str, ...]) -> bytes:
    """The same request with its datum's inputs in this order. Concatenated protobuf messages are one message."""
    request = ForwardBackwardRequest.FromString(body)
    datum = b"".join(
        Datum(loss_fn_inputs={name: request.data[0].loss_fn_inputs[name]}).SerializeToString() for name in names
    )
    datum += Datum(model_input=request.data[0].model_input).SerializeToString()
    del request.data[:]
    assert len(datum) < 128  # its length is encoded in one byte
    return bytes(request.SerializeToString() + b"\x1a" + bytes([len(datum)]) + datum)


def test_the_order_of_bytes_does_not_count() -> None:
    then = chunk([1, 2], [1.0, 1.0])
    bodies = [in_order(then.body, names) for names in permutations(("target_tokens", "weights"))]
    assert len(set(bodies)) == 2
    for body in bodies:
        assert compare(asked("POST", "/api/v1/forward_backward", body), then) is None


def sample(**fields: Any) -> ClientRequest:
    body = {"sampling_session_id": "sess-a:sample:0", "seq_id": 0, "num_samples": 1, **fields}
    return asked("POST", "/api/v1/asample", msgspec.json.encode(body))


def test_ignored_fields_do_not_count() -> None:
    now, then = sample(user={"at": 1, "by": "me"}, top=[{"x": 1}]), sample(user={"at": 2, "by": "me"}, top=[{"x": 2}])
    assert compare(now, then, ("user.at",)) == "top[0].x is 1, but was 2 in the recording"
    assert compare(now, then, ("user", "top.x")) is None
    assert fingerprint(now, ("user", "top")) == fingerprint(then, ("user", "top"))
    assert fingerprint(now) != fingerprint(then)


def test_the_order_of_keys_and_nulls_do_not_count() -> None:
    assert fingerprint(sample(a=1, b=2, c=None)) == fingerprint(sample(b=2, a=1))
