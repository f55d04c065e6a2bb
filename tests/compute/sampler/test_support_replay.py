"""Support replay: the ratio of two policies over the tokens that top-k, top-p and min-p kept."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import add_adapter, ask, forward, gradients, result_of
from tests.compute.test_experts import adapted_weights

from tinkerflow.backend.spec.commands import (
    CreateAdapter,
    Example,
    ExportAdapter,
    ImportAdapter,
    LoraSpec,
    PublishSnapshot,
)
from tinkerflow.backend.spec.drift import AGREEMENT
from tinkerflow.backend.spec.losses import LOSSES
from tinkerflow.backend.spec.prefix_trees import prefix_trees
from tinkerflow.backend.spec.supports import MOST_SUPPORTED, Supports, equal_supports, restricted_inputs

PROMPT = list(range(3, 23))
FILTERS = {"temperature": 1.0, "top_k": 5, "top_p": 0.7}


@pytest.fixture(scope="module")
def executor(qwen3: Any) -> Any:
    executor = qwen3.executor()
    add_adapter(executor, "a", train_unembed=False)
    add_adapter(executor, "b", seed=7, train_unembed=False)
    executor.execute(PublishSnapshot("a", "s"))
    return executor


def sampled(executor: Any, count: int = 3, **more: Any) -> Any:
    request = ask("r", PROMPT, 30, snapshot_id="s", seed=5, num_samples=count, **{**FILTERS, "supports": True, **more})
    return result_of(executor, request).sequences


def datum(sequence: Any, advantage: float = 1.0) -> Example:
    """A sample as a datum with its supports."""
    whole = np.asarray([*PROMPT, *sequence.tokens_T], np.int32)
    before = len(PROMPT) - 1

    def column(values: Any) -> Any:
        return np.concatenate([np.zeros(before), np.broadcast_to(values, len(whole) - 1 - before)])[:, None].astype(
            "f4"
        )

    supports = Supports.joined([Supports.unrestricted(before), sequence.supports])
    inputs = {"logprobs": column(sequence.logprobs_T), "advantages": column(advantage)}
    return Example(whole[:-1], whole[1:, None], column(1.0), inputs=inputs, supports=supports)


def data_of(sequences: Any) -> tuple[Example, ...]:
    return tuple(datum(one, advantage) for one, advantage in zip(sequences, (1.0, -0.5, 0.25), strict=True))


def test_equal_weights_have_ratio_one(executor):
    """The probabilities of the supports differ from 1. The logprobs of the answer remain those over all tokens."""
    plain = sampled(executor, supports=False)
    sequences = sampled(executor)
    assert plain[0].supports is None
    assert [one.tokens_T.tolist() for one in sequences] == [one.tokens_T.tolist() for one in plain]
    for one in sequences:
        held = zip(one.tokens_T, one.supports.rows(), one.supports.counts_N, strict=True)
        assert all(token in row[:count] and 1 <= count <= 5 for token, row, count in held)
        assert one.supports.log_mass_N.max() < -1e-3
    data = data_of(sequences)
    result = forward(executor, "a", data, "importance_sampling")
    assert result.loss_sum == pytest.approx(-30 * 0.75, rel=1e-4)
    without = forward(executor, "a", tuple(replace(one, supports=None) for one in data), "importance_sampling")
    for one, other in zip(result.logprobs, without.logprobs, strict=True):
        close_logprobs(one, other)


def masked_loss(model: Any, named: Any, data: Any, loss: str, config: Any) -> tuple[torch.Tensor, float, list[Any]]:
    """A tensor with the gradient of the loss, the loss, and the logprobs of each example, in float64 by torch.

    named: the parameters of the model. The loss uses the softmax over logits that are masked outside of the supports.
    """
    total, value, scored = torch.zeros((), dtype=torch.float64), 0.0, []
    for example in data:
        tokens = torch.tensor(example.tokens_T[None].astype(np.int64))
        logits = torch.func.functional_call(model, named, (tokens,)).logits[0]
        masked, targets = logits.clone(), torch.tensor(example.targets_TK.astype(np.int64))
        for place, (row, count) in enumerate(zip(example.supports.rows(), example.supports.counts_N, strict=True)):
            if count:
                masked[place, np.setdiff1d(np.arange(logits.shape[1]), row[:count])] = -torch.inf
        whole, seen = (torch.log_softmax(x, -1).gather(1, targets) for x in (logits, masked))
        scored.append(whole.detach().numpy()[:, 0])
        inputs = {"weights": example.weights_TK, **restricted_inputs(example.inputs, example.supports)}
        if loss == "gspo":
            of_example, slope_TK = LOSSES[loss].per_sequence(seen.detach().numpy(), inputs, config)
            total, value = total + (torch.tensor(slope_TK) * seen).sum(), value + of_example
        else:
            ratio = torch.exp(seen - torch.tensor(inputs["logprobs"]))
            total = total - (ratio * torch.tensor(inputs["advantages"])).sum()
            value = total.item()
    return total, value, scored


@pytest.mark.parametrize("loss", ["importance_sampling", "gspo"])
@pytest.mark.parametrize("policy", ["a", "b"])
def test_losses_and_gradients_equal_masked_logits_in_float64(qwen3, executor, loss, policy):
    """Samples of adapter a train a copy of it, and another policy."""
    data = data_of(sampled(executor))
    state = executor.execute(ExportAdapter(policy, optimizer=False))
    executor.execute(ImportAdapter(name := f"{policy} for {loss}", state))
    config = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6} if loss == "gspo" else {}
    result = forward(executor, name, data, loss, backward=True, **config)
    model = copy.deepcopy(qwen3.model).double()
    pairs = {key: torch.tensor(array.astype(np.float64), requires_grad=True) for key, array in state.weights.items()}
    total, value, scored = masked_loss(model, adapted_weights(model, pairs), data, loss, config)
    total.backward()
    assert result.loss_sum == pytest.approx(value, rel=1e-3)
    for one, other in zip(result.logprobs, scored, strict=True):
        close_logprobs(one, other)
    for matrix, array in gradients(executor, name).items():
        wanted = pairs[matrix].grad.numpy()
        assert np.abs(array - wanted).max() < 2e-3 * max(1.0, np.abs(wanted).max()), matrix
        assert np.abs(wanted).max() > 0


def test_full_training_supports_masked_vocabularies(executor, qwen3):
    data = data_of(sampled(executor))
    executor.execute(CreateAdapter("all", LoraSpec(0), 0))
    result = forward(executor, "all", data, "importance_sampling", backward=True)
    model = copy.deepcopy(qwen3.model).double()
    total, value, _ = masked_loss(model, dict(model.named_parameters()), data, "importance_sampling", {})
    total.backward()
    assert result.loss_sum == pytest.approx(value, rel=1e-3)
    wanted = {name: tensor.grad.numpy() for name, tensor in model.named_parameters()}
    found = gradients(executor, "all")
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        assert np.abs(array - wanted[name]).max() < 2e-3 * max(1.0, np.abs(wanted[name]).max()), name


def test_prompts_with_different_supports_are_not_merged(executor):
    """In one row with a shared prefix, each example has the loss that it has alone."""
    one = datum(sampled(executor, 1)[0])
    counts_N = one.supports.counts_N.copy()
    counts_N[30:] = 0
    tokens_M, log_mass_N = one.supports.tokens_M[: counts_N.sum()], np.where(counts_N > 0, one.supports.log_mass_N, 0)
    other = replace(one, supports=Supports(counts_N, tokens_M, log_mass_N.astype(np.float32)))
    assert [tree[1].shared for tree in prefix_trees((one, other), LOSSES["importance_sampling"])] == [30]
    assert prefix_trees((one, one), LOSSES["importance_sampling"])[0][1].shared == len(one.tokens_T)
    alone = [forward(executor, "b", (example,), "importance_sampling").loss_sum for example in (one, other)]
    together = forward(executor, "b", (one, other), "importance_sampling").loss_sum
    assert together == pytest.approx(sum(alone), rel=1e-4) and abs(alone[0] - alone[1]) > 1e-2


def test_experts_and_supports_are_replayed_together(moe):
    executor = moe.executor()
    add_adapter(executor, "a", train_unembed=False)
    executor.execute(PublishSnapshot("a", "s"))
    sequences = sampled(executor, routes=True)
    data = []
    for example, one in zip(data_of(sequences), sequences, strict=True):
        routes_Tn = np.full((len(example.tokens_T), one.routes_Tn.shape[1]), -1, np.int16)
        routes_Tn[len(PROMPT) - 1 :] = one.routes_Tn
        data.append(replace(example, routes_Tn=routes_Tn))
    result = forward(executor, "a", tuple(data), "importance_sampling", backward=True)
    assert result.loss_sum == pytest.approx(-30 * 0.75, rel=1e-4)
    assert result.metrics[AGREEMENT] == 1.0


def test_supports_that_are_equal_until_a_position():
    rows = np.array([[1, 2, -1], [3, -1, -1], [-1, -1, -1], [4, 5, 6]], np.int32)
    one = Supports.of(rows, np.zeros(4, np.float32))
    assert one.counts_N.tolist() == [2, 1, 0, 3] and one.tokens_M.tolist() == [1, 2, 3, 4, 5, 6]
    assert one.rows().shape == (4, MOST_SUPPORTED) and np.array_equal(one.rows()[:, :3], rows)
    assert equal_supports(one, one, 4) == 4 and equal_supports(None, None, 4) == 4
    for change, equal in (((0, 1), 0), ((1, 0), 1), ((3, 2), 3)):
        other = rows.copy()
        other[change] = 9
        assert equal_supports(one, Supports.of(other, np.zeros(4, np.float32)), 4) == equal
    assert equal_supports(one, None, 4) == 0 and equal_supports(one.part(2, 4), None, 2) == 1
    assert np.array_equal(Supports.joined([one.part(0, 1), one.part(1, 4)]).rows(), one.rows())
