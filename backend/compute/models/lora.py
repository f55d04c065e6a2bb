"""LoRA adapters: low-rank updates beside frozen matrices, as pytrees of their own rank and targets.

The update of y = x @ W is (alpha / rank) * (x @ A.T) @ B with A [R, in] and B [R, out]. The rank leads in both: this
order was the fastest of those measured on CPU, forward and backward, and padding to a larger rank is one axis of zeros.
Every expert of a mixture has updates of its own, of the rank that the spec has for experts.

Letters: L layers, E experts, R rank, S rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from tinkerflow.backend.compute.kernels.grouped import Groups
from tinkerflow.backend.compute.mesh import EXPERT, FSDP, TENSOR, Array, replicated, sharding
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import Projection
from tinkerflow.backend.compute.models.families import projections
from tinkerflow.backend.compute.models.peft_names import matrix_rank, pair_names, targets
from tinkerflow.backend.compute.platforms import on_cpu
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import LORA_ALPHA, LoraSpec
from tinkerflow.backend.spec.limits import ALL_PARTS, MAX_RANK
from tinkerflow.backend.spec.ranks import peft_factor

Tree = TypeVar("Tree")


@flax.struct.dataclass
class LoraPair:
    """A [..., R, in] and B [..., R, out], float32. Both begin with L inside `Lora.layers`, but not in a scan's body.

    If each expert has such a matrix, E follows.
    """

    A: Array
    B: Array


@flax.struct.dataclass
class Lora:
    """An adapter's weights. layers: the adapted projections, by name. unembed: None when not adapted."""

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
        """The updates [..., out] of each pair, in the dtype of x."""


def scale(rank: int) -> float:
    """The factor of an update: alpha / rank, alpha 32. rank: of the matrix, so that of experts in theirs."""
    return LORA_ALPHA / rank


def check_spec(spec: LoraSpec) -> LoraSpec:
    """The spec itself; UserError when a rank is out of 0..MAX_RANK, or experts' above it, or it adapts nothing."""
    if not 0 <= spec.rank <= MAX_RANK:
        raise UserError(f"lora rank {spec.rank}: must be 1 to {MAX_RANK}, or 0 to train all parameters")
    if spec.full and not (spec.train_attn and spec.train_mlp and spec.train_unembed):
        raise UserError(f"lora rank 0 {ALL_PARTS}")
    if spec.expert_rank is not None and not 1 <= spec.expert_rank <= spec.rank:
        raise UserError(f"lora expert_rank {spec.expert_rank}: must be 1 to the rank, {spec.rank}")
    if not (spec.train_attn or spec.train_mlp or spec.train_unembed):
        raise UserError("lora: train_attn, train_mlp and train_unembed are all false; at least one must be true")
    return spec


def apply_one(x: jax.Array, pairs: tuple[LoraPair, ...], groups: Groups | None = None) -> tuple[jax.Array, ...]:
    """The `LoraApply` for one adapter shared by all rows: updates [..., out] in the dtype of x.

    Off CPUs the A matrices of all pairs are one matmul, forward and backward: x is read once, and the gradient by x is
    added up inside the matmul. Gradients by A and B are sums in float32 there, never rounded to the dtype of x.
    """
    if on_cpu() or groups is not None or not pairs:
        return tuple(_update(x, pair, groups) for pair in pairs)
    low_MR = checkpoint_name(_product(x.reshape(-1, x.shape[-1]), jnp.concatenate([pair.A for pair in pairs]).T), "low")
    ends = np.cumsum([pair.A.shape[0] for pair in pairs])[:-1]
    lows = jnp.split(low_MR, ends, axis=1)
    updates = (_product(low * scale(low.shape[1]), jnp.asarray(pair.B)) for low, pair in zip(lows, pairs, strict=True))
    return tuple(update.reshape(*x.shape[:-1], -1) for update in updates)


@jax.custom_vjp
def _product(x_Mi: jax.Array, matrix_io: jax.Array) -> jax.Array:
    """x times a float32 matrix, in the dtype of x. The gradient by the matrix is summed in float32."""
    return x_Mi @ matrix_io.astype(x_Mi.dtype)


def _product_forward(x_Mi: jax.Array, matrix_io: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x_Mi, matrix_io), (x_Mi, matrix_io)


def _product_backward(kept: tuple[jax.Array, jax.Array], d_Mo: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_Mi, matrix_io = kept
    d_matrix = jnp.einsum("mi,mo->io", x_Mi, d_Mo, preferred_element_type=jnp.float32)
    return d_Mo @ matrix_io.astype(d_Mo.dtype).T, d_matrix


_product.defvjp(_product_forward, _product_backward)


def _update(x: jax.Array, pair: LoraPair, groups: Groups | None) -> jax.Array:
    A, B = pair.A.astype(x.dtype), pair.B.astype(x.dtype)
    if groups is not None:
        low = checkpoint_name(groups.dot(x, A.swapaxes(-1, -2)), "low") * scale(A.shape[-2])
        return groups.dot(low, B)
    # As plain matrices: with leading dimensions kept, XLA's CPU backward pass took half as long again.
    return (low_rank(x.reshape(-1, x.shape[-1]), pair) @ B).reshape(*x.shape[:-1], B.shape[-1])


def low_rank(x: jax.Array, pair: LoraPair) -> jax.Array:
    """What B multiplies: x [..., in] times A.T, scaled, [..., R] in the dtype of x."""
    A = jnp.asarray(pair.A).astype(x.dtype)
    return checkpoint_name(x @ A.T, "low") * scale(A.shape[-2])


def init_lora(cfg: ModelConfig, spec: LoraSpec, seed: int) -> Lora:
    """A fresh adapter on the host, float32: A uniform in +-1/sqrt(in) (PEFT's kaiming uniform), B zero.

    Every matrix draws from its own stream of (seed, name), so that a part's values do not depend on which others are
    adapted. NumPy, not JAX: the same on every backend, and nothing to compile.
    """
    whole = projections(cfg)

    def pair(name: str) -> LoraPair:
        sizes = whole[name]
        stream = np.random.Generator(np.random.Philox([seed & (2**64 - 1), zlib.crc32(name.encode())]))
        rank = matrix_rank(spec, sizes)
        bound, shape = 1 / np.sqrt(sizes.inputs), (*sizes.stack, rank, sizes.inputs)
        A = stream.random(shape, dtype=np.float32) * np.float32(2 * bound) - np.float32(bound)
        return LoraPair(A=A, B=np.zeros((*sizes.stack, rank, sizes.outputs), np.float32))

    return _lora({name: pair(name) for name in targets(cfg, spec)})


def to_shared_scale(spec: LoraSpec, lora: Lora) -> Lora:
    """A host adapter as PEFT's files have it: B of experts times `peft_factor`."""
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


def shardings(mesh: Mesh, tree: Tree) -> Tree:
    """Where each array of an adapter (or of anything shaped like one) lies: split over all devices of the mesh.

    A pair's long side, `in` or `out`, is split over all axes; of pairs with experts, E is split over the expert axis.
    What is no part of a pair (a count) is on every device.
    """

    def where(leaf: Any) -> NamedSharding:
        long, experts = ((FSDP, TENSOR), (None, EXPERT, None)) if leaf.ndim == 4 else ((FSDP, EXPERT, TENSOR), ())
        axes = (experts or (None,) * (leaf.ndim - 1)) + (long,) if leaf.ndim else ()
        return sharding(mesh, leaf.shape, *axes)

    found: Tree = jax.tree.map(where, tree)
    return found


def gathered(mesh: Mesh, lora: Lora) -> Lora:
    """Inside a jitted function: the adapter as every device needs it for all layers; experts' pairs as they are.

    Gathered once, because a transfer for each matrix and layer would wait for the network more often than it computes.
    Experts' pairs are large: these are gathered where they are used.
    """

    def whole(pair: LoraPair) -> LoraPair:
        return pair if pair.A.ndim == 4 else jax.lax.with_sharding_constraint(pair, replicated(mesh))

    made: Lora = jax.tree.map(whole, lora, is_leaf=lambda node: isinstance(node, LoraPair))
    return made


def shapes(cfg: ModelConfig, spec: LoraSpec) -> Lora:
    """The adapter that `init_lora` makes, without values."""
    whole = projections(cfg)

    def pair(name: str) -> LoraPair:
        sizes = whole[name]
        A, B = ((*sizes.stack, matrix_rank(spec, sizes), size) for size in (sizes.inputs, sizes.outputs))
        return LoraPair(*(cast(Array, jax.ShapeDtypeStruct(shape, np.float32)) for shape in (A, B)))

    return _lora({name: pair(name) for name in targets(cfg, spec)})


def by_name(lora: Lora) -> dict[str, Any]:
    """The leaves of an adapter by name: `q.A`, `q.B`, …, `unembed.B`."""
    return {f"{name}.{side}": getattr(pair, side) for name, pair in _pairs(lora).items() for side in ("A", "B")}


def from_names(leaves: Mapping[str, Any]) -> Lora:
    """The inverse of `by_name`."""
    names = [name.removesuffix(".A") for name in leaves if name.endswith(".A")]
    return _lora({name: LoraPair(A=leaves[f"{name}.A"], B=leaves[f"{name}.B"]) for name in names})


def to_peft(cfg: ModelConfig, lora: Lora) -> dict[str, npt.NDArray[np.float32]]:
    """A host adapter by PEFT's tensor names: A [rank, in] and B [out, rank], contiguous, layer by layer. Unscaled.

    Each expert has tensors of its own, as PEFT names them for transformers before release 5, and as vLLM does. PEFT
    fuses them when it loads them into a transformers 5 model, whose experts are fused.
    """
    named: dict[str, npt.NDArray[np.float32]] = {}
    for name, pair in _pairs(lora).items():
        projection = projections(cfg)[name]
        for place in np.ndindex(projection.stack):
            A, B = pair_names(projection.name(place))
            named[A], named[B] = np.array(pair.A[place]), np.ascontiguousarray(pair.B[place].T)
    return named


def from_peft(
    cfg: ModelConfig, spec: LoraSpec, read: Callable[[str, tuple[int, int]], npt.NDArray[np.float32]]
) -> Lora:
    """The inverse of `to_peft`: `read(name, shape)` gives each tensor, and raises when it has none of that shape."""

    def pair(projection: Projection) -> LoraPair:
        names = [pair_names(projection.name(place)) for place in np.ndindex(projection.stack)]
        rank = matrix_rank(spec, projection)
        A_shape, B_shape = (rank, projection.inputs), (projection.outputs, rank)
        both = [(read(A, A_shape), read(B, B_shape).T) for A, B in names]
        A, B = (np.stack(parts) for parts in zip(*both, strict=True))
        return LoraPair(A=A.reshape(*projection.stack, *A_shape), B=B.reshape(*projection.stack, *B_shape[::-1]))

    whole = projections(cfg)
    return _lora({name: pair(whole[name]) for name in targets(cfg, spec)})


def _pairs(lora: Lora) -> dict[str, LoraPair]:
    return lora.layers if lora.unembed is None else {**lora.layers, "unembed": lora.unembed}


def _lora(pairs: dict[str, LoraPair]) -> Lora:
    return Lora(layers={name: pair for name, pair in pairs.items() if name != "unembed"}, unembed=pairs.get("unembed"))
