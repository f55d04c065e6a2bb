"""DRO: the policy gradient with a quadratic pull toward the sampler's policy (Richemond et al., arXiv 2405.19107)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tinkerflow.backend.spec.losses import POLICY, ConfigKey, LossSpec

if TYPE_CHECKING:
    import jax


def dro(logprobs: jax.Array, inputs: Mapping[str, jax.Array], config: Mapping[str, jax.Array]) -> jax.Array:
    """-(lp * A - beta / 2 * (lp - q)^2)."""
    distance = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - 0.5 * config["beta"] * distance * distance)


# The documentation gives no default for beta; its example uses 0.05.
LOSS = LossSpec("dro", inputs=POLICY, config={"beta": ConfigKey(0.05)}, per_token=dro)
