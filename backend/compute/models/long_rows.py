"""Parts of a layer computed for a few tokens at a time, forward and backward.

The arrays inside a layer are larger than its input. For 32,768 tokens of Qwen3-4B, gate and up take 0.6 GB each, and
their backward pass holds five arrays of that size. Apart from attention, a layer computes each token independently. A
backward pass that recomputes a layer recomputes some tokens, differentiates, and continues with the next tokens.
Attention needs the queries, keys and values of all tokens, so these are computed once more.

Letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tinkerflow.backend.compute.kernels.matmul import own_matrix
from tinkerflow.backend.compute.mesh import EXPERT, FSDP, ROWS, TENSOR, row_parts, sharding
from tinkerflow.backend.compute.platforms import may_be_unrolled
from tinkerflow.backend.compute.weights.quantized import Int8

Tree = TypeVar("Tree")


def in_chunks(mesh: Mesh, most: int, part: Callable[..., Tree], *arrays: Any, own_buffers: bool = False) -> Tree:
    """part(*arrays), which computes each token independently, for at most `most` tokens of each device at a time.

    arrays: pytrees of [B, T, ...], like the result of `part`; the first is an array. T is a power of two. A backward
    pass keeps only the arguments of `part`. own_buffers: each loop writes to its own memory. GPUs need this if a
    backward pass computes the loop twice: XLA fills the output of a loop with zeros, and all loops of one shape share
    these zeros. So the memory would stay in use from the first loop to the last.
    """
    B, T = arrays[0].shape[:2]
    size = T
    while size > 1 and size * max(1, B // row_parts(mesh)) > most:
        size //= 2
    if size == T:
        return part(*arrays)
    run = partial(_into_own_buffers, mesh) if own_buffers else jax.lax.map
    kept = jax.checkpoint(part, prevent_cse=may_be_unrolled(T // size))
    made = run(lambda chunk: kept(*chunk), split_chunks(arrays, size))
    joined: Tree = jax.tree.map(join_chunks, made)
    return joined


def split_chunks(tree: Tree, size: int) -> Tree:
    """Every leaf [B, T, ...] -> [T / size, B, size, ...]: split along T, because the mesh has already split B."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0), tree)


def join_chunks(x: jax.Array) -> jax.Array:
    """The inverse of `split_chunks`, for one array."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _into_own_buffers(mesh: Mesh, part: Callable[[Any], Tree], split: Any) -> Tree:
    """Like `jax.lax.map`. part: returns arrays of [B, T, heads, ...].

    The loop's output is filled with a number from its arguments, so no other loop can share the filled memory.
    """
    first = jax.lax.stop_gradient(jax.tree.leaves(split)[0])

    def place(like: jax.ShapeDtypeStruct) -> jax.Array:
        shape = (len(first), *like.shape)
        filled = jnp.full(shape, first[(0,) * first.ndim].astype(like.dtype))
        return jax.lax.with_sharding_constraint(filled, sharding(mesh, shape, None, ROWS, None, TENSOR))

    def one(made: Tree, numbered: tuple[jax.Array, Any]) -> tuple[Tree, None]:
        number, chunk = numbered
        placed = partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
        return jax.tree.map(placed, made, part(chunk)), None

    made = jax.tree.map(place, jax.eval_shape(part, jax.tree.map(lambda x: x[0], split)))
    made, _ = jax.lax.scan(one, made, (jnp.arange(len(first)), split))
    return made


def gather_matrices(mesh: Mesh, weights: Mapping[str, Any], sums_inputs: Mapping[str, bool]) -> dict[str, Any]:
    """The matrices of one layer, gathered over fsdp once, so that not every chunk gathers them again.

    weights: maps names to the layer's tensors. sums_inputs: maps the names of its matrices to whether the tensor axis
    splits their inputs (`Projection.sums_inputs`).
    """

    def pinned(array: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, sharding(mesh, array.shape, *axes))

    def gather(matrix: Any, axes: tuple[str | None, ...]) -> Any:
        matrix = own_matrix(matrix)
        values, scaled = jax.tree.leaves(matrix)[0], axes[:1]
        if values.ndim == len("Eio"):
            axes, scaled = (EXPERT, *axes[::-1]), (EXPERT, *scaled)
        if isinstance(matrix, Int8):
            return Int8(pinned(values, axes), pinned(matrix.scale, scaled))
        return jax.tree.map(lambda part: pinned(part, axes), matrix)

    if mesh.shape[FSDP] == 1:
        return {}
    axes = {name: (None, TENSOR) if sums else (TENSOR, None) for name, sums in sums_inputs.items()}
    return {name: gather(weights[name], axes[name]) for name in sums_inputs}
