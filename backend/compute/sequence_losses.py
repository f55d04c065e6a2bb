"""Losses of whole sequences: from all logprobs of an example to its loss and the loss's slope by each of them.

They run on the host, in float64, after a forward pass has given the logprobs; a second pass then trains with weighted
cross entropy, whose weights are minus the slopes (its gradient is the loss's own, by the chain rule). That costs a
forward pass more than the losses of tokens do, and compiles nothing. Packing and micro-batches cannot matter: each
example is looked at by itself. Letters: T tokens, K targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.commands import LOSS_CONFIG, Example, Float32, Forward
from tinkerflow.backend.compute.custom_losses import custom_losses
from tinkerflow.backend.errors import UserError

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Judged:
    """What a command's examples cost, and the examples to train on with cross_entropy in their stead."""

    loss_sum: float
    surrogates: tuple[Example, ...]
    metrics: Mapping[str, float]


def judge(command: Forward, logprobs: Sequence[Float32]) -> Judged:
    """The loss of `command`, given the logprobs of its examples, each [T] or [T, K].

    UserError names an example whose loss or slope is not finite; nothing has changed then.
    """
    shaped = [one.reshape(example.targets_TK.shape) for one, example in zip(logprobs, command.examples, strict=True)]
    metrics: Mapping[str, float] = {}
    if command.custom is not None:
        found, metrics = custom_losses(command.custom, command.examples, shaped)
    else:
        formula = _FORMULAS[command.loss]
        config = {**LOSS_CONFIG[command.loss], **command.config}
        with np.errstate(over="ignore", invalid="ignore"):
            found = [
                formula(config, lp.astype(np.float64), example)
                for lp, example in zip(shaped, command.examples, strict=True)
            ]
    for i, (loss, slope_TK) in enumerate(found):
        if not np.isfinite(loss) or not np.isfinite(slope_TK.astype(np.float32)).all():
            raise UserError(
                f"data[{i}]: {command.loss} gives the loss {loss:g} or a slope that is not finite; nothing was trained"
            )
    return Judged(
        loss_sum=float(sum(loss for loss, _ in found)),
        surrogates=tuple(
            replace(example, weights_TK=(-slope_TK).astype(np.float32))
            for example, (_, slope_TK) in zip(command.examples, found, strict=True)
        ),
        metrics=metrics,
    )


def gspo(config: Mapping[str, float], logprobs_TK: Float64, example: Example) -> tuple[float, Float64]:
    """Group sequence policy optimization, in its token form (Zheng et al., arXiv 2507.18071, section 4.3).

    s = exp(mean of (lp - q)) over the sequence's tokens is the ratio of all of them, and the loss is
    -sum over tokens of w * min(s * A, clip(s) * A), where a token's slope is taken as if s were lp's own ratio. The
    paper divides by the sequence's length; here losses are sums, as all of them: scale the advantages for the mean.
    The mean is over the tokens of ratio_mask_TK (a weighted mean), else over those with weight and advantage.
    """
    weights, old, advantages = _policy_inputs(example)
    mask = (weights * advantages != 0).astype(np.float64) if example.ratio_mask_TK is None else example.ratio_mask_TK
    total = mask.sum()
    ratio = np.exp((mask * (logprobs_TK - old)).sum() / total) if total else 1.0
    low, high = _thresholds(config, example)
    unclipped, clipped = ratio * advantages, np.clip(ratio, low, high) * advantages
    slope_TK = np.where(unclipped <= clipped, -weights * unclipped, 0.0)
    return float(-(weights * np.minimum(unclipped, clipped)).sum()), slope_TK


def stable_reinforce(config: Mapping[str, float], logprobs_TK: Float64, example: Example) -> tuple[float, Float64]:
    """REINFORCE that stays stable off-policy: tapered importance weights, and a penalty on leaving the sampler.

    The public documentation names the loss and `kl_coeff` and gives no formula. This is TOPR (Le Roux et al., "Tapered
    Off-Policy REINFORCE", arXiv 2503.14286): tokens with a positive advantage are plain REINFORCE, whose gradient
    cannot run away; those with a negative one are weighted by the sequence's ratio, at most 1, so that what the policy
    has left behind is not pushed further. To it, kl_coeff times Schulman's k3 estimate of KL(sampler | policy):

        loss = sum of w * (-c * A * lp + kl_coeff * (r - 1 - log r)),  log r = lp - q
        c = 1 where A >= 0, else min(1, exp(sum of log r)), without slope

    q, and which tokens were sampled (others have weight 0), come from what was recorded at sampling.
    """
    weights, old, advantages = _policy_inputs(example)
    log_ratio = logprobs_TK - old
    taper = np.exp(min(0.0, float(log_ratio[weights != 0].sum())))
    pull = np.where(advantages >= 0, 1.0, taper) * advantages
    ratio, coefficient = np.exp(log_ratio), config["kl_coeff"]
    loss = (weights * (-pull * logprobs_TK + coefficient * (ratio - 1 - log_ratio))).sum()
    return float(loss), weights * (-pull + coefficient * (ratio - 1))


def _policy_inputs(example: Example) -> tuple[Float64, Float64, Float64]:
    old, advantages = example.old_logprobs_TK, example.advantages_TK
    if old is None or advantages is None:
        raise UserError("loss_fn_inputs: a policy loss needs logprobs and advantages")
    return example.weights_TK.astype(np.float64), old.astype(np.float64), advantages.astype(np.float64)


def _thresholds(config: Mapping[str, float], example: Example) -> tuple[float | Float32, float | Float32]:
    low, high = example.clip_low_TK, example.clip_high_TK
    return (
        config["clip_low_threshold"] if low is None else low,
        config["clip_high_threshold"] if high is None else high,
    )


_FORMULAS = {"gspo": gspo, "stable_reinforce": stable_reinforce}
