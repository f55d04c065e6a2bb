"""Sends tokens to their experts, and computes the experts: one grouped matmul for each projection.

In training, devices along the `expert` axis send each other their tokens. So do devices along the `fsdp` axis if their
tokens take fewer bytes than their experts (`training_expert_axes`). Each device gathers the tokens of all these
devices, and computes the rows of its own experts. The results are summed on the devices that the tokens came from. For
up to k devices, this moves no more data than sending each token to its k experts.

Tokens are sorted by expert, so no token is dropped. Shapes do not depend on the routing, so no routing causes a
recompilation. A device computes 1/SPARE_ROWS more rows at once than it gets on average, and all others in a loop
(`_with_rest`).

Letters: B rows, T tokens, D hidden, E experts (of this device, inside `_local`), k experts of a token.
M = B * T * k rows to compute, F the width of an expert.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from tinkerflow.backend.compute.kernels.grouped import Groups
from tinkerflow.backend.compute.kernels.matmul import OfLayer, own_matrix
from tinkerflow.backend.compute.mesh import FSDP, ROWS, TENSOR, row_parts
from tinkerflow.backend.compute.models.layers.step import SPARE_ROWS, Linear, training_expert_axes
from tinkerflow.backend.compute.models.lora import LoraApply, LoraPair
from tinkerflow.backend.compute.weights.quantized import FourBit, Int8, Weight

Gated = Callable[[jax.Array, jax.Array], jax.Array]  # gated(gate_MF, up_MF) -> [M, F]
Matrices = Mapping[str, Weight | OfLayer]
_ALIGNED = 8  # a device computes a multiple of this number of rows at once


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
    of `down`. y_BTD: normalized hidden states. chosen_BTk, shares_BTk: the router's results. lora_apply: computes the
    adapters' updates. owners: the axes of the mesh that split the experts: `expert` in training, and also `fsdp` if
    every device has all rows, as in sampling.
    """
    weights = {linear.name: linear.weight for linear in linears}
    biases = {linear.name: linear.bias for linear in linears if linear.bias is not None}
    pairs = {linear.name: linear.pair for linear in linears if linear.pair is not None}
    width = jax.tree.leaves(weights["gate"])[0].shape[-1]
    inner = TENSOR if math.gcd(width, _blocks(weights["down"])) % mesh.shape[TENSOR] == 0 else None
    moved: tuple[str, ...] = ()
    trains = FSDP not in owners
    if trains and y_BTD.shape[0] % row_parts(mesh) == 0:
        owners = training_expert_axes(mesh, y_BTD.size, weights)
        moved = tuple(axis for axis in ROWS if axis in owners and mesh.shape[axis] > 1)
    if trains and FSDP not in owners and mesh.shape[FSDP] > 1:  # gather the experts of one layer
        weights = {name: own_matrix(weight) for name, weight in weights.items()}
    split = trains and y_BTD.shape[0] % mesh.shape[FSDP] == 0
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
    """Specs that split the experts over `owners`, and F over `inner`. Matrices are gathered over all other axes."""
    if isinstance(weight, OfLayer):
        return _of_layer(_weight_specs(name, weight.stack, owners, inner))
    whole: Any = PartitionSpec(owners, inner, None) if name == "down" else PartitionSpec(owners, None, inner)
    if isinstance(weight, Int8):
        scale: Any = PartitionSpec(owners, whole[2])
        return Int8(values=whole, scale=scale)
    return FourBit(whole, whole, weight.table) if isinstance(weight, FourBit) else whole


def _of_layer(specs: Any) -> Any:
    """The specs for a stack of all layers. specs: for one layer."""
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
    moved: tuple[str, ...],
    owners: tuple[str, ...],
    inner: tuple[str, ...],
    y_BTD: jax.Array,
    chosen_BTk: jax.Array,
    shares_BTk: jax.Array,
    weights: Matrices,
    biases: Mapping[str, jax.Array],
    pairs: Mapping[str, LoraPair],
) -> jax.Array:
    """The results of this device's experts for its share of F, summed with those of the other devices.

    moved: the axes whose devices send each other their tokens.
    """
    parts = jax.lax.axis_size(moved) if moved else 1
    if moved:
        everyone = functools.partial(jax.lax.all_gather, axis_name=moved, tiled=True)
        y_BTD, chosen_BTk, shares_BTk = map(everyone, (y_BTD, chosen_BTk, shares_BTk))
    B, T, k = chosen_BTk.shape
    D, E = y_BTD.shape[-1], jax.tree.leaves(weights["gate"])[0].shape[-3]
    M = B * T * k
    here_M = chosen_BTk.reshape(-1) - jax.lax.axis_index(owners) * E
    here_M = jnp.where((here_M >= 0) & (here_M < E), here_M, E)  # rows of other devices are sorted to the end
    order_M = jnp.argsort(here_M, stable=True)
    sizes_E = jnp.sum(here_M[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)
    routed = _Routed(here_M[order_M], order_M, jnp.argsort(order_M), sizes_E)

    def some(routed: _Routed, first: jax.Array | int, count: int, given: _Given) -> jax.Array:
        """The results of `count` sorted rows, from `first` on, summed by token: [B, T, D] float32."""
        rows = routed.rows(first, count)
        first_row = jax.lax.axis_index(FSDP) * B if rows_are_split and FSDP not in moved else 0
        groups = Groups(
            sizes_E=rows.sizes_E,
            expert_M=jnp.minimum(rows.expert_M, E - 1),
            batch_M=first_row + rows.order_M // (T * k),
        )
        mine_M1 = (rows.expert_M < E)[:, None]

        def project(x_Mi: jax.Array, *names: str) -> tuple[jax.Array, ...]:
            pairs, biases = given.pairs, given.biases
            adapted = tuple(name for name in names if name in pairs)
            updates = dict(zip(adapted, lora_apply(x_Mi, tuple(pairs[name] for name in adapted), groups), strict=True))
            plain = {name: groups.dot(x_Mi, given.weights[name]) for name in names}
            sums = {name: plain[name] + updates[name] if name in updates else plain[name] for name in names}
            sums |= {
                name: sums[name] + biases[name][groups.expert_M] for name in names if name in biases and name != "down"
            }
            # Rows of other devices' experts may contain any values, because a grouped matmul need not write them.
            return tuple(checkpoint_name(jnp.where(mine_M1, sums[name], 0), name) for name in names)

        x_MD = jnp.where(mine_M1, _chosen(k, given.y_BTD.reshape(-1, D), rows), 0)
        gate_MF, up_MF = project(x_MD, "gate", "up")
        # A row is multiplied by its share before `down`, so that a backward pass does not need the output of `down`.
        share_M1 = _chosen(1, given.shares_BTk.reshape(-1, 1), rows).astype(y_BTD.dtype)
        (down_MD,) = project(gated(gate_MF, up_MF) * share_M1, "down")
        if "down" in biases:  # added on one device, because the results are summed over `inner`
            here = not inner or jax.lax.axis_index(inner) == 0
            down_MD = down_MD + jnp.where(mine_M1 & here, given.biases["down"][groups.expert_M] * share_M1, 0)
        summed_BTD: jax.Array = _summed(k, down_MD, rows).reshape(B, T, D)
        return summed_BTD

    given = _Given(y_BTD, shares_BTk, weights, biases, pairs)
    count = _most_rows(M, parts)
    mixed_BTD = some(routed, 0, count, given)
    if count < M:
        mixed_BTD = _with_rest(some, routed, count, given, mixed_BTD)
    if moved:
        mixed_BTD = jax.lax.psum_scatter(mixed_BTD, moved, tiled=True)
        return (jax.lax.psum(mixed_BTD, inner) if inner else mixed_BTD).astype(y_BTD.dtype)
    return jax.lax.psum(mixed_BTD, (*owners, *inner)).astype(y_BTD.dtype)


class _Given(NamedTuple):
    """The inputs of a device's experts: the tokens of all devices, and the device's own weights."""

    y_BTD: jax.Array
    shares_BTk: jax.Array
    weights: Matrices
    biases: Mapping[str, jax.Array]
    pairs: Mapping[str, LoraPair]


class _Routed(NamedTuple):
    """The rows of all tokens, sorted by expert. All int32.

    expert_M: the expert of each sorted row; E = an expert of another device. order_M: the original row of each sorted
    row. place_M: the sorted place of each original row. sizes_E: how many rows each expert has.
    """

    expert_M: jax.Array
    order_M: jax.Array
    place_M: jax.Array
    sizes_E: jax.Array

    def rows(self, first: jax.Array | int, count: int) -> _Rows:
        """`count` sorted rows, from `first` on. Padding after the last row has an expert of another device."""
        if count == len(self.order_M):
            return _Rows(self.expert_M, self.order_M, self.place_M, self.sizes_E, None)

        def part(sorted_M: jax.Array, filling: int) -> jax.Array:
            padded = jnp.pad(sorted_M, (0, count), constant_values=filling)
            return jax.lax.dynamic_slice_in_dim(padded, first, count)

        ends_E, place_M = jnp.cumsum(self.sizes_E), self.place_M - first
        sizes_E = jnp.diff(jnp.clip(ends_E - first, 0, count), prepend=0)
        there_M = (place_M >= 0) & (place_M < count)
        expert_M, order_M = part(self.expert_M, len(sizes_E)), part(self.order_M, 0)
        return _Rows(expert_M, order_M, jnp.where(there_M, place_M, 0), sizes_E, there_M)


class _Rows(NamedTuple):
    """Some of the sorted rows, with the fields of `_Routed`.

    place_M: each original row's place among these rows; 0 if it is not one of them. there_M: whether each original row
    is one of these rows; None = all are.
    """

    expert_M: jax.Array
    order_M: jax.Array
    place_M: jax.Array
    sizes_E: jax.Array
    there_M: jax.Array | None


def _most_rows(M: int, parts: int) -> int:
    """How many of the M rows of `parts` devices each device computes at once."""
    return M if parts == 1 else min(M, _multiple((SPARE_ROWS + 1) * M // (SPARE_ROWS * parts)))


def _multiple(rows: int) -> int:
    return -(-rows // _ALIGNED) * _ALIGNED


def _with_rest(
    some: Callable[[_Routed, Any, int, _Given], jax.Array],
    routed: _Routed,
    done: int,
    given: _Given,
    mixed_BTD: jax.Array,
) -> jax.Array:
    """mixed_BTD plus the results of the device's rows from `done` on, computed in a loop that ends with the last row.

    The loop usually computes nothing. It is needed when a few experts get most tokens, so that a device has more rows
    than it computed at once. The backward pass computes these rows again, a few at a time.
    """
    count = _multiple(done // (SPARE_ROWS + 1))
    frozen = {name: weight for name, weight in given.weights.items() if not isinstance(weight, jax.Array)}
    trained = given._replace(weights={name: given.weights[name] for name in given.weights if name not in frozen})

    def results(routed: _Routed, number: jax.Array, frozen: Matrices, trained: _Given) -> jax.Array:
        whole = trained._replace(weights={**frozen, **trained.weights})
        return some(routed, done + number * count, count, whole)

    def loops(routed: _Routed) -> jax.Array:
        return -(-jnp.maximum(jnp.sum(routed.sizes_E) - done, 0) // count)

    @jax.custom_vjp
    def added(routed: _Routed, frozen: Matrices, trained: _Given, mixed_BTD: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(
            0, loops(routed), lambda number, sums: sums + results(routed, number, frozen, trained), mixed_BTD
        )

    def forward(routed: _Routed, frozen: Matrices, trained: _Given, mixed_BTD: jax.Array) -> tuple[jax.Array, Any]:
        return added(routed, frozen, trained, mixed_BTD), (routed, frozen, trained)

    def backward(kept: Any, d_BTD: jax.Array) -> tuple[None, None, _Given, jax.Array]:
        routed, frozen, trained = kept

        def add(number: jax.Array, sums: Any) -> Any:
            _, pull = jax.vjp(functools.partial(results, routed, number, frozen), trained)
            return jax.tree.map(jnp.add, sums, *pull(d_BTD))

        return None, None, jax.lax.fori_loop(0, loops(routed), add, jax.tree.map(jnp.zeros_like, trained)), d_BTD

    added.defvjp(forward, backward)
    made_BTD: jax.Array = added(routed, frozen, trained, mixed_BTD)
    return made_BTD


# Each backward pass is the other function. Both gather, because a scatter may add in any order.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chosen(k: int, x_ND: jax.Array, rows: _Rows) -> jax.Array:
    """These rows of x_ND, of which each row is repeated k times."""
    return x_ND[rows.order_M // k]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(k: int, x_CD: jax.Array, rows: _Rows) -> jax.Array:
    """The sum of every k original rows in float32: [N, D]. Rows that are not in x_CD count as 0."""
    D = x_CD.shape[-1]
    if rows.there_M is None:
        return jnp.sum(x_CD[rows.place_M].reshape(-1, k, D), axis=1, dtype=jnp.float32)
    # TPUs store the last two dimensions in tiles, so [N, k, D] would be a copy of [N * k, D] if k < 8.
    place_kN, there_kN = rows.place_M.reshape(-1, k).T, rows.there_M.reshape(-1, k).T
    return jnp.sum(jnp.where(there_kN[..., None], x_CD[place_kN], 0), axis=0, dtype=jnp.float32)


_chosen.defvjp(
    lambda k, x_ND, rows: (_chosen(k, x_ND, rows), rows),
    lambda k, rows, d_CD: (_summed(k, d_CD, rows).astype(d_CD.dtype), None),
)
_summed.defvjp(
    lambda k, x_CD, rows: (_summed(k, x_CD, rows), (rows, x_CD[:0])),  # without values, for its dtype
    lambda k, kept, d_ND: (_chosen(k, d_ND.astype(kept[1].dtype), kept[0]), None),
)
