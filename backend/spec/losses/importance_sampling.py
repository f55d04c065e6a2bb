"""REINFORCE with importance sampling: the policy gradient for samples of an older policy.

Thresholds in the configuration make it masked importance sampling (Ling Team, 2025, "IcePop").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinkerflow.backend.spec.losses import POLICY, POLICY_MASKS, ConfigKey, LossSpec

if TYPE_CHECKING:
    import jax


def importance_sampling(
    logprobs: jax.Array, inputs: Mapping[str, jax.Array], config: Mapping[str, jax.Array]
) -> jax.Array:
    """-r * A, r = exp(lp - q); 0 for tokens whose r is outside the thresholds."""
    import jax.numpy as jnp

    log_ratio = logprobs - inputs["logprobs"]
    exact = jnp.exp(log_ratio)
    masked = (exact < config[_MASK[0]]) | (exact > config[_MASK[1]])  # a ratio that is NaN stays in the loss
    # 0 times the slope of an infinite ratio would be NaN.
    return -jnp.where(masked, 0.0, jnp.exp(jnp.where(masked, 0.0, log_ratio))) * inputs["advantages"]


_MASK = ("mask_low_threshold", "mask_high_threshold")
LOSS = LossSpec(
    "importance_sampling",
    inputs=POLICY,
    config={_MASK[0]: ConfigKey(0.0), _MASK[1]: ConfigKey(math.inf)},
    masks=POLICY_MASKS,
    ordered=_MASK,
    per_token=importance_sampling,
)
