"""PPO's clipped objective (Schulman et al., arXiv 1707.06347)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinkerflow.backend.spec.losses import (
    CLIP,
    CLIP_INPUTS,
    POLICY,
    POLICY_MASKS,
    LossSpec,
    clip_config,
    thresholds,
)

if TYPE_CHECKING:
    import jax


def ppo(logprobs: jax.Array, inputs: Mapping[str, jax.Array], config: Mapping[str, jax.Array]) -> jax.Array:
    """-min(r * A, clip(r) * A), r = exp(lp - q)."""
    import jax
    import jax.numpy as jnp

    log_ratio, advantages = logprobs - inputs["logprobs"], inputs["advantages"]
    bounds = thresholds(inputs, config)
    # The clipped term is lower only beyond the bound on the side of the advantage. There the loss is constant. The
    # ratio may overflow, and 0 times the slope of infinity is NaN, so the differentiated formula gets another ratio.
    exact = jax.lax.stop_gradient(jnp.exp(log_ratio))
    bound = jnp.clip(exact, *bounds)
    constant = jnp.where(advantages > 0, exact > bound, exact < bound)
    ratio = jnp.exp(jnp.where(constant, 0.0, log_ratio))
    return -jnp.where(constant, bound * advantages, ratio * advantages)


LOSS = LossSpec(
    "ppo",
    inputs=(*POLICY, *CLIP_INPUTS),
    config=clip_config(0.8, 1.2),
    masks=POLICY_MASKS,
    ordered=CLIP,
    per_token=ppo,
)
