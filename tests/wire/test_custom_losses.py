"""Traced losses: supported operations, and errors that name unsupported ones."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import orjson
import pytest
from tests.wire.conftest import datum, forward_body

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.wire import (
    CustomLossAddress,
    decode_forward,
    dump_custom_loss,
    load_custom_loss,
    parse,
    read_custom_loss,
    read_forward,
)

GOOD: dict[str, Any] = {
    "session_id": "sess-1",
    "custom_loss_seq_id": 3,
    "name": "mine",
    "inputs": [{"name": "logprobs", "rank": 1}, {"name": "adv", "rank": 1}],
    "graph": {
        "format": 1,
        "nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
            {"op": "placeholder", "name": "adv", "target": "adv", "args": [], "kwargs": {}},
            {
                "op": "call_function",
                "name": "mul",
                "target": "operator.mul",
                "args": [{"ref": "logprobs"}, {"ref": "adv"}],
            },
            {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "mul"}]},
            {
                "op": "output",
                "name": "output",
                "target": "output",
                "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {"custom/x:sum": {"ref": "sum_1"}}}]}],
            },
        ],
    },
}  # fmt: skip


def decode(body: dict[str, Any]) -> Any:
    return read_custom_loss(parse(orjson.dumps(body)))


def test_valid_custom_loss_survives_a_round_trip() -> None:
    loss = decode(GOOD)
    assert (loss.name, loss.inputs) == ("mine", {"logprobs": 1, "adv": 1})
    assert load_custom_loss(dump_custom_loss(loss)) == loss
    address = CustomLossAddress.decode(orjson.dumps(GOOD))
    assert (address.session_id, address.custom_loss_seq_id) == ("sess-1", 3)


def node(index: int, **change: Any) -> Any:
    return lambda body: body["graph"]["nodes"][index].update(change)


def deep(levels: int) -> Any:
    return 0 if levels == 0 else [deep(levels - 1)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (node(2, target="os.system"), "graph.nodes[2] 'mul' ('os.system'): the function is not supported"),
        (node(2, target="torch.load"), "the function is not supported"),
        (node(3, target="backward"), "graph.nodes[3] 'sum_1' ('backward'): the method is not supported"),
        (node(3, target="__class__"), "the method is not supported"),
        (node(2, target="getattr", args=[{"ref": "adv"}, "__class__"]), "the attribute must be one of T, device"),
        (node(2, op="call_module"), "op call_module: a custom loss cannot contain its own tensors or modules"),
        (node(2, op="get_attr"), "op get_attr"),
        (node(2, op="exec"), "op 'exec' is unknown"),
        (node(2, args=[{"ref": "sum_1"}]), "refers to 'sum_1', which is not an earlier node"),
        (node(2, args=[{"eval": "1"}]), "is not of a kind that a custom loss supports"),
        (node(2, args=[{"dtype": "complex64"}]), "dtype 'complex64' must be one of"),
        (node(2, args=[deep(20)]), "nested deeper than 8"),
        (node(3, name="mul"), "another node has this name"),
        (node(3, args=[3]), "the first argument must be the tensor"),
        (node(1, target="other"), "with the placeholders ['logprobs', 'adv']"),
        (node(4, args=[{"ref": "sum_1"}]), "must return (loss, metrics)"),
        (node(4, args=[{"tuple": [{"ref": "mul"}, {"dict": {"loss:sum": {"ref": "mul"}}}]}]), "must be named custom/"),
        (node(4, args=[{"tuple": [{"ref": "sum_1"}, {"dict": {"custom/x:sum": 3}}]}]), "must be a node's value"),
        (node(4, op="call_method", target="sum", args=[{"ref": "mul"}]), "the last node, and no other"),
        (lambda b: b["graph"].update(format=2), "graph.format is 2"),
        (lambda b: b["graph"].update(nodes=[{}] * 3000), "graph.nodes is 3000"),
        (lambda b: b.update(inputs=b["inputs"] * 9), "inputs is"),
        (lambda b: b["inputs"][1].update(rank=3), "inputs[1].rank is 3"),
        (lambda b: b["inputs"][1].update(name="Adv"), "inputs[1].name is 'Adv'"),
        (lambda b: b["inputs"][0].update(rank=0), "logprobs, of rank 1 or 2"),
        (lambda b: b.update(name=""), "name is"),
        (node(2, kwargs={"out": ["x" * 2**20]}), "bytes as JSON: must be at most 1048576"),
        (node(2, target="torch.arange", args=[2**21]), None),  # shapes are checked with the data
        (node(2, target="torch.cat", args=[[{"ref": "adv"}] * 5000]), "an example of one token: the loss takes about"),
    ],
)  # fmt: skip
def test_invalid_graphs_are_named(change: Any, told: str | None) -> None:
    body = copy.deepcopy(GOOD)
    change(body)
    if told is None:
        assert decode(body).name == "mine"
        return
    with pytest.raises(UserError, match=re.escape(told)):
        decode(body)


def test_datum_must_have_the_inputs_that_the_loss_reads() -> None:
    def forward(**inputs: Any) -> Any:
        request = forward_body([datum([1, 2, 3], **inputs)], "custom", {"loss_id": "sess-1:loss:3"})
        read = read_forward(request)
        assert read.loss_id == "sess-1:loss:3"
        return decode_forward(read, vocab_size=10, max_context=16, custom=decode(GOOD))

    command = forward(adv=np.float32([1, 2, 3]), unread=np.float32([7]))
    assert 0 < command.loss_seconds[0] < 1
    assert command.custom == decode(GOOD)
    assert command.examples[0].inputs.keys() == {"adv"}
    assert command.examples[0].inputs["adv"].tolist() == [1, 2, 3]
    for inputs, told in (
        ({}, "data[0].loss_fn_inputs lacks 'adv', which loss 'mine' takes"),
        ({"adv": np.ones((3, 1), np.float32)}, "of rank 1, as the loss declares it"),
        ({"adv": np.ones(4, np.float32)}, "custom loss 'mine': node 'mul' (operator.mul): ValueError: shape mismatch"),
        ({"adv": np.float32([1, np.inf, 3])}, "data[0].loss_fn_inputs['adv'] at position 1 is inf"),
        ({"adv": np.int64([1, 2, 2**31])}, "['adv'] at position 2 is 2147483648: must be a whole number of 32 bits"),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            forward(**inputs)
