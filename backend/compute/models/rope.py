"""Rotary position embeddings: how fast each pair of a head's dimensions turns. No JAX.

Each scaling class here is one `rope_type` of Hugging Face's `config.json`. The formulas are those of transformers'
`modeling_rope_utils.py`, which names their papers; `tests/compute/test_rope.py` compares with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.core.errors import UserError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # of `layer_types`
_OUTER_FIELDS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")  # besides the rope's own
Frequencies = tuple[float, ...]
_SUPPORTED = ("default", "linear", "llama3", "longrope", "proportional", "yarn")


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's rule for stretching slow rotary frequencies beyond the context of pre-training."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN (arXiv 2309.00071): slow frequencies are divided by `factor`, fast ones stay, and medium ones are blended.

    attention: the factor of cos and sin. truncate: the blend begins and ends at whole dimensions.
    """

    factor: float
    attention: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    truncate: bool


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv 2402.13753): a factor for each frequency, one list for short contexts and one for long ones.

    attention: the factor of cos and sin. long: whether the list for long contexts is used; `for_context` sets it.
    """

    short_factor: Frequencies
    long_factor: Frequencies
    attention: float
    original_max_positions: int
    long: bool


@dataclass(frozen=True)
class ProportionalRope:
    """A share of a head's pairs turns, with the frequencies of a head whose pairs all turn (Gemma 4)."""

    factor: float
    share: float


Scaling = LinearRope | Llama3Rope | YarnRope | LongRope | ProportionalRope


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of some layers.

    theta: the base of the frequencies. dims: how many dimensions of a head turn, from the first; the others stay.
    query_beta: queries at position p are multiplied by 1 + query_beta * log(1 + floor(p / query_period)) (Llama 4). If
    it is not 0, all dimensions of a head must turn.
    """

    theta: float
    dims: int
    scaling: Scaling | None = None
    query_beta: float = 0.0
    query_period: int = 0

    @property
    def attention(self) -> float:
        """The factor of cos and sin."""
        return self.scaling.attention if isinstance(self.scaling, YarnRope | LongRope) else 1.0

    def for_context(self, context: int) -> Rope:
        """The embedding for sequences of up to `context` tokens.

        Only LongRoPE depends on `context`. A sequence may not change its frequencies while it grows, because its cached
        keys must fit the tokens that follow.
        """
        if not isinstance(self.scaling, LongRope):
            return self
        return replace(self, scaling=replace(self.scaling, long=context > self.scaling.original_max_positions))


def rope_frequencies(rope: Rope) -> Frequencies:
    """The angular frequencies (radians per position) of `rope.dims` / 2 pairs of dimensions."""
    plain = tuple(rope.theta ** (-2 * i / rope.dims) for i in range(rope.dims // 2))
    match rope.scaling:
        case None:
            return plain
        case LinearRope(factor):
            return tuple(frequency / factor for frequency in plain)
        case Llama3Rope():
            return tuple(_stretched(rope.scaling, frequency) for frequency in plain)
        case LongRope(short_factor, long_factor, long=long):
            factors = long_factor if long else short_factor
            return tuple(frequency / factor for frequency, factor in zip(plain, factors, strict=True))
        case ProportionalRope(factor, share):
            turning = int(share * rope.dims // 2)
            return tuple(frequency / factor if i < turning else 0.0 for i, frequency in enumerate(plain))
        case YarnRope():
            return tuple(
                frequency * (share / rope.scaling.factor + 1 - share)
                for frequency, share in zip(plain, _interpolated(rope, rope.scaling), strict=True)
            )


def read_ropes(fields: ConfigFields, head_dim: int, theta: float = 10_000.0) -> Mapping[str, Rope]:
    """The rotary embedding of each of `layer_types`, or of all layers under the name "".

    fields: from `config.json`. transformers 5 writes rope_parameters, for all layers or by `layer_types`; earlier
    releases wrote rope_scaling and rope_theta. head_dim: the dimensions of a head. theta: the default. UserError:
    values contradict each other.
    """
    values = fields.rope
    newer, older = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    if newer and older and {**newer, **older} != newer:
        raise fields.error(f"rope_parameters {newer!r} and rope_scaling {older!r} contradict each other")
    outer = {key: fields[key] for key in _OUTER_FIELDS if fields.get(key) is not None}

    def read(values: Mapping[str, Any]) -> Rope:
        for key, value in outer.items():
            if values.get(key) not in (None, value):
                raise fields.error(f"{key} is {value!r} in config.json, but {values[key]!r} among its rope_parameters")
        return read_rope(
            {**values, **outer},
            theta=theta,
            head_dim=head_dim,
            max_positions=fields.size("max_position_embeddings"),
            error=fields.error,
        )

    # If a model has layers of one type only, transformers also writes unused fields next to the types.
    by_type = {name: each for name, each in values.items() if isinstance(each, dict)}
    if wrong := [name for name in by_type if not name.endswith("_attention")]:
        rule = "only layer types, such as 'full_attention', have fields of their own"
        raise fields.error(f"rope_parameters.{wrong[0]} is {values[wrong[0]]!r}; {rule}")
    return {name: read(each) for name, each in by_type.items()} or {"": read(values)}


def read_rope(
    values: Mapping[str, Any], *, theta: float, head_dim: int, max_positions: int, error: Callable[[str], UserError]
) -> Rope:
    """The embedding that a `rope_parameters` or `rope_scaling` of `config.json` describes.

    values: the fields of the object; empty for the default. theta: the default of `rope_theta`. head_dim: the
    dimensions of a head. max_positions: the model's longest sequence, for scalings that are given by their ratio to it.
    error: makes the UserError for an unsupported type, and for a field that is missing or wrong.
    """

    def number(key: str, default: float | None = None, least: float = 0.0) -> float:
        """A number above `least`."""
        value = values.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise error(f"config.json has no field {key!r}, which rope_type {kind!r} needs")
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < math.inf:
            raise error(f"{key} is {value!r} in config.json; must be a number above {least:g}")
        return float(value)

    def share_of(key: str) -> float:
        """A number, or 0, which means no effect."""
        return number(key, 0.0) if values.get(key) else 0.0

    def factors(key: str, count: int) -> Frequencies:
        value = values.get(key)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(isinstance(one, int | float) and one > 0 for one in value)
        ):
            raise error(f"{key} of rope_type {kind!r} must be a list of {count} positive numbers in config.json")
        return tuple(map(float, value))

    kind = values.get("rope_type") or values.get("type") or "default"
    share = number("partial_rotary_factor", 1.0)
    rope = Rope(number("rope_theta", theta, least=1.0), head_dim if kind == "proportional" else int(head_dim * share))
    original = int(number("original_max_position_embeddings", max_positions, least=1.0))
    if rope.dims < 2 or rope.dims % 2:
        raise error(f"partial_rotary_factor {share} of head_dim {head_dim} is {rope.dims}; must be even, at least 2")
    match kind:
        case "default":
            return rope
        case "linear":
            return replace(rope, scaling=LinearRope(number("factor")))
        case "llama3":
            factor, low = number("factor"), number("low_freq_factor")
            high = number("high_freq_factor", least=low)
            return replace(rope, scaling=Llama3Rope(factor, low, high, original))
        case "proportional":
            return replace(rope, scaling=ProportionalRope(number("factor", 1.0), share))
        case "longrope" | "su":
            factor = number("factor", max_positions / original)
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            short, long = (factors(key, rope.dims // 2) for key in ("short_factor", "long_factor"))
            attention = number("attention_factor", attention)
            return replace(rope, scaling=LongRope(short, long, attention, original, max_positions > original))
        case "yarn":
            factor = number("factor", max_positions / original if "factor" in values else None)
            attention = _yarn_attention(factor, share_of("mscale"), share_of("mscale_all_dim"))
            scaling = YarnRope(
                factor=factor,
                attention=number("attention_factor", attention),
                beta_fast=number("beta_fast", 32.0),
                beta_slow=number("beta_slow", 1.0),
                original_max_positions=original,
                truncate=bool(values.get("truncate", True)),
            )
            return replace(rope, scaling=scaling)
    reason = "its frequencies change while a sequence grows; " if kind == "dynamic" else ""
    raise error(f"rope_type {kind!r} is not supported; {reason}supported: {', '.join(_SUPPORTED)}")


def _stretched(scaling: Llama3Rope, frequency: float) -> float:
    """Llama 3: keep fast frequencies, divide slow ones by `factor`, blend the others."""
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = min(1.0, max(0.0, blend))
    return frequency * (blend + (1 - blend) / scaling.factor)


def _interpolated(rope: Rope, scaling: YarnRope) -> Frequencies:
    """The share of each frequency that is divided by `factor`: 0 for fast ones, 1 for slow ones, a ramp in between."""

    def dimension(turns: float) -> float:
        return rope.dims * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    if low == high:
        high += 0.001
    return tuple(min(1.0, max(0.0, (i - low) / (high - low))) for i in range(rope.dims // 2))


def _yarn_attention(factor: float, mscale: float, mscale_all_dim: float) -> float:
    both = mscale and mscale_all_dim
    return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim) if both else yarn_scale(factor, 1.0)


def yarn_scale(factor: float, mscale: float) -> float:
    """How much YaRN's attention grows with `factor`. DeepSeek V3 multiplies its scores by the square of this number."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
