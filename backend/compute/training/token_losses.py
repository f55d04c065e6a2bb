"""Losses per token, applied on the devices. `backend/spec/losses` contains the formulas.

One program contains all formulas and selects one by its number, so changing the loss compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tinkerflow.backend.compute.training.optimizer import Leaf
from tinkerflow.backend.spec.losses import LOSSES, LossSpec, loss_named

PER_TOKEN = tuple(spec for spec in LOSSES.values() if spec.per_token is not None)
_MOST_VALUES = max(len(spec.config) for spec in PER_TOKEN)

TokenInputs = Mapping[str, jax.Array]  # names as in `packed_inputs`; each has the shape of the logprobs


@flax.struct.dataclass
class LossChoice:
    """A loss per token and its configuration, as float32: its index in PER_TOKEN, then its values, then zeros."""

    vector: Leaf


def choose(loss: str, config: Mapping[str, float]) -> LossChoice:
    """A loss per token and its configuration, on the host. UserError: a name or a value is not valid."""
    spec = loss_named(loss)
    values = spec.read_config(config).values()
    vector = np.zeros(1 + _MOST_VALUES, np.float32)
    vector[: 1 + len(values)] = [PER_TOKEN.index(spec), *values]
    return LossChoice(vector)


def token_losses(choice: LossChoice, logprobs: jax.Array, inputs: TokenInputs) -> jax.Array:
    """The weighted loss of every token, in the shape of `logprobs`. For CPUs, because the program has a branch."""
    branches = [partial(_branch, spec) for spec in PER_TOKEN]
    vector = jnp.asarray(choice.vector)
    losses: jax.Array = jax.lax.switch(vector[0].astype(jnp.int32), branches, vector[1:], logprobs, inputs)
    return losses * inputs["weights"]


def losses_and_slopes(choice: LossChoice, logprobs: jax.Array, inputs: TokenInputs) -> tuple[jax.Array, jax.Array]:
    """The result of `token_losses` and its derivative with respect to each logprob, without a branch in the program.

    All formulas are computed, because they are a few operations for each token, and NVIDIA GPUs wait for the host at
    every branch. Each formula is differentiated separately, because the slope of a formula that is not selected may be
    NaN.
    """
    vector, ones = jnp.asarray(choice.vector), jnp.ones_like(logprobs)
    by_formula = [
        jax.jvp(lambda lp, spec=spec: _branch(spec, vector[1:], lp, inputs), (logprobs,), (ones,)) for spec in PER_TOKEN
    ]
    which = vector[0].astype(jnp.int32)
    losses, slopes = (jax.lax.select_n(which, *arrays) for arrays in zip(*by_formula, strict=True))
    return losses * inputs["weights"], slopes * inputs["weights"]


def _branch(spec: LossSpec, values: jax.Array, logprobs: jax.Array, inputs: TokenInputs) -> jax.Array:
    assert spec.per_token is not None
    return spec.per_token(logprobs, inputs, dict(zip(spec.config, values, strict=False)))
