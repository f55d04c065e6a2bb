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
    # A clipped token's loss is constant. Its ratio may overflow, and 0 times the slope of infinity is NaN, so the
    # differentiated formula gets another ratio there.
    exact = jax.lax.stop_gradient(jnp.exp(log_ratio))
    bound = jnp.clip(exact, *bounds)
    constant = jnp.where(advantages > 0, exact > bound, exact < bound)
    ratio = jnp.exp(jnp.where(constant, 0.0, log_ratio))
    objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, *bounds) * advantages)
    return -jnp.where(constant, bound * advantages, objective)


LOSS = LossSpec(
    "ppo",
    inputs=(*POLICY, *CLIP_INPUTS),
    config=clip_config(0.8, 1.2),
    masks=POLICY_MASKS,
    ordered=CLIP,
    per_token=ppo,
)
