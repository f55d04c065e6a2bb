"""REINFORCE with importance sampling: the policy gradient for samples of an older policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinkerflow.backend.spec.losses import POLICY, POLICY_MASKS, LossSpec

if TYPE_CHECKING:
    import jax


def importance_sampling(
    logprobs: jax.Array, inputs: Mapping[str, jax.Array], config: Mapping[str, jax.Array]
) -> jax.Array:
    """-exp(lp - q) * A."""
    import jax.numpy as jnp

    return -jnp.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]


LOSS = LossSpec("importance_sampling", inputs=POLICY, masks=POLICY_MASKS, per_token=importance_sampling)
