"""The updates of several adapters on a GPU, read from their stack in place: two Pallas kernels through Triton.

XLA:GPU copies each layer's A and B out of the stack of all layers before it multiplies by them. For few rows, this
moves three and a half times the bytes. These kernels read A and B in place, and only the blocks of columns that rows of
the batch use, so an idle adapter costs nothing. All rows are multiplied by all of these blocks, and other adapters'
columns are masked. A step takes as long as reading does. Every program writes a block of its own and sums in a fixed
order, so results are reproducible.

Letters: B rows, T tokens of each, M = B * T, K columns of the stack, N blocks of C columns, P parts of the inputs.
L layers, i in, o out; r, n, k: sizes of a program's tile of rows, outputs and inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tinkerflow.backend.compute.kernels.grouped_gpu import dot, side
from tinkerflow.backend.compute.kernels.triton_calls import triton_call
from tinkerflow.backend.compute.mesh import Array
from tinkerflow.backend.compute.platforms import RANK_COLUMNS

_ROWS, _OUTS, _BYTES_IN = 64, 64, 256  # the most of a tile; _BYTES_IN: of one row of it
_STEPS = 2  # tiles of inputs that a program sums; with more, few programs read A, and most of a GPU is idle


class AdapterStack(Protocol):
    """The adapters of one projection in all layers: A [L, K, i] and B [L, K, o]."""

    @property
    def A(self) -> Array:  # noqa: N802, as LoRA calls it
        """[L, K, i]."""

    @property
    def B(self) -> Array:  # noqa: N802
        """[L, K, o]."""


InPlace = Callable[[jax.Array, AdapterStack, jax.Array], jax.Array]  # update(x_BTi, stack, layer) -> [B, T, o]


def in_place(columns_B2: Array, width: int, *, interpret: bool = False) -> InPlace:
    """The function update(x_BTi, stack, layer): every row's update [B, T, o] in the dtype of x.

    columns_B2 int32: row b sees the columns [columns_B2[b, 0], columns_B2[b, 1]). width: K, a multiple of
    `RANK_COLUMNS`. interpret: run the kernels on a CPU, for tests.

    Of `update`: stack: a pair with A [L, K, i] and B [L, K, o]. layer: int32 scalar.
    """
    C, N = RANK_COLUMNS, width // RANK_COLUMNS
    columns_B2 = jnp.asarray(columns_B2)
    first_B1, end_B1 = columns_B2[:, :1], columns_B2[:, 1:]
    start_N, column_K = jnp.arange(N, dtype=jnp.int32) * C, jnp.arange(width, dtype=jnp.int32)
    own_B1K = ((column_K >= first_B1) & (column_K < end_B1))[:, None]
    seen_N = jnp.cumsum(jnp.any((first_B1 < start_N + C) & (end_B1 > start_N), axis=0), dtype=jnp.int32)
    block_N = jnp.sum(seen_N <= jnp.arange(N, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)  # the seen ones first
    blocks = block_N, seen_N[-1:]

    def update(x_BTi: jax.Array, stack: AdapterStack, layer: jax.Array) -> jax.Array:
        B, T, i = x_BTi.shape
        where = jnp.reshape(layer, 1), *blocks
        low_PMK = _low(x_BTi.reshape(-1, i), stack.A, where, interpret)
        # Not a product with 0: blocks that no program wrote, and overflows in other rows' columns, may be nan.
        low_BTK = jnp.where(own_B1K, jnp.sum(low_PMK, axis=0).reshape(B, T, width), 0).astype(x_BTi.dtype)
        return _update(low_BTK.reshape(-1, width), stack.B, where, interpret).reshape(B, T, -1)

    return update


_Where = tuple[jax.Array, jax.Array, jax.Array]  # int32: layer [1], numbers of the blocks that are seen [N], how many


def _low(x_Mi: jax.Array, stack_LKi: Array, where: _Where, interpret: bool) -> jax.Array:
    """x times the transpose of a layer's A, float32 [P, M, K]: parts of sums. Blocks that no row uses are left."""
    (M, i), (_, K, _), C = x_Mi.shape, stack_LKi.shape, RANK_COLUMNS
    r, k = side(M, _ROWS), side(i, _BYTES_IN // x_Mi.dtype.itemsize)
    steps = pl.cdiv(i, k)
    parts = pl.cdiv(steps, _STEPS)

    def kernel(x_ref: Any, stack_ref: Any, layer_ref: Any, block_ref: Any, count_ref: Any, out_ref: Any) -> None:
        number, part, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * r

        @pl.when(number < count_ref[0])
        def _() -> None:
            layer, column = layer_ref[0], block_ref[number] * C
            rows = first + jnp.arange(r) < M

            def add(step: jax.Array, sums_rC: jax.Array) -> jax.Array:
                at = step * k
                ins = at + jnp.arange(k) < i
                x_rk = triton.load(x_ref.at[pl.ds(first, r), pl.ds(at, k)], mask=rows[:, None] & ins[None], other=0)
                there = jnp.broadcast_to(ins[None], (C, k))
                A_Ck = triton.load(stack_ref.at[layer, pl.ds(column, C), pl.ds(at, k)], mask=there, other=0)
                return sums_rC + dot(x_rk, A_Ck.astype(x_rk.dtype), trans_b=True)

            last = jnp.minimum((part + 1) * _STEPS, steps)
            sums_rC = jax.lax.fori_loop(part * _STEPS, last, add, jnp.zeros((r, C), jnp.float32))
            mine = jnp.broadcast_to(rows[:, None], (r, C))
            triton.store(out_ref.at[part, pl.ds(first, r), pl.ds(column, C)], sums_rC, mask=mine)

    result: jax.Array = triton_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((parts, M, K), jnp.float32),
        grid=(K // C, parts, pl.cdiv(M, r)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="adapter_low",
    )(x_Mi, stack_LKi, *where)
    return result


def _update(low_MK: jax.Array, stack_LKo: Array, where: _Where, interpret: bool) -> jax.Array:
    """low times a layer's B, [M, o] in the dtype of low, over the blocks that are seen."""
    M, o, C = low_MK.shape[0], stack_LKo.shape[2], RANK_COLUMNS
    r, n = side(M, _ROWS), side(o, _OUTS)

    def kernel(low_ref: Any, stack_ref: Any, layer_ref: Any, block_ref: Any, count_ref: Any, out_ref: Any) -> None:
        column, first, layer = pl.program_id(0) * n, pl.program_id(1) * r, layer_ref[0]
        rows, outs = first + jnp.arange(r) < M, column + jnp.arange(n) < o

        def add(number: jax.Array, sums_rn: jax.Array) -> jax.Array:
            at = block_ref[number] * C
            mine, there = jnp.broadcast_to(rows[:, None], (r, C)), jnp.broadcast_to(outs[None], (C, n))
            low_rC = triton.load(low_ref.at[pl.ds(first, r), pl.ds(at, C)], mask=mine, other=0)
            B_Cn = triton.load(stack_ref.at[layer, pl.ds(at, C), pl.ds(column, n)], mask=there, other=0)
            return sums_rn + dot(low_rC, B_Cn.astype(low_rC.dtype))

        sums_rn = jax.lax.fori_loop(0, count_ref[0], add, jnp.zeros((r, n), jnp.float32))
        there = out_ref.at[pl.ds(first, r), pl.ds(column, n)]
        triton.store(there, sums_rn.astype(out_ref.dtype), mask=rows[:, None] & outs[None])

    result: jax.Array = triton_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((M, o), low_MK.dtype),
        grid=(pl.cdiv(o, n), pl.cdiv(M, r)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="adapter_update",
    )(low_MK, stack_LKo, *where)
    return result
