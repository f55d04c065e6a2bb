"""Products with matrices that several GPUs split. Each reads its part in place, and its part of the adapters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from tinkerflow.backend.compute.kernels.adapter_gpu import DevicePart, UpdateInPlace, adapted_products
from tinkerflow.backend.compute.kernels.matmul import IN_PLACE, OfLayer, matmuls
from tinkerflow.backend.compute.mesh import WEIGHTS
from tinkerflow.backend.compute.weights.quantized import Weight


def split_products(
    mesh: Mesh,
    x: jax.Array,
    weights: Sequence[Weight | OfLayer],
    pairs: Sequence[Any],
    update: UpdateInPlace,
    *,
    sums_inputs: bool,
) -> tuple[jax.Array, ...] | None:
    """x times the transpose of each matrix, plus the adapters' updates; None if the parts cannot be read in place.

    x: all of it is on each device, or, with sums_inputs, its last dimension is split. weights: `OfLayer`, whose split
    dimension the devices along WEIGHTS must divide. pairs: the adapters' pairs for all of the matrices as `OfLayer`, or
    for none of them; all of a pair is on each device. update: from `adapter_gpu.in_place`. sums_inputs: whether the
    devices split the matrices' inputs and add the products, or split their outputs.
    """
    parts = math.prod(mesh.shape[axis] for axis in WEIGHTS)
    axes = (None, None, WEIGHTS) if sums_inputs else (None, WEIGHTS)  # of a stack; a scale may have no inputs
    split: Any = PartitionSpec(*(None for _ in x.shape[1:]), WEIGHTS)
    whole: Any = PartitionSpec()
    place = len(axes) - 1
    ours = [weight for weight in weights if isinstance(weight, OfLayer)]
    sizes = [leaf.shape[place] for weight in ours for leaf in jax.tree.leaves(weight) if place < leaf.ndim]
    stacked = len(ours) == len(weights) and all(isinstance(pair, OfLayer) for pair in pairs)
    few = math.prod(x.shape[:-1]) <= IN_PLACE
    if not (stacked and few and len(pairs) in (0, len(ours))) or any(size % parts for size in sizes):
        return None

    def specs(weight: OfLayer) -> OfLayer:
        return OfLayer(jax.tree.map(lambda leaf: PartitionSpec(*axes[: leaf.ndim]), weight.stack), whole)

    def local(x: jax.Array, weights: Sequence[OfLayer], pairs: Sequence[OfLayer]) -> tuple[jax.Array, ...]:
        if pairs:
            part = DevicePart(jax.lax.axis_index(WEIGHTS), parts, sums_inputs)
            products = adapted_products(x, weights, update(x, pairs, part))
        else:
            products = matmuls(x, *weights)
        return tuple(jax.lax.psum(y, WEIGHTS) for y in products) if sums_inputs else products

    found: tuple[jax.Array, ...] = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(split if sums_inputs else whole, [*map(specs, ours)], jax.tree.map(lambda _: whole, [*pairs])),
        out_specs=tuple(whole if sums_inputs else split for _ in ours),
        check_vma=False,
    )(x, ours, [*pairs])
    return found
