"""Losses applied: of tokens on the devices, of whole sequences on the host. `backend/spec/losses` holds the formulas.

Losses per token are parts of one executable, chosen by number, so that changing the loss compiles nothing.

Losses of whole sequences run on the host, in float64, after a forward pass has given the logprobs; a second pass then
trains with weighted cross entropy, whose weights are minus the slopes (its gradient is the loss's own, by the chain
rule). They cost one forward pass more than losses per token, and compile nothing. Packing and micro-batches cannot
matter: each example is computed by itself. Letters: T tokens, K targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tinkerflow.backend.compute.training.custom_loss import custom_losses
from tinkerflow.backend.compute.training.optimizer import Leaf
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import Example, Float32, Forward
from tinkerflow.backend.spec.losses import LOSSES, Float64, LossSpec, loss_named

PER_TOKEN = tuple(spec for spec in LOSSES.values() if spec.per_token is not None)
_MOST_VALUES = max(len(spec.config) for spec in PER_TOKEN)

TokenInputs = Mapping[str, jax.Array]  # by name, as `packed_inputs` lists them, of the shape of the logprobs


@flax.struct.dataclass
class LossChoice:
    """Which loss per token, and its configuration: float32, its place in PER_TOKEN, then its values, zeros behind."""

    vector: Leaf


def choose(loss: str, config: Mapping[str, float]) -> LossChoice:
    """The host form of a loss per token and its configuration; UserError names what is unknown or out of bounds."""
    spec = loss_named(loss)
    values = spec.read_config(config).values()
    vector = np.zeros(1 + _MOST_VALUES, np.float32)
    vector[: 1 + len(values)] = [PER_TOKEN.index(spec), *values]
    return LossChoice(vector)


def token_losses(choice: LossChoice, logprobs: jax.Array, inputs: TokenInputs) -> jax.Array:
    """The loss of every token, of the shape of `logprobs`, weights applied. For CPUs: the program has a branch."""
    branches = [partial(_branch, spec) for spec in PER_TOKEN]
    vector = jnp.asarray(choice.vector)
    losses: jax.Array = jax.lax.switch(vector[0].astype(jnp.int32), branches, vector[1:], logprobs, inputs)
    return losses * inputs["weights"]


def losses_and_slopes(choice: LossChoice, logprobs: jax.Array, inputs: TokenInputs) -> tuple[jax.Array, jax.Array]:
    """What `token_losses` gives, and its derivative by each logprob, without a branch in the program.

    All formulas are computed: they are a few operations a token, while NVIDIA GPUs wait for the host at every branch.
    Each is differentiated by itself, because the slope of a formula that is not chosen may be no number.
    """
    vector, ones = jnp.asarray(choice.vector), jnp.ones_like(logprobs)
    found = [
        jax.jvp(lambda lp, spec=spec: _branch(spec, vector[1:], lp, inputs), (logprobs,), (ones,)) for spec in PER_TOKEN
    ]
    which = vector[0].astype(jnp.int32)
    losses, slopes = (jax.lax.select_n(which, *arrays) for arrays in zip(*found, strict=True))
    return losses * inputs["weights"], slopes * inputs["weights"]


def _branch(spec: LossSpec, values: jax.Array, logprobs: jax.Array, inputs: TokenInputs) -> jax.Array:
    assert spec.per_token is not None
    return spec.per_token(logprobs, inputs, dict(zip(spec.config, values, strict=False)))


@dataclass(frozen=True)
class Judged:
    """The loss of a command's examples, and the examples that give its gradient with cross_entropy."""

    loss_sum: float
    surrogates: tuple[Example, ...]
    metrics: Mapping[str, float]


def judge(command: Forward, logprobs: Sequence[Float32]) -> Judged:
    """The loss of `command`, which is per sequence or traced, given its examples' logprobs, each [T] or [T, K].

    UserError names an example that lacks an input, or whose loss or slope is not finite; nothing has changed then.
    """
    shaped = [
        array.reshape(example.targets_TK.shape) for array, example in zip(logprobs, command.examples, strict=True)
    ]
    metrics: Mapping[str, float] = {}
    if command.custom is not None:
        outcomes, metrics = custom_losses(command.custom, command.examples, shaped)
    else:
        spec = LOSSES[command.loss]
        with np.errstate(over="ignore", invalid="ignore"):
            outcomes = [
                _of_sequence(spec, command.config, i, example, array)
                for i, (array, example) in enumerate(zip(shaped, command.examples, strict=True))
            ]
    for i, (loss, slope_TK) in enumerate(outcomes):
        if not np.isfinite(loss) or not np.isfinite(slope_TK.astype(np.float32)).all():
            raise UserError(
                f"data[{i}]: {command.loss} gives the loss {loss:g} or a slope that is not finite; nothing was trained"
            )
    return Judged(
        loss_sum=float(sum(loss for loss, _ in outcomes)),
        surrogates=tuple(
            replace(example, weights_TK=(-slope_TK).astype(np.float32), inputs={})
            for example, (_, slope_TK) in zip(command.examples, outcomes, strict=True)
        ),
        metrics=metrics,
    )


def _of_sequence(
    spec: LossSpec, config: Mapping[str, float], index: int, example: Example, logprobs_TK: Float32
) -> tuple[float, Float64]:
    inputs = {"weights": example.weights_TK, **example.inputs}
    if missing := sorted(spec.read - inputs.keys()):
        raise UserError(f"data[{index}].loss_fn_inputs lacks {missing[0]!r}: {spec.name} needs it")
    assert spec.per_sequence is not None
    return spec.per_sequence(logprobs_TK.astype(np.float64), inputs, {**spec.defaults, **config})
