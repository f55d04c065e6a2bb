"""Matmuls of rows that are sorted by expert, each row with the matrix of its expert.

Letters: M rows, E experts, i in, o out, b rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import flax.struct
import jax
import jax.numpy as jnp

from tinkerflow.backend.compute.kernels import grouped_gpu, grouped_tpu
from tinkerflow.backend.compute.kernels.matmul import OfLayer
from tinkerflow.backend.compute.mesh import Array
from tinkerflow.backend.compute.platforms import TPU, platform
from tinkerflow.backend.compute.weights.quantized import FourBit, Int8

_MOST_ROWS = 64  # of a block
_LEAST_ROWS = 8
GroupedDot = Callable[[jax.Array, Array, jax.Array], jax.Array]  # dot(x_Mi, weight_Eio, sizes_E) -> [M, o]


@flax.struct.dataclass
class Groups:
    """Rows sorted by expert, from expert 0 on. Rows without an expert come last and have no result.

    All int32. sizes_E: how many rows each expert has. expert_M: the expert of each row. batch_M: the row of the batch
    that each row came from.
    """

    sizes_E: jax.Array
    expert_M: jax.Array
    batch_M: jax.Array

    def dot(self, x_Mi: jax.Array, weight_Eio: Array | Int8 | FourBit | OfLayer) -> jax.Array:
        """Each row times its expert's matrix, [M, o] in the dtype of x.

        Differentiable with respect to x and to float weights. With OfLayer, only with respect to x.
        """
        if isinstance(weight_Eio, OfLayer):
            return self._in_place(x_Mi, weight_Eio, transposed=False)
        if isinstance(weight_Eio, Int8):
            return _dot(x_Mi, weight_Eio.values, self.sizes_E) * weight_Eio.scale[self.expert_M]
        if isinstance(weight_Eio, FourBit):
            return _dot(x_Mi, weight_Eio.dense(x_Mi.dtype, of_experts=True), self.sizes_E)
        return _dot(x_Mi, weight_Eio, self.sizes_E)

    def dot_transposed(self, x_Mi: jax.Array, weight_Eoi: Array | OfLayer) -> jax.Array:
        """Like `dot`, but with the transposes of these matrices, which must be floats."""
        if isinstance(weight_Eoi, OfLayer):
            return self._in_place(x_Mi, weight_Eoi, transposed=True)
        return self.dot(x_Mi, weight_Eoi.swapaxes(-1, -2))

    def _in_place(self, x_Mi: jax.Array, weight: OfLayer, *, transposed: bool) -> jax.Array:
        stack, kernels = weight.stack, grouped_tpu if platform() is TPU else grouped_gpu
        if isinstance(stack, FourBit) and not (kernels is grouped_gpu and grouped_gpu.takes(stack, of_experts=True)):
            return self.dot(x_Mi, weight.own)
        values = stack.values if isinstance(stack, Int8) else stack
        y_Mo = _of_stack(kernels, transposed, x_Mi, values, self.sizes_E, weight.layer)
        return y_Mo * weight.own.scale[self.expert_M] if isinstance(stack, Int8) else y_Mo


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_stack(
    kernels: ModuleType, transposed: bool, x_Mi: jax.Array, stack: Array, sizes_E: jax.Array, layer: jax.Array
) -> jax.Array:
    """The kernels' `product` with a layer's matrices in the stack of all layers, differentiable with respect to x."""
    y_Mo: jax.Array = kernels.product(x_Mi, stack, sizes_E, layer, transposed=transposed)
    return y_Mo


_of_stack.defvjp(
    lambda kernels, transposed, x_Mi, *matrices: (_of_stack(kernels, transposed, x_Mi, *matrices), matrices),
    lambda kernels, transposed, matrices, d_Mo: (_of_stack(kernels, not transposed, d_Mo, *matrices), None, None, None),
)


def _dot(x_Mi: jax.Array, weight_Eio: Array, sizes_E: jax.Array) -> jax.Array:
    # XLA computes `jax.lax.ragged_dot` only as a product of every row with every expert's matrix.
    if not platform().kernels:
        return by_blocks(x_Mi, weight_Eio, sizes_E)
    by_kernel = by_kernel_of_tpus if platform() is TPU else by_kernel_of_gpus
    return by_kernel(x_Mi, weight_Eio, sizes_E)


def differentiable(product: Callable[..., jax.Array], outer: Callable[..., jax.Array]) -> GroupedDot:
    """The grouped matmul of these two functions, differentiable with respect to x and to a float weight.

    product(x_Mi, weight, sizes_E, transposed=): each row times its expert's matrix, or times the matrix's transpose.
    outer(x_Mi, y_Mo, sizes_E): [E, i, o] float32, the sum over an expert's rows of their outer products.
    """

    @jax.custom_vjp
    def dot(x_Mi: jax.Array, weight_Eio: Array, sizes_E: jax.Array) -> jax.Array:
        return product(x_Mi, weight_Eio, sizes_E, transposed=False)

    def forward(x_Mi: jax.Array, weight_Eio: Array, sizes_E: jax.Array) -> tuple[jax.Array, tuple[Array, ...]]:
        return product(x_Mi, weight_Eio, sizes_E, transposed=False), (x_Mi, weight_Eio, sizes_E)

    def backward(kept: tuple[jax.Array, ...], d_Mo: jax.Array) -> tuple[jax.Array, jax.Array | None, None]:
        x_Mi, weight_Eio, sizes_E = kept
        frozen = not jnp.issubdtype(weight_Eio.dtype, jnp.floating)
        d_weight = None if frozen else outer(x_Mi, d_Mo, sizes_E).astype(weight_Eio.dtype)
        return product(d_Mo, weight_Eio, sizes_E, transposed=True), d_weight, None

    dot.defvjp(forward, backward)
    return dot


def _product(x_Mi: jax.Array, weight_Eio: Array, sizes_E: jax.Array, *, transposed: bool) -> jax.Array:
    """Each row times the matrix of its expert, or times the transpose of that matrix."""

    def add(sums: jax.Array, expert: jax.Array, start: jax.Array, mine_b1: jax.Array) -> jax.Array:
        matrix = jax.lax.dynamic_index_in_dim(weight_Eio, expert, keepdims=False).astype(x_Mi.dtype)
        rows_bi = jax.lax.dynamic_slice_in_dim(padded, start, mine_b1.shape[0])
        found_bo = jnp.where(mine_b1, rows_bi @ (matrix.T if transposed else matrix), 0)
        before_bo = jax.lax.dynamic_slice_in_dim(sums, start, mine_b1.shape[0])
        return jax.lax.dynamic_update_slice_in_dim(sums, before_bo + found_bo, start, axis=0)

    M, b = x_Mi.shape[0], _block_rows(x_Mi, sizes_E)
    padded = jnp.pad(x_Mi, ((0, b), (0, 0)))
    outs = weight_Eio.shape[1 if transposed else 2]
    return _over_blocks(add, jnp.zeros((M + b, outs), x_Mi.dtype), sizes_E, b)[:M]


def _outer(x_Mi: jax.Array, y_Mo: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[E, i, o] float32: the sum over an expert's rows of their outer products."""

    def add(sums: jax.Array, expert: jax.Array, start: jax.Array, mine_b1: jax.Array) -> jax.Array:
        rows_bi, others_bo = (jax.lax.dynamic_slice_in_dim(rows, start, mine_b1.shape[0]) for rows in padded)
        found_io = jnp.matmul(rows_bi.T, jnp.where(mine_b1, others_bo, 0), preferred_element_type=jnp.float32)
        before_io = jax.lax.dynamic_index_in_dim(sums, expert, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(sums, before_io + found_io, expert, axis=0)

    b = _block_rows(x_Mi, sizes_E)
    padded = [jnp.pad(rows, ((0, b), (0, 0))) for rows in (x_Mi, y_Mo)]
    return _over_blocks(add, jnp.zeros((sizes_E.shape[0], x_Mi.shape[1], y_Mo.shape[1]), jnp.float32), sizes_E, b)


def _block_rows(x_Mi: jax.Array, sizes_E: jax.Array) -> int:
    """Half of an expert's average rows, as a power of two, so that few rows of a block are empty."""
    mean = x_Mi.shape[0] // sizes_E.shape[0]
    return max(_LEAST_ROWS, min(_MOST_ROWS, (1 << mean.bit_length()) // 2))


def _over_blocks(
    add: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array], sums: jax.Array, sizes_E: jax.Array, b: int
) -> jax.Array:
    """`sums` after add(sums, expert, first row, mask of the expert's rows among b rows) for each block with rows."""
    ends_E = jnp.cumsum(sizes_E)
    blocks_E = -(-sizes_E // b)
    last_E = jnp.cumsum(blocks_E)

    def one(number: jax.Array, sums: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_E, number, side="right")
        within = number - (last_E[expert] - blocks_E[expert])
        start = ends_E[expert] - sizes_E[expert] + within * b
        return add(sums, expert, start, (start + jnp.arange(b) < ends_E[expert])[:, None])

    return jax.lax.fori_loop(0, last_E[-1], one, sums)


# Like `jax.lax.ragged_dot`, with zeros in rows without an expert: a loop over blocks of rows of one expert each.
by_blocks = differentiable(_product, _outer)
by_kernel_of_gpus = differentiable(grouped_gpu.product, grouped_gpu.outer)
by_kernel_of_tpus = differentiable(grouped_tpu.product, grouped_tpu.outer)
