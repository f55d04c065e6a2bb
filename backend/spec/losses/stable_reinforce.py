"""REINFORCE that stays stable off-policy: tapered importance weights, and a penalty on leaving the sampler.

The public documentation names the loss and `kl_coeff`, but gives no formula. We use TOPR (Le Roux et al., "Tapered
Off-Policy REINFORCE", arXiv 2503.14286). Tokens with a positive advantage use plain REINFORCE, whose gradient cannot
diverge. Tokens with a negative advantage are weighted by the sequence's ratio, at most 1, so that a sequence that the
policy no longer produces is not pushed further. The penalty is kl_coeff times Schulman's k3 estimate of
KL(sampler | policy).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinkerflow.backend.spec.losses import WEIGHTS, ConfigKey, Float32, Float64, LossSpec, TokenInput


def stable_reinforce(
    logprobs_TK: Float64, inputs: Mapping[str, Float32], config: Mapping[str, float]
) -> tuple[float, Float64]:
    """sum of w * (-c * A * lp + kl_coeff * (r - 1 - log r)), log r = lp - q.

    c = 1 where A >= 0, else min(1, exp(sum of log r)), without slope. q comes from the records of the sampling. Tokens
    that were not sampled have weight 0.
    """
    weights, old, advantages = (inputs[name].astype(np.float64) for name in ("weights", "logprobs", "advantages"))
    log_ratio = np.where(weights != 0, logprobs_TK - old, 0.0)
    taper = np.exp(min(0.0, float(log_ratio[weights != 0].sum())))
    pull = np.where(advantages >= 0, 1.0, taper) * advantages
    coefficient = config["kl_coeff"]
    ratio = np.exp(log_ratio) if coefficient else 1.0  # a disabled term must not overflow
    loss = (weights * (-pull * logprobs_TK + coefficient * (ratio - 1 - log_ratio))).sum()
    return float(loss), weights * (-pull + coefficient * (ratio - 1))


# RL code sends logprobs with every datum. The recorded logprobs replace them.
LOSS = LossSpec(
    "stable_reinforce",
    inputs=(WEIGHTS, TokenInput("logprobs", required=False), TokenInput("advantages")),
    config={"kl_coeff": ConfigKey(0.0)},
    per_sequence=stable_reinforce,
    recorded=True,
)
