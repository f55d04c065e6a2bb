"""LoRA adapters: low-rank updates beside frozen matrices, as pytrees of their own rank and targets.

The update of y = x @ W is (alpha / rank) * (x @ A.T) @ B with A [R, in] and B [R, out]. The rank leads in both: this
order was the fastest of those measured on CPU, forward and backward, and padding to a larger rank is one axis of zeros.
Every expert of a mixture has updates of its own, of the same rank.

Letters: L layers, E experts, R rank, S rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Protocol

import flax.struct
import jax
import numpy as np
import numpy.typing as npt
from jax.ad_checkpoint import checkpoint_name

from tinkerflow.backend.commands import LORA_ALPHA, LoraSpec
from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.grouped import Groups
from tinkerflow.backend.errors import UserError
from tinkerflow.backend.spec.limits import MAX_RANK

ATTENTION = ("q", "k", "v", "o")
MLP = ("gate", "up", "down")


@flax.struct.dataclass
class LoraPair:
    """A [..., R, in] and B [..., R, out], float32; inside `Lora.layers` both begin with L, in a scan's body not.

    Then comes E where the projection is the experts'.
    """

    A: Any
    B: Any


@flax.struct.dataclass
class Lora:
    """An adapter's weights. `layers`: by projection name, those adapted only; `unembed`: None when not adapted."""

    layers: dict[str, LoraPair]
    unembed: LoraPair | None


class LoraApply(Protocol):
    """lora_apply(x, pairs): one update for each pair, the scale in it; with no pairs, ().

    The pairs adapt projections that share the input x [..., in]. With `groups`, x [M, in] is sorted by expert and the
    pairs are the experts'.
    """

    def __call__(
        self, x: jax.Array, pairs: tuple[LoraPair, ...], groups: Groups | None = None
    ) -> tuple[jax.Array, ...]:
        """See the class."""


def scale(rank: int) -> float:
    """What an update is multiplied by: alpha / rank, alpha 32."""
    return LORA_ALPHA / rank


def check_spec(spec: LoraSpec) -> LoraSpec:
    """The spec itself; UserError when its rank is out of 1..MAX_RANK or it adapts nothing."""
    if not 1 <= spec.rank <= MAX_RANK:
        raise UserError(f"lora rank {spec.rank}: must be 1 to {MAX_RANK}")
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        raise UserError("lora: train_attn, train_mlp and train_unembed are all false; at least one must be true")
    return spec


def apply_one(x: jax.Array, pairs: tuple[LoraPair, ...], groups: Groups | None = None) -> tuple[jax.Array, ...]:
    """The `LoraApply` for one adapter shared by all rows: updates [..., out] in the dtype of x."""
    return tuple(_update(x, pair, groups) for pair in pairs)


def _update(x: jax.Array, pair: LoraPair, groups: Groups | None) -> jax.Array:
    A, B = pair.A.astype(x.dtype), pair.B.astype(x.dtype)
    if groups is not None:
        low = checkpoint_name(groups.dot(x, A.swapaxes(-1, -2)), "low") * scale(A.shape[-2])
        return groups.dot(low, B)
    # As plain matrices: with leading dimensions kept, XLA's CPU backward pass took half as long again.
    low = checkpoint_name(x.reshape(-1, x.shape[-1]) @ A.T, "low") * scale(A.shape[-2])
    return (low @ B).reshape(*x.shape[:-1], B.shape[-1])


def projection_sizes(cfg: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of every projection in a layer, and of `unembed`."""
    queries, keys = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    return {
        "q": (cfg.hidden, queries),
        "k": (cfg.hidden, keys),
        "v": (cfg.hidden, keys),
        "o": (queries, cfg.hidden),
        "gate": (cfg.hidden, cfg.mlp),
        "up": (cfg.hidden, cfg.mlp),
        "down": (cfg.mlp, cfg.hidden),
        "unembed": (cfg.hidden, cfg.vocab),
    }


def stack_shape(cfg: ModelConfig, name: str) -> tuple[int, ...]:
    """What the shapes of a projection's matrices begin with: layers, and experts where it is theirs."""
    if name == "unembed":
        return ()
    return (cfg.layers, cfg.experts) if cfg.experts and name in MLP else (cfg.layers,)


def targets(spec: LoraSpec) -> tuple[str, ...]:
    """The names of the layer projections that `spec` adapts (`unembed` is not among them)."""
    return (ATTENTION if spec.train_attn else ()) + (MLP if spec.train_mlp else ())


def init_lora(cfg: ModelConfig, spec: LoraSpec, seed: int) -> Lora:
    """A fresh adapter on the host, float32: A uniform in +-1/sqrt(in) (PEFT's kaiming uniform), B zero.

    Every matrix draws from its own stream of (seed, name), so that a part's values do not depend on which others are
    adapted. NumPy, not JAX: the same on every backend, and nothing to compile.
    """
    sizes = projection_sizes(cfg)

    def pair(name: str) -> LoraPair:
        (fan_in, fan_out), stack = sizes[name], stack_shape(cfg, name)
        stream = np.random.Generator(np.random.Philox([seed & (2**64 - 1), zlib.crc32(name.encode())]))
        bound = 1 / np.sqrt(fan_in)
        A = stream.random((*stack, spec.rank, fan_in), dtype=np.float32) * np.float32(2 * bound) - np.float32(bound)
        return LoraPair(A=A, B=np.zeros((*stack, spec.rank, fan_out), np.float32))

    return Lora(
        layers={name: pair(name) for name in targets(spec)},
        unembed=pair("unembed") if spec.train_unembed else None,
    )


def to_peft(lora: Lora) -> dict[str, npt.NDArray[np.float32]]:
    """A host adapter by PEFT's tensor names: A [rank, in] and B [out, rank], contiguous, layer by layer.

    Experts have tensors of their own, one by one, as PEFT names them for transformers before release 5, and vLLM; PEFT
    itself fuses these when it loads them beside a transformers 5 model, whose experts are fused.
    """
    named: dict[str, npt.NDArray[np.float32]] = {}
    for projection, pair in lora.layers.items():
        for place in np.ndindex(pair.A.shape[:-2]):
            base = _layer_prefix(place, projection)
            named[f"{base}.lora_A.weight"] = np.array(pair.A[place])
            named[f"{base}.lora_B.weight"] = np.ascontiguousarray(pair.B[place].T)
    if lora.unembed is not None:
        named[f"{_UNEMBED}.lora_A.weight"] = np.array(lora.unembed.A)
        named[f"{_UNEMBED}.lora_B.weight"] = np.ascontiguousarray(lora.unembed.B.T)
    return named


def from_peft(
    cfg: ModelConfig, spec: LoraSpec, read: Callable[[str, tuple[int, int]], npt.NDArray[np.float32]]
) -> Lora:
    """The inverse of `to_peft`: `read(name, shape)` gives each tensor, and raises when it has none of that shape."""
    sizes = projection_sizes(cfg)

    def one(base: str, projection: str) -> LoraPair:
        fan_in, fan_out = sizes[projection]
        A = read(f"{base}.lora_A.weight", (spec.rank, fan_in))
        return LoraPair(A=A, B=read(f"{base}.lora_B.weight", (fan_out, spec.rank)).T)

    def stack(name: str) -> LoraPair:
        shape = stack_shape(cfg, name)
        pairs = [one(_layer_prefix(place, name), name) for place in np.ndindex(shape)]
        A, B = np.stack([pair.A for pair in pairs]), np.stack([pair.B for pair in pairs])
        return LoraPair(A=A.reshape(*shape, *A.shape[1:]), B=B.reshape(*shape, *B.shape[1:]))

    return Lora(
        layers={name: stack(name) for name in targets(spec)},
        unembed=one(_UNEMBED, "unembed") if spec.train_unembed else None,
    )


_UNEMBED = "base_model.model.lm_head"


def _layer_prefix(place: tuple[int, ...], projection: str) -> str:
    """`place`: the layer, and the expert where there are any."""
    layer, *expert = place
    part = "self_attn" if projection in ATTENTION else ".".join(["mlp", *(f"experts.{number}" for number in expert)])
    return f"base_model.model.model.layers.{layer}.{part}.{projection}_proj"
