"""LoRA adapters (arXiv 2106.09685): low-rank updates of frozen matrices, as pytrees with their own rank and targets.

The update of y = x @ W is (alpha / rank) * (x @ A.T) @ B with A [R, in] and B [R, out]. The rank is the first axis of
both. On CPUs, this was the fastest of the measured orders, forward and backward. Padding to a larger rank adds zeros
along one axis. Every expert of a mixture has its own updates, with the spec's rank for experts.

Letters: L layers, E experts, R rank, S rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from tinkerflow.backend.compute.kernels.grouped import Groups
from tinkerflow.backend.compute.mesh import EXPERT, FSDP, TENSOR, Array, expert_axes, replicated, sharding
from tinkerflow.backend.compute.platforms import on_cpu
from tinkerflow.backend.spec.commands import LORA_ALPHA

Tree = TypeVar("Tree")


@flax.struct.dataclass
class LoraPair:
    """A [..., R, in] and B [..., R, out], float32. Both begin with L inside `Lora.layers`, but not in a scan's body.

    If each expert has its own matrix, E follows L. blocks: the number of blocks into which a batch-invariant sampler
    divides the rank to multiply B.
    """

    A: Array
    B: Array
    blocks: int = flax.struct.field(pytree_node=False, default=1)  # type: ignore[no-untyped-call]

    def multiply(self, product: Callable[[slice], jax.Array]) -> jax.Array:
        """The sum of product(columns) over the blocks. columns: a slice of the rank.

        The bits of one product over all columns may depend on where the nonzero columns are, because a matmul adds
        columns in groups.
        """
        size = np.shape(self.B)[-2] // self.blocks
        products = [product(slice(start, start + size)) for start in range(0, self.blocks * size, size)]
        return functools.reduce(jnp.add, products)


@flax.struct.dataclass
class Lora:
    """An adapter's weights. layers: maps projections to pairs. unembed: None when the unembedding is not adapted."""

    layers: dict[str, LoraPair]
    unembed: LoraPair | None


class LoraApply(Protocol):
    """lora_apply(x, pairs) returns one scaled update for each pair, or () without pairs.

    The pairs adapt projections that share the input x [..., in]. With `groups`, x [M, in] is sorted by expert, and the
    pairs belong to the experts.
    """

    def __call__(self, x: jax.Array, pairs: tuple[LoraPair, ...], groups: Groups | None = None) -> Sequence[jax.Array]:
        """The updates [..., out] of each pair, in the dtype of x."""


def scale(rank: int) -> float:
    """The factor of an update: alpha / rank, with alpha 32. rank: the pair's, which may differ for experts' pairs."""
    return LORA_ALPHA / rank


def apply_one(x: jax.Array, pairs: tuple[LoraPair, ...], groups: Groups | None = None) -> tuple[jax.Array, ...]:
    """The `LoraApply` for one adapter shared by all rows: updates [..., out] in the dtype of x.

    Except on CPUs, one matmul multiplies by the A matrices of all pairs, forward and backward: x is read once, and the
    gradient by x is summed inside the matmul. Gradients by A and B are summed in float32 there, and never rounded to
    the dtype of x.
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
    # As plain matrices: with the leading dimensions, XLA's CPU backward pass took 1.5 times as long.
    return (low_rank(x.reshape(-1, x.shape[-1]), pair) @ B).reshape(*x.shape[:-1], B.shape[-1])


def low_rank(x: jax.Array, pair: LoraPair) -> jax.Array:
    """The input of B: x [..., in] times A.T, scaled, [..., R] in the dtype of x."""
    A = jnp.asarray(pair.A).astype(x.dtype)
    return checkpoint_name(x @ A.T, "low") * scale(A.shape[-2])


def shardings(mesh: Mesh, tree: Tree) -> Tree:
    """The sharding of each array of an adapter (or of a tree of the same shape): split over all devices of the mesh.

    A pair's long side, `in` or `out`, is split over all axes. In experts' pairs, E is split like the experts, and the
    long side over the other axes. Leaves outside of pairs (counts) are on every device.
    """

    def where(leaf: Any) -> NamedSharding:
        if leaf.ndim != 4:
            long = (*(None,) * (leaf.ndim - 1), (FSDP, EXPERT, TENSOR))
            return sharding(mesh, leaf.shape, *(long if leaf.ndim else ()))
        experts = expert_axes(mesh, leaf.shape[1])
        return sharding(mesh, leaf.shape, None, experts, None, TENSOR if FSDP in experts else (FSDP, TENSOR))

    found: Tree = jax.tree.map(where, tree)
    return found


def gathered(mesh: Mesh, lora: Lora) -> Lora:
    """The adapter, gathered onto every device inside a jitted function; experts' pairs stay as they are.

    The adapter is gathered at once, because transfers for each matrix and layer would mostly wait for the network.
    Experts' pairs are large, so they are gathered where they are used.
    """

    def whole(pair: LoraPair) -> LoraPair:
        return pair if pair.A.ndim == 4 else jax.lax.with_sharding_constraint(pair, replicated(mesh))

    made: Lora = jax.tree.map(whole, lora, is_leaf=lambda node: isinstance(node, LoraPair))
    return made


def by_name(lora: Lora) -> dict[str, Any]:
    """Maps the names `q.A`, `q.B`, …, `unembed.B` to the leaves of an adapter."""
    return {f"{name}.{side}": getattr(pair, side) for name, pair in all_pairs(lora).items() for side in ("A", "B")}


def from_names(leaves: Mapping[str, Any]) -> Lora:
    """The inverse of `by_name`."""
    names = [name.removesuffix(".A") for name in leaves if name.endswith(".A")]
    return lora_of({name: LoraPair(A=leaves[f"{name}.A"], B=leaves[f"{name}.B"]) for name in names})


def all_pairs(lora: Lora) -> dict[str, LoraPair]:
    """Maps projections to the pairs of an adapter, including the pair of the unembedding."""
    return lora.layers if lora.unembed is None else {**lora.layers, "unembed": lora.unembed}


def lora_of(pairs: dict[str, LoraPair]) -> Lora:
    """The inverse of `all_pairs`."""
    return Lora(layers={name: pair for name, pair in pairs.items() if name != "unembed"}, unembed=pairs.get("unembed"))
