"""The loss of each token from its logprob; every loss is a sum over tokens (and targets).

Losses that need the whole sequence are in `sequence_losses`. These are branches of one executable, chosen by number, so
that changing the loss compiles nothing. The formulas are those of the public Tinker documentation ("Loss Functions").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from tinkerflow.backend.commands import LOSS_CONFIG, TOKEN_LOSSES, Loss
from tinkerflow.backend.errors import UserError

_MOST_VALUES = 2  # in a loss's config; they are in the order of LOSS_CONFIG, zeros behind


@flax.struct.dataclass
class LossInputs:
    """What a loss needs beside the logprobs, float32 and of their shape; weights are 0 where nothing is scored.

    clip_low and clip_high are NaN where the config's threshold holds. Its leaves are host arrays on the way in, and
    device arrays in a step.
    """

    weights: Any
    old_logprobs: Any
    advantages: Any
    clip_low: Any
    clip_high: Any


@flax.struct.dataclass
class LossChoice:
    """Which loss, and with which config: float32 [3], its number in TOKEN_LOSSES and then its config values."""

    vector: Any


def choose(loss: Loss, config: Mapping[str, float]) -> LossChoice:
    """The host form of a loss and its config; UserError names an unknown loss or config key."""
    if loss not in LOSS_CONFIG:
        raise UserError(f"loss_fn {loss!r} is unknown; known: {', '.join(TOKEN_LOSSES)}")
    defaults = LOSS_CONFIG[loss]
    for key in config:
        if key not in defaults:
            takes = ", ".join(defaults) or "nothing"
            raise UserError(f"loss_fn_config[{key!r}]: {loss} does not take it; it takes: {takes}")
    vector: npt.NDArray[np.float32] = np.zeros(1 + _MOST_VALUES, np.float32)
    vector[0] = TOKEN_LOSSES.index(loss)
    for place, (key, default) in enumerate(defaults.items(), 1):
        vector[place] = config.get(key, default)
    return LossChoice(vector)


def token_losses(choice: LossChoice, logprobs: jax.Array, inputs: LossInputs) -> jax.Array:
    """The loss of every token, of the shape of `logprobs`, weights applied."""
    branches = [_BRANCHES[name] for name in TOKEN_LOSSES]
    vector = jnp.asarray(choice.vector)
    return jax.lax.switch(vector[0].astype(jnp.int32), branches, vector[1:], logprobs, inputs) * inputs.weights


def _cross_entropy(config: jax.Array, logprobs: jax.Array, inputs: LossInputs) -> jax.Array:
    return -logprobs


def _importance_sampling(config: jax.Array, logprobs: jax.Array, inputs: LossInputs) -> jax.Array:
    return -jnp.exp(logprobs - inputs.old_logprobs) * inputs.advantages


def _ppo(config: jax.Array, logprobs: jax.Array, inputs: LossInputs) -> jax.Array:
    ratio = jnp.exp(logprobs - inputs.old_logprobs)
    clipped = jnp.clip(ratio, *_thresholds(config, inputs))
    return -jnp.minimum(ratio * inputs.advantages, clipped * inputs.advantages)


def _cispo(config: jax.Array, logprobs: jax.Array, inputs: LossInputs) -> jax.Array:
    ratio = jnp.clip(jnp.exp(logprobs - inputs.old_logprobs), *_thresholds(config, inputs))
    return -jax.lax.stop_gradient(ratio) * logprobs * inputs.advantages


def _dro(config: jax.Array, logprobs: jax.Array, inputs: LossInputs) -> jax.Array:
    distance = logprobs - inputs.old_logprobs
    return -(logprobs * inputs.advantages - 0.5 * config[0] * distance * distance)


def _thresholds(config: jax.Array, inputs: LossInputs) -> tuple[jax.Array, jax.Array]:
    def of(given: jax.Array, default: jax.Array) -> jax.Array:
        return jnp.where(jnp.isnan(given), default, given)

    return of(inputs.clip_low, config[0]), of(inputs.clip_high, config[1])


_BRANCHES = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
}
