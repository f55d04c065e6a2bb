"""CISPO: REINFORCE weighted by a clipped importance ratio without slope (MiniMax, arXiv 2506.13585)."""

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


def cispo(logprobs: jax.Array, inputs: Mapping[str, jax.Array], config: Mapping[str, jax.Array]) -> jax.Array:
    """-clip(r) * lp * A, r = exp(lp - q) without slope."""
    import jax
    import jax.numpy as jnp

    ratio = jnp.clip(jnp.exp(logprobs - inputs["logprobs"]), *thresholds(inputs, config))
    return -jax.lax.stop_gradient(ratio) * logprobs * inputs["advantages"]


LOSS = LossSpec(
    "cispo",
    inputs=(*POLICY, *CLIP_INPUTS),
    config=clip_config(0.0, 4.0),
    masks=POLICY_MASKS,
    ordered=CLIP,
    per_token=cispo,
)
