"""PPO's clipped objective (Schulman et al., arXiv 1707.06347)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinkerflow.backend.spec.losses import CLIP, CLIP_INPUTS, POLICY, LossSpec, clip_config, thresholds

if TYPE_CHECKING:
    import jax


def ppo(logprobs: jax.Array, inputs: Mapping[str, jax.Array], config: Mapping[str, jax.Array]) -> jax.Array:
    """-min(r * A, clip(r) * A), r = exp(lp - q)."""
    import jax.numpy as jnp

    ratio = jnp.exp(logprobs - inputs["logprobs"])
    clipped = jnp.clip(ratio, *thresholds(inputs, config))
    return -jnp.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


LOSS = LossSpec("ppo", inputs=(*POLICY, *CLIP_INPUTS), config=clip_config(0.8, 1.2), ordered=CLIP, per_token=ppo)
