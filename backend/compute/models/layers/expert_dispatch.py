"""Sends tokens to their experts, and computes the experts: one grouped matmul for each projection.

Tokens are sorted by expert, so no token is dropped. Shapes do not depend on the routing, so no routing causes a
recompilation. The experts are split over the mesh's `expert` axis, and so are the rows of a layer's other parts.
Each device gathers the tokens of all devices along the axis, and computes the rows of its own experts. The results are
summed on the devices that the tokens came from. If the axis is at most k, this moves no more data than sending each
token to its k experts. A device has a row for each token along the axis and each of that token's experts, so it can
hold any imbalance of the routing.

Letters: B rows, T tokens, D hidden, E experts (of this device, inside `_local`), k experts of a token.
M = B * T * k rows to compute, F the width of an expert.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from tinkerflow.backend.compute.kernels.grouped import Groups
from tinkerflow.backend.compute.kernels.matmul import OfLayer
from tinkerflow.backend.compute.mesh import EXPERT, FSDP, ROWS, TENSOR, row_parts
from tinkerflow.backend.compute.models.layers.step import Linear
from tinkerflow.backend.compute.models.lora import LoraApply, LoraPair
from tinkerflow.backend.compute.weights.quantized import FourBit, Int8, Weight

Gated = Callable[[jax.Array, jax.Array], jax.Array]  # gated(gate_MF, up_MF) -> [M, F]


def mixture(
    mesh: Mesh,
    linears: Sequence[Linear],
    gated: Gated,
    y_BTD: jax.Array,
    chosen_BTk: jax.Array,
    shares_BTk: jax.Array,
    lora_apply: LoraApply,
    owners: tuple[str, ...],
) -> jax.Array:
    """The experts' results for y_BTD, summed by share: [B, T, D] in its dtype.

    mesh: its axes split the experts and the rows. linears: gate and up [E, D, F] and down [E, F, D], their biases
    [E, F] or [E, D] and their pairs [E, R, ...]; matrices and pairs may be `OfLayer`. gated: computes the input
    of `down`. y_BTD: normalized hidden states. chosen_BTk, shares_BTk: from the router. lora_apply: computes the
    adapters' updates. owners: the axes of the mesh that split the experts: `expert`, and also `fsdp` where every
    device has all rows, as in sampling.
    """
    weights = {linear.name: linear.weight for linear in linears}
    biases = {linear.name: linear.bias for linear in linears if linear.bias is not None}
    pairs = {linear.name: linear.pair for linear in linears if linear.pair is not None}
    width = jax.tree.leaves(weights["gate"])[0].shape[-1]
    inner = TENSOR if math.gcd(width, _blocks(weights["down"])) % mesh.shape[TENSOR] == 0 else None
    may_split = FSDP not in owners
    moved = may_split and mesh.shape[EXPERT] > 1 and y_BTD.shape[0] % row_parts(mesh) == 0
    split = may_split and y_BTD.shape[0] % mesh.shape[FSDP] == 0
    rows = PartitionSpec(ROWS if moved else FSDP if split else None)
    local = jax.shard_map(
        functools.partial(_local, gated, lora_apply, split, moved, owners, (inner,) if inner else ()),
        mesh=mesh,
        in_specs=(
            rows,
            rows,
            rows,
            {name: _weight_specs(name, weight, owners, inner) for name, weight in weights.items()},
            {name: PartitionSpec(owners, None if name == "down" else inner) for name in biases},
            {name: _pair_specs(name, pair, owners, inner) for name, pair in pairs.items()},
        ),
        out_specs=rows,
        check_vma=False,
    )
    mixed_BTD: jax.Array = local(y_BTD, chosen_BTk, shares_BTk, weights, biases, pairs)
    return mixed_BTD


def _blocks(weight: Weight | OfLayer) -> int:
    """The number of blocks of inputs that share a scale, which devices do not split; 0 = no blocks."""
    stack = weight.stack if isinstance(weight, OfLayer) else weight
    return stack.scale.shape[-2] if isinstance(stack, FourBit) else 0


def _weight_specs(name: str, weight: Weight | OfLayer, owners: tuple[str, ...], inner: str | None) -> Any:
    """Specs that split the experts over `owners`, and F over `inner`. Matrices are gathered over other axes."""
    if isinstance(weight, OfLayer):
        return _of_layer(_weight_specs(name, weight.stack, owners, inner))
    whole: Any = PartitionSpec(owners, inner, None) if name == "down" else PartitionSpec(owners, None, inner)
    if isinstance(weight, Int8):
        scale: Any = PartitionSpec(owners, whole[2])
        return Int8(values=whole, scale=scale)
    return FourBit(whole, whole, weight.table) if isinstance(weight, FourBit) else whole


def _of_layer(specs: Any) -> Any:
    """The specs for a stack of all layers. specs: of one layer."""
    whole: Any = PartitionSpec()
    return OfLayer(jax.tree.map(lambda spec: PartitionSpec(None, *spec), specs), whole)


def _pair_specs(name: str, pair: LoraPair | OfLayer, owners: tuple[str, ...], inner: str | None) -> Any:
    if isinstance(pair, OfLayer):
        return _of_layer(_pair_specs(name, pair.stack, owners, inner))
    whole: Any = PartitionSpec(owners)
    split: Any = PartitionSpec(owners, None, inner)
    return replace(pair, A=split, B=whole) if name == "down" else replace(pair, A=whole, B=split)


def _local(
    gated: Gated,
    lora_apply: LoraApply,
    rows_are_split: bool,
    moved: bool,
    owners: tuple[str, ...],
    inner: tuple[str, ...],
    y_BTD: jax.Array,
    chosen_BTk: jax.Array,
    shares_BTk: jax.Array,
    weights: Mapping[str, Weight | OfLayer],
    biases: Mapping[str, jax.Array],
    pairs: Mapping[str, LoraPair],
) -> jax.Array:
    """The results of this device's experts for its share of F, summed with those of the other devices.

    moved: rows are split over the expert axis as well, and are gathered from all its devices.
    """
    if moved:
        everyone = functools.partial(jax.lax.all_gather, axis_name=EXPERT, tiled=True)
        y_BTD, chosen_BTk, shares_BTk = map(everyone, (y_BTD, chosen_BTk, shares_BTk))
    B, T, k = chosen_BTk.shape
    D, E = y_BTD.shape[-1], jax.tree.leaves(weights["gate"])[0].shape[-3]
    here_M = chosen_BTk.reshape(-1) - jax.lax.axis_index(owners) * E
    mine_M = (here_M >= 0) & (here_M < E)
    here_M = jnp.where(mine_M, here_M, E)  # rows of other devices are sorted to the end
    order_M = jnp.argsort(here_M, stable=True)
    place_M = jnp.argsort(order_M)
    first = jax.lax.axis_index(FSDP) * B if rows_are_split else 0
    groups = Groups(
        sizes_E=jnp.sum(here_M[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32),
        expert_M=jnp.minimum(here_M[order_M], E - 1),
        batch_M=first + order_M // (T * k),
    )
    mine_M1 = mine_M[order_M][:, None]

    def project(x_Mi: jax.Array, *names: str) -> tuple[jax.Array, ...]:
        adapted = tuple(name for name in names if name in pairs)
        updates = dict(zip(adapted, lora_apply(x_Mi, tuple(pairs[name] for name in adapted), groups), strict=True))
        plain = {name: groups.dot(x_Mi, weights[name]) for name in names}
        sums = {name: plain[name] + updates[name] if name in updates else plain[name] for name in names}
        sums |= {
            name: sums[name] + biases[name][groups.expert_M] for name in names if name in biases and name != "down"
        }
        # Rows of other devices' experts may hold anything: a grouped matmul need not write them.
        return tuple(checkpoint_name(jnp.where(mine_M1, sums[name], 0), name) for name in names)

    copies_MD = jnp.broadcast_to(y_BTD.reshape(-1, 1, D), (B * T, k, D)).reshape(-1, D)
    x_MD = jnp.where(mine_M1, _permuted(copies_MD, order_M, place_M), 0)
    gate_MF, up_MF = project(x_MD, "gate", "up")
    # A row's share is multiplied in before `down`, so that a backward pass does not need the output of `down`.
    share_M1 = _permuted(shares_BTk.reshape(-1, 1), order_M, place_M).astype(y_BTD.dtype)
    (down_MD,) = project(gated(gate_MF, up_MF) * share_M1, "down")
    if "down" in biases:  # added on one device, because the results are summed over `inner`
        here = jnp.all(jnp.array([jax.lax.axis_index(axis) == 0 for axis in inner], bool))
        down_MD = down_MD + jnp.where(mine_M1 & here, biases["down"][groups.expert_M] * share_M1, 0)
    parts_BTkD = _permuted(down_MD, place_M, order_M).reshape(B, T, k, D)
    mixed_BTD = jnp.sum(parts_BTkD, axis=2, dtype=jnp.float32)
    if moved:
        mixed_BTD = jax.lax.psum_scatter(mixed_BTD, EXPERT, tiled=True)
        return (jax.lax.psum(mixed_BTD, inner) if inner else mixed_BTD).astype(y_BTD.dtype)
    return jax.lax.psum(mixed_BTD, (*owners, *inner)).astype(y_BTD.dtype)


@jax.custom_vjp
def _permuted(x_MD: jax.Array, order_M: jax.Array, inverse_M: jax.Array) -> jax.Array:
    """x_MD[order_M]. Its backward pass is a gather, because a scatter may add in any order."""
    return x_MD[order_M]


def _permuted_forward(
    x_MD: jax.Array, order_M: jax.Array, inverse_M: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return x_MD[order_M], (inverse_M,)


def _permuted_backward(kept: tuple[jax.Array, ...], d_MD: jax.Array) -> tuple[jax.Array, None, None]:
    return d_MD[kept[0]], None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)
