"""The losses, one file each: inputs, configuration with bounds, formula. See `LossSpec`.

To add a loss, add a file here: requests, packing, workers, warm-up and the common test find it. Loading this package
does not load JAX: formulas import JAX when they are called. Every loss is a sum over tokens (and targets). The formulas
are those of the public Tinker documentation ("Loss Functions"). Letters: T tokens of an example, K targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.core.errors import UserError, broken, shown
from tinkerflow.backend.spec.limits import Bounds
from tinkerflow.backend.spec.registry import registered

if TYPE_CHECKING:
    import jax

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# (logprobs, inputs, configuration) -> the loss of every token before its weight, in the shape of `logprobs`.
# inputs["logprobs"] are the sampler's log probabilities. An optional input is NaN where the example lacks it.
TokenLoss: TypeAlias = "Callable[[jax.Array, Mapping[str, jax.Array], Mapping[str, jax.Array]], jax.Array]"
# (logprobs_TK, inputs, configuration) -> an example's loss and its slope by each logprob, [T, K], on the host.
# inputs["weights"] is always given. An optional input is absent if the example lacks it.
SequenceLoss: TypeAlias = Callable[[Float64, Mapping[str, Float32], Mapping[str, float]], tuple[float, Float64]]


NOT_NEGATIVE = Bounds(low=0.0)


@dataclass(frozen=True)
class TokenInput:
    """A number for each target, sent in `loss_fn_inputs`.

    required: a request must contain it. low: the smallest valid value. some: at least one value of an example is not 0.
    """

    name: str
    required: bool = True
    low: float = -math.inf
    some: bool = False


@dataclass(frozen=True)
class ConfigKey:
    """A number in `loss_fn_config`: its default, which may be infinite, and the bounds of other values."""

    default: float
    bounds: Bounds = NOT_NEGATIVE


@dataclass(frozen=True)
class LossSpec:
    """A loss. It has one of three formulas: `per_token`, `per_sequence`, or one that the client traced (`traced`).

    per_token: a token's loss depends on its own logprob only. The formula is compiled, and takes one pass.
    per_sequence: the loss depends on all logprobs of an example. It takes a forward pass, then the formula on the host,
    then a pass that trains with the formula's slopes as weights.
    inputs: the inputs besides `target_tokens`. They include `weights`, which multiply a token's loss.
    masks: inputs that exclude a token where they are 0. The other inputs of an excluded token may be placeholders.
    Formulas per token never get these inputs (`packing`), and formulas per sequence skip them.
    ordered: two names, in the configuration or the inputs. The first may not exceed the second.
    recorded: the sampler's logprobs come from records of the sampling, so requests need provenance.
    """

    name: str
    inputs: tuple[TokenInput, ...] = ()
    config: Mapping[str, ConfigKey] = field(default_factory=dict)
    per_token: TokenLoss | None = None
    per_sequence: SequenceLoss | None = None
    masks: tuple[str, ...] = ("weights",)
    ordered: tuple[str, str] | None = None
    recorded: bool = False
    traced: bool = False

    @property
    def defaults(self) -> dict[str, float]:
        return {key: value.default for key, value in self.config.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.inputs)

    @property
    def of_pass(self) -> LossSpec:
        """The loss per token that a pass computes. For a loss per sequence, the weights of this loss are its slopes."""
        return self if self.per_token is not None else LOSSES["cross_entropy"]

    @property
    def read(self) -> frozenset[str]:
        """The inputs that every example contains when the formula is called."""
        return frozenset({one.name for one in self.inputs if one.required} | ({"logprobs"} if self.recorded else set()))

    def passes(self, *, backward: bool) -> int:
        """The number of passes through the model: a loss per sequence needs all logprobs before its gradient."""
        return 2 if backward and self.per_token is None else 1

    def read_config(self, given: Mapping[str, float | str]) -> dict[str, float]:
        """The values of a request, with defaults for missing keys. UserError: an unknown key or a bad value."""
        config = self.defaults
        for key, value in given.items():
            if key not in config:
                takes = f"one of {', '.join(config)}" if config else f"absent, {self.name} takes no config"
                raise UserError(f"loss_fn_config has the key {shown(key)}: must be {takes}")
            bounds = self.config[key].bounds
            if value != self.config[key].default and (isinstance(value, str) or not bounds.hold(value)):
                raise broken(f"loss_fn_config[{key!r}]", value, bounds.rule)
            config[key] = value
        if self.ordered is not None and config[self.ordered[0]] > config[self.ordered[1]]:
            low, high = self.ordered
            epsilon = (
                f"; thresholds are ratios: {1 + config[high]:g} = 1 + {config[high]:g}" if config[high] < 1 else ""
            )
            raise broken(f"loss_fn_config[{low!r}]", config[low], f"<= {high}, {config[high]:g}{epsilon}")
        return config

    def check_order(
        self, inputs: Mapping[str, npt.NDArray[Any]], config: Mapping[str, float], name_of: Callable[[str], str]
    ) -> None:
        """Raise UserError if a token that is not masked has an `ordered` pair in the wrong order.

        inputs: an example's inputs. config: complete; it has the values that the inputs lack. name_of(input): the
        input's name in errors.
        """
        if self.ordered is None or not (given := [name for name in self.ordered if name in inputs]):
            return
        least, most = (inputs.get(name, config[name]) for name in self.ordered)
        counted = [inputs[name] != 0 for name in self.masks if name in inputs]
        if not np.logical_and.reduce([least > most, *counted]).any():
            return
        low, high = self.ordered
        other, side, rule = (high, "above", "<=") if given[0] == low else (low, "below", ">=")
        bound = f"those of {other}" if other in inputs else f"loss_fn_config[{other!r}], {config[other]:g}"
        raise UserError(f"{name_of(given[0])} has values {side} {bound}: must be {rule}")


# ------------------------------------------------------------------ shared by several losses
WEIGHTS = TokenInput("weights", required=False)  # 1 if they are left out
POLICY = (WEIGHTS, TokenInput("logprobs"), TokenInput("advantages"))
POLICY_MASKS = ("weights", "advantages")  # for losses that are proportional to the advantage
CLIP = ("clip_low_threshold", "clip_high_threshold")
CLIP_INPUTS = tuple(TokenInput(name, required=False, low=0.0) for name in CLIP)  # a token's own thresholds


def clip_config(low: float, high: float) -> dict[str, ConfigKey]:
    """The thresholds of a clipped ratio, by default `low` and `high`."""
    return {CLIP[0]: ConfigKey(low), CLIP[1]: ConfigKey(high)}


def thresholds(inputs: Mapping[str, jax.Array], config: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Each token's lower and upper threshold: its own, or the configuration's."""
    import jax.numpy as jnp

    low, high = (jnp.where(jnp.isnan(inputs[name]), config[name], inputs[name]) for name in CLIP)
    return low, high


# ------------------------------------------------------------------ all losses, by name
LOSSES = registered(__name__, "LOSS", LossSpec)


def loss_named(name: str) -> LossSpec:
    """The loss with this name. UserError: no loss has this name."""
    if name not in LOSSES:
        raise broken("loss_fn", name, f"one of {', '.join(LOSSES)}")
    return LOSSES[name]


@cache
def packed_inputs() -> dict[str, float]:
    """The inputs of all losses per token, each with the value of empty cells: 0, or NaN if the input is optional.

    Their order is that of the arrays on the devices. TypeError: a loss requires an optional input of another loss.
    """
    fills: dict[str, float] = {"weights": 0.0}
    for spec in LOSSES.values():
        for one in spec.inputs if spec.per_token is not None else ():
            fill = 0.0 if one.required else math.nan
            if one.name != "weights" and repr(fills.setdefault(one.name, fill)) != repr(fill):
                raise TypeError(f"loss {spec.name}: {one.name!r} is required by one token loss and optional in another")
    return fills
