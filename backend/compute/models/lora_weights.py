"""Adapters on the host: fresh adapters, their shapes, and conversion to and from PEFT's tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import cast

import jax
import numpy as np
import numpy.typing as npt

from tinkerflow.backend.compute.mesh import Array
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import projections
from tinkerflow.backend.compute.models.layers.matrices import Projection
from tinkerflow.backend.compute.models.lora import Lora, LoraPair, all_pairs, lora_of
from tinkerflow.backend.compute.models.peft_names import matrix_rank, pair_names, targets
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import LoraSpec
from tinkerflow.backend.spec.limits import ALL_PARTS, MAX_RANK
from tinkerflow.backend.spec.ranks import peft_factor


def check_spec(spec: LoraSpec) -> LoraSpec:
    """The spec itself. UserError: a rank is out of range, nothing is adapted, or rank 0 does not train all parts."""
    if not 0 <= spec.rank <= MAX_RANK:
        raise UserError(f"lora rank {spec.rank}: must be 1 to {MAX_RANK}, or 0 to train all parameters")
    if spec.full and not (spec.train_attn and spec.train_mlp and spec.train_unembed):
        raise UserError(f"lora rank 0 {ALL_PARTS}")
    if spec.expert_rank is not None and not 1 <= spec.expert_rank <= spec.rank:
        raise UserError(f"lora expert_rank {spec.expert_rank}: must be 1 to the rank, {spec.rank}")
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        raise UserError("lora: train_attn, train_mlp and train_unembed are all false; at least one must be true")
    return spec


def init_lora(cfg: ModelConfig, spec: LoraSpec, seed: int) -> Lora:
    """A fresh adapter on the host, float32: A uniform in +-1/sqrt(in) (PEFT's kaiming uniform), B zero.

    Every matrix draws from its own stream of (seed, name), so that its values do not depend on the other adapted parts.
    NumPy makes the values, so they are the same on every backend, and nothing is compiled.
    """
    whole = projections(cfg)

    def pair(name: str) -> LoraPair:
        sizes = whole[name]
        stream = np.random.Generator(np.random.Philox([seed & (2**64 - 1), zlib.crc32(name.encode())]))
        rank = matrix_rank(spec, sizes)
        bound, shape = 1 / np.sqrt(sizes.inputs), (*sizes.stack, rank, sizes.inputs)
        A = stream.random(shape, dtype=np.float32) * np.float32(2 * bound) - np.float32(bound)
        return LoraPair(A=A, B=np.zeros((*sizes.stack, rank, sizes.outputs), np.float32))

    return lora_of({name: pair(name) for name in targets(cfg, spec)})


def to_shared_scale(spec: LoraSpec, lora: Lora) -> Lora:
    """A host adapter as PEFT's files store it: with B of experts multiplied by `peft_factor`."""
    return _scaled(spec, lora, lambda B, factor: B * np.float32(factor))


def from_shared_scale(spec: LoraSpec, lora: Lora) -> Lora:
    """The inverse of `to_shared_scale`, bit for bit."""
    return _scaled(spec, lora, lambda B, factor: B / np.float32(factor))


def _scaled(spec: LoraSpec, lora: Lora, change: Callable[[Array, int], Array]) -> Lora:
    def one(pair: LoraPair) -> LoraPair:
        factor = peft_factor(spec.rank, pair.A.shape[-2])
        return pair if factor == 1 else LoraPair(A=pair.A, B=change(pair.B, factor))

    changed: Lora = jax.tree.map(one, lora, is_leaf=lambda node: isinstance(node, LoraPair))
    return changed


def shapes(cfg: ModelConfig, spec: LoraSpec) -> Lora:
    """The adapter that `init_lora` makes, without values."""
    whole = projections(cfg)

    def pair(name: str) -> LoraPair:
        sizes = whole[name]
        begin = *sizes.stack, matrix_rank(spec, sizes)
        A, B = (jax.ShapeDtypeStruct((*begin, size), np.float32) for size in (sizes.inputs, sizes.outputs))
        return LoraPair(A=cast(Array, A), B=cast(Array, B))

    return lora_of({name: pair(name) for name in targets(cfg, spec)})


def to_peft(cfg: ModelConfig, lora: Lora) -> dict[str, npt.NDArray[np.float32]]:
    """A host adapter by PEFT's tensor names: A [rank, in] and B [out, rank], contiguous, layer by layer. Unscaled.

    Each expert has its own tensors, as PEFT names them for transformers before release 5, and as vLLM does. PEFT
    fuses them when it loads them into a transformers 5 model, whose experts are fused.
    """
    named: dict[str, npt.NDArray[np.float32]] = {}
    for name, pair in all_pairs(lora).items():
        projection = projections(cfg)[name]
        for place in np.ndindex(projection.stack):
            A, B = pair_names(projection.name(place))
            named[A], named[B] = np.array(pair.A[place]), np.ascontiguousarray(pair.B[place].T)
    return named


def from_peft(
    cfg: ModelConfig, spec: LoraSpec, read: Callable[[str, tuple[int, int]], npt.NDArray[np.float32]]
) -> Lora:
    """The inverse of `to_peft`: `read(name, shape)` returns a tensor, and raises if there is none of that shape."""

    def pair(projection: Projection) -> LoraPair:
        names = [pair_names(projection.name(place)) for place in np.ndindex(projection.stack)]
        rank = matrix_rank(spec, projection)
        A_shape, B_shape = (rank, projection.inputs), (projection.outputs, rank)
        both = [(read(A, A_shape), read(B, B_shape).T) for A, B in names]
        A, B = (np.stack(parts) for parts in zip(*both, strict=True))
        return LoraPair(A=A.reshape(*projection.stack, *A_shape), B=B.reshape(*projection.stack, *B_shape[::-1]))

    whole = projections(cfg)
    return lora_of({name: pair(whole[name]) for name in targets(cfg, spec)})
