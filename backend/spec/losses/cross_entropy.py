"""Weighted cross entropy: supervised learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinkerflow.backend.spec.losses import LossSpec, TokenInput

if TYPE_CHECKING:
    import jax


def cross_entropy(logprobs: jax.Array, inputs: Mapping[str, jax.Array], config: Mapping[str, jax.Array]) -> jax.Array:
    """-lp."""
    return -logprobs


LOSS = LossSpec("cross_entropy", inputs=(TokenInput("weights"),), per_token=cross_entropy)
