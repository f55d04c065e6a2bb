"""Losses of whole sequences: their formulas against torch, and equal training for packed and separate examples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.compute.closeness import close
from tests.compute.conftest import add_adapter, examples, forward, gradients

from tinkerflow.backend.compute.training.sequence_losses import SequenceLoss, SequenceLosses
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import Example, Forward
from tinkerflow.backend.spec.losses import LOSSES

LENGTHS = (3, 40, 17, 5)


def gspo(lp, e, config):
    """-sum of w * min(s * A, clip(s) * A), where s = sg(exp(mean of lp - q)) * lp's own ratio to itself."""
    q, w, a = (torch.tensor(x.astype(np.float64)) for x in (e.inputs["logprobs"], e.weights_TK, e.inputs["advantages"]))
    mask = (
        (w * a != 0).double()
        if "sequence_ratio_mask" not in e.inputs
        else torch.tensor(e.inputs["sequence_ratio_mask"]).double()
    )
    s = torch.exp((mask * (lp - q)).sum() / mask.sum()).detach() * torch.exp(lp - lp.detach())
    low, high = (e.inputs.get(name, config[name]) for name in ("clip_low_threshold", "clip_high_threshold"))
    clipped = torch.minimum(torch.maximum(s, torch.as_tensor(low)), torch.as_tensor(high))
    return -(w * torch.minimum(s * a, clipped * a)).sum()


def stable_reinforce(lp, e, config):
    q, w, a = (torch.tensor(x.astype(np.float64)) for x in (e.inputs["logprobs"], e.weights_TK, e.inputs["advantages"]))
    log_ratio = lp - q
    taper = torch.exp(log_ratio[w != 0].sum()).clamp(max=1).detach()
    pull = torch.where(a >= 0, a, taper * a)
    return (w * (-pull * lp + config["kl_coeff"] * (log_ratio.exp() - 1 - log_ratio))).sum()


TORCH = {"gspo": gspo, "stable_reinforce": stable_reinforce}
CASES = [
    ("gspo", {}),
    ("gspo", {"clip_low_threshold": 0.2, "clip_high_threshold": 5.0}),
    ("stable_reinforce", {}),
    ("stable_reinforce", {"kl_coeff": 0.3}),
]


def judge(command: Forward, logprobs: list[np.ndarray]) -> SequenceLoss:
    losses = SequenceLosses(command, logprobs)
    losses.compute(range(len(command.examples)))
    return losses.result()


def given(example, **inputs):
    """The example with some inputs replaced."""
    return replace(example, inputs={**example.inputs, **inputs})


def near(examples, seed=0):
    """Logprobs near the sampler's, as they are in practice."""
    rng = np.random.default_rng(seed)
    return [
        (e.inputs["logprobs"] + rng.normal(size=e.targets_TK.shape, scale=0.02)).astype(np.float32) for e in examples
    ]


def check(loss, config, data, logprobs):
    config = {**LOSSES[loss].defaults, **config}
    judged = judge(Forward("a", data, loss, config), logprobs)
    total = 0.0
    for lp, example, surrogate in zip(logprobs, data, judged.surrogates, strict=True):
        x = torch.tensor(lp.astype(np.float64), requires_grad=True)
        value = TORCH[loss](x, example, config)
        value.backward()
        total += value.item()
        close(-surrogate.weights_TK, x.grad.numpy())
    assert judged.loss_sum == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize(("loss", "config"), CASES)
@pytest.mark.parametrize("targets", [1, 3])
def test_value_and_slope(loss, config, targets):
    data = examples(LENGTHS, targets)
    check(loss, config, data, near(data))


def test_gspo_takes_a_datums_own_thresholds_and_mask():
    data = examples(LENGTHS)
    rng = np.random.default_rng(3)
    masks = [(rng.random(e.targets_TK.shape) < 0.5).astype(np.float32) for e in data]
    for mask in masks:
        mask[0] = 1
    logprobs = near(data)
    masked = tuple(given(e, sequence_ratio_mask=mask) for e, mask in zip(data, masks, strict=True))
    check("gspo", {}, masked, logprobs)
    wide = tuple(
        given(e, clip_low_threshold=np.full_like(m, 0.1), clip_high_threshold=np.full_like(m, 9))
        for e, m in zip(data, masks, strict=True)
    )
    check("gspo", {}, wide, logprobs)


def test_prompt_tokens_without_advantage_are_left_out_of_the_ratio():
    """RL data has logprob 0 and advantage 0 on the prompt, so the ratio must count sampled tokens only."""
    (example,) = examples((8,))
    old, advantages = (example.inputs[name].copy() for name in ("logprobs", "advantages"))
    old[:5] = advantages[:5] = 0
    prompted = given(example, logprobs=old, advantages=advantages)
    logprobs = old + np.float32(0.0001)
    logprobs[:5] = -7
    config = LOSSES["gspo"].defaults
    judged = judge(Forward("a", (prompted,), "gspo", config), [logprobs])
    expected = -(example.weights_TK * np.exp(0.0001) * advantages).sum()
    assert judged.loss_sum == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("loss", ["gspo", "stable_reinforce"])
def test_training_is_the_same_packed_and_alone(executor, loss):
    data = examples(LENGTHS)
    add_adapter(executor, "together")
    add_adapter(executor, "apart")
    close = [lp[:, None] for lp in forward(executor, "together", data).logprobs]
    data = tuple(given(e, logprobs=lp + np.float32(0.0002)) for e, lp in zip(data, close, strict=True))
    together = forward(executor, "together", data, loss, backward=True, **LOSSES[loss].defaults)
    apart = [forward(executor, "apart", (e,), loss, backward=True, **LOSSES[loss].defaults) for e in data]
    assert together.loss_sum == pytest.approx(sum(one.loss_sum for one in apart), rel=1e-3)
    first, second = gradients(executor, "together"), gradients(executor, "apart")
    scale = max(np.abs(g).max() for g in first.values())
    assert scale > 0
    assert max(np.abs(first[n] - second[n]).max() for n in first) < 1e-3 * scale


def test_non_finite_gspo_loss_names_its_datum():
    ones = np.ones((2, 1), np.float32)
    far = Example(
        np.zeros(2, np.int32), np.zeros((2, 1), np.int32), ones, inputs={"logprobs": ones * -3e4, "advantages": ones}
    )
    fine = given(far, logprobs=-ones)
    with pytest.raises(UserError, match=r"data\[1\]: gspo gives the loss -inf or a slope that is not finite"):
        judge(
            Forward("a", (fine, far), "gspo", {"clip_low_threshold": 0.0, "clip_high_threshold": np.inf}),
            [-ones, -ones],
        )
