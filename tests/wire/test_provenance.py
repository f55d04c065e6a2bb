"""Provenance spans in requests of the SDK, and policy losses with more inputs than others."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.wire.conftest import forward_body
from tinker import types
from tinker.types.provenance_spans import PromptProvenanceSpan, SampledProvenanceSpan

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import ForwardResult, StabilityInfo
from tinkerflow.backend.spec.drift import SUPPORTED
from tinkerflow.backend.spec.supports import Supports
from tinkerflow.backend.wire import decode_forward, drift_metrics, read_forward
from tinkerflow.backend.wire import tinker_pb2 as pb

RECORDED = {"req-1-0": StabilityInfo("req-1-0", np.int32([7, 8, 9]), np.float32([-1, -2, -3]))}


def prompt(length: int, offset: int = 0, name: str = "req-1-0") -> PromptProvenanceSpan:
    return PromptProvenanceSpan(sequence_id=name, offset=offset, length=length)


def sampled(length: int, offset: int = 0, name: str = "req-1-0") -> SampledProvenanceSpan:
    return SampledProvenanceSpan(sequence_id=name, offset=offset, length=length)


def rollout(**more: Any) -> types.Datum:
    """A datum with the prompt 5 6 and the sample 7 8 9, shifted by one."""
    inputs = {
        "target_tokens": np.array([6, 7, 8, 9]),
        "advantages": np.float32([0, 1, 1, 1]),
        "logprobs": np.float32([0, -9, -9, -9]),
        **more,
    }
    return types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7, 8]), loss_fn_inputs=inputs)


def attributed(**more: Any) -> types.Datum:
    return rollout(**more).with_provenance(*spans())


def spans() -> tuple[Any, Any]:
    """Spans of the model's input and of the loss's inputs."""
    return [prompt(2), sampled(2)], [prompt(1, 1), sampled(3)]


def decode(body: bytes) -> Any:
    read = read_forward(body)
    return decode_forward(read, vocab_size=10, max_context=16, recorded={k: RECORDED[k] for k in read.sequence_ids})


def test_the_samplers_logprobs_and_the_sampled_tokens_alone() -> None:
    request = forward_body([attributed(weights=np.float32([2, 2, 2, 0.5]))], "stable_reinforce", {"kl_coeff": 0.1})
    assert read_forward(request).sequence_ids == {"req-1-0"}
    command = decode(request)
    assert command.config == {"kl_coeff": 0.1}
    (example,) = command.examples
    assert example.inputs["logprobs"][:, 0].tolist() == [0, -1, -2, -3]
    assert example.weights_TK[:, 0].tolist() == [0, 2, 2, 0.5]


def test_zero_length_spans_are_legal() -> None:
    datum = rollout().with_provenance(
        [prompt(0), prompt(2), sampled(2)], [prompt(1), sampled(1), sampled(0, 3), sampled(2, 1)]
    )
    (example,) = decode(forward_body([datum], "stable_reinforce")).examples
    assert example.inputs["logprobs"][:, 0].tolist() == [0, -1, -2, -3]


def test_spans_of_other_losses_are_checked_and_not_needed() -> None:
    assert read_forward(forward_body([attributed()], "ppo")).sequence_ids == frozenset()
    assert decode(forward_body([attributed()], "ppo")).examples[0].inputs["logprobs"][1, 0] == -9


@pytest.mark.parametrize("loss", ["stable_reinforce", "ppo"])
def test_sampled_experts_are_placed_before_their_target_token(loss: str) -> None:
    """A token's experts computed the logits of the next token, so they lie where that token is the target."""
    request = forward_body([attributed(), rollout()] if loss == "ppo" else [attributed()], loss)
    read, routes = read_forward(request, routes=True), np.arange(6, dtype=np.int16).reshape(3, 2)
    assert read.sequence_ids == {"req-1-0"}
    recorded = {"req-1-0": replace(RECORDED["req-1-0"], routes_Tn=routes)}
    example, *others = decode_forward(read, vocab_size=10, max_context=16, recorded=recorded).examples
    assert example.routes_Tn is not None
    assert example.routes_Tn.tolist() == [[-1, -1], [0, 1], [2, 3], [4, 5]]
    assert [one.routes_Tn for one in others] == [None] * len(others)
    assert decode_forward(read, vocab_size=10, max_context=16, recorded=RECORDED).examples[0].routes_Tn is None


@pytest.mark.parametrize("loss", ["stable_reinforce", "ppo", "cross_entropy"])
def test_sampled_supports_are_placed_at_their_target_token(loss: str) -> None:
    """The second token's support was too large to record. Losses without the sampler's logprobs need no supports."""
    data = [attributed(), rollout()] if loss == "ppo" else [attributed()]
    if loss == "cross_entropy":
        inputs = {"target_tokens": np.array([6, 7, 8, 9]), "weights": np.float32([0, 1, 1, 1])}
        tokens = types.ModelInput.from_ints([5, 6, 7, 8])
        data = [types.Datum(model_input=tokens, loss_fn_inputs=inputs).with_provenance(*spans())]
    read = read_forward(forward_body(data, loss), supports=True, routes=loss == "cross_entropy")
    assert read.sequence_ids == {"req-1-0"}
    for_supports = read_forward(forward_body(data, loss), supports=True).sequence_ids
    assert for_supports == (set() if loss == "cross_entropy" else {"req-1-0"})
    supports = Supports(np.int32([2, 0, 1]), np.int32([7, 1, 9]), np.float32([-0.5, 0, -1]))
    recorded = {"req-1-0": replace(RECORDED["req-1-0"], supports=supports)}
    command = decode_forward(read, vocab_size=10, max_context=16, recorded=recorded)
    example, *others = command.examples
    assert [one.supports for one in others] == [None] * len(others)
    result = ForwardResult(tuple(np.zeros(4, np.float32) for _ in data), 0.0)
    if loss == "cross_entropy":
        assert example.supports is None and drift_metrics(command, result) == {}
        return
    assert example.supports is not None
    assert example.supports.counts_N.tolist() == [0, 2, 0, 1]
    assert example.supports.tokens_M.tolist() == [7, 1, 9]
    assert example.supports.log_mass_N.tolist() == [0, -0.5, 0, -1]
    assert drift_metrics(command, result)[SUPPORTED] == pytest.approx(2 / 3)
    assert SUPPORTED not in drift_metrics(decode(forward_body(data, loss)), result)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d.ClearField("model_input_spans"), "data[0] has model_input_spans or loss_fn_input_spans, not both"),
        (lambda d: [d.ClearField(f"{x}_spans") for x in ("model_input", "loss_fn_input")], "data[0] has no provenance"),
        (lambda d: d.loss_fn_input_spans.pop(), "data[0].loss_fn_input_spans cover 1 positions: must tile the field"),
        (lambda d: d.model_input_spans.add(), "data[0].model_input_spans[2] is 'empty'"),
        (lambda d: setattr(d.loss_fn_input_spans[1].sampled_tokens, "offset", 1), "3 tokens were sampled"),
        (lambda d: setattr(d.loss_fn_input_spans[1].sampled_tokens, "offset", -1), "must both be >= 0"),
        (lambda d: setattr(d.loss_fn_input_spans[1].sampled_tokens, "sequence_id", ""), "sequence_id is ''"),
        (lambda d: setattr(d.loss_fn_input_spans[1].sampled_tokens, "sequence_id", "a\0"), r"sequence_id is 'a\x00'"),
        (
            lambda d: d.loss_fn_inputs["target_tokens"].__setattr__("dense", np.int64([6, 7, 1, 9]).tobytes()),
            "position 2 is token 1, but 8 was sampled there in 'req-1-0'",
        ),
    ],
)  # fmt: skip
def test_invalid_spans_are_named(change: Any, told: str) -> None:
    message = pb.ForwardBackwardRequest.FromString(forward_body([attributed()], "stable_reinforce"))
    change(message.data[0])
    with pytest.raises(UserError, match=re.escape(told)):
        decode(message.SerializeToString())


@pytest.mark.parametrize(
    ("loss", "inputs", "config", "told"),
    [
        ("gspo", {"clip_low_threshold": np.float32([-1, 0, 0, 0])}, None, "at position 0 is -1.0: must be >= 0"),
        ("ppo", {"clip_low_threshold": [0.0, 0, 3, 0], "clip_high_threshold": [1.0] * 4}, None, "above those"),
        ("ppo", {"clip_high_threshold": [0.2] * 4}, None, "below loss_fn_config['clip_low_threshold'], 0.8: must be"),
        ("gspo", {"clip_low_threshold": [1.2] * 4}, None, "above loss_fn_config['clip_high_threshold'], 1.0004"),
        ("gspo", {"sequence_ratio_mask": np.zeros(4, np.float32)}, None, "must not be 0 for at least one token"),
        ("gspo", {"sequence_ratio_mask": np.float32([1, -1, 0, 0])}, None, "at position 1 is -1.0"),
        ("gspo", {"clip_high_threshold": np.float32([1, np.nan, 1, 1])}, None, "at position 1 is nan"),
        ("gspo", {"sequence_ratio_mask": np.ones(3, np.float32)}, None, "the shape of target_tokens"),
        ("ppo", {"sequence_ratio_mask": np.ones(4, np.float32)}, None, "has 'sequence_ratio_mask'"),
        ("stable_reinforce", {}, {"kl_coeff": float("nan")}, "loss_fn_config['kl_coeff'] is nan"),
        ("stable_reinforce", {}, {"beta": 1.0}, "loss_fn_config has the key 'beta'"),
        ("gspo", {}, {"clip_low_threshold": 2.0, "clip_high_threshold": 1.0}, "loss_fn_config['clip_low_threshold']"),
        ("custom", {}, {"loss_id": 3.0}, "loss_fn_config['loss_id'] is 3.0"),
        ("custom", {}, {"id": "x"}, "loss_fn_config has the key 'id'"),
    ],
)  # fmt: skip
def test_invalid_inputs_and_configs_are_named(loss: str, inputs: Any, config: Any, told: str) -> None:
    datum = attributed(**inputs) if loss == "stable_reinforce" else rollout(**inputs)
    with pytest.raises(UserError, match=re.escape(told)):
        decode(forward_body([datum], loss, config))


def test_masked_tokens_need_no_valid_thresholds() -> None:
    """The prompt's token has the advantage 0."""
    high = np.float32([0.0, 1.1, 1.1, 1.1])
    for more in ({}, {"clip_low_threshold": [0.9] * 4}):
        (example,) = decode(forward_body([rollout(clip_high_threshold=high, **more)], "ppo")).examples
        assert np.array_equal(example.inputs["clip_high_threshold"][:, 0], high)


def test_gspo_as_the_sdk_sends_it() -> None:
    more = {
        "clip_low_threshold": [0.9] * 4,
        "clip_high_threshold": [1.1] * 4,
        "sequence_ratio_mask": [0.0, 1.0, 1.0, 1.0],
    }
    command = decode(forward_body([rollout(**more)], "gspo"))
    assert command.config == {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}
    (example,) = command.examples
    assert example.inputs["clip_low_threshold"][:, 0] == pytest.approx([0.9] * 4)
    assert example.inputs["clip_high_threshold"][:, 0] == pytest.approx([1.1] * 4)
    assert example.inputs["sequence_ratio_mask"][:, 0].tolist() == [0, 1, 1, 1]
