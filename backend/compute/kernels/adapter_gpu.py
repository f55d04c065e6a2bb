"""The updates of several adapters on a GPU, with stacks that are read in place: two Pallas kernels through Triton.

XLA:GPU copies each layer's A and B out of the stack of all layers before it multiplies by them. For few rows, this copy
moves three and a half times the bytes. These kernels read A and B in place, and only the blocks of columns that rows of
the batch use, so an idle adapter costs nothing. All rows are multiplied by all of these blocks, and other adapters'
columns are masked. A step takes only as long as reading the matrices. Every program writes its own block and sums in a
fixed order, so results are reproducible.

For few rows, launching a kernel takes as long as its work. Therefore the projections that share an input share both
kernels, and the second kernel also adds up the first kernel's partial sums.

Letters: B rows, T tokens of each, M = B * T, K columns of a stack, N blocks of C columns, P parts of the inputs,
S stacks. L layers, i in, o out; r, c, n, k: sizes of a program's tile of rows, columns, outputs and inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tinkerflow.backend.compute.kernels.grouped_gpu import LastStep, Tile, by_matrix, dot, side
from tinkerflow.backend.compute.kernels.matmul import OfLayer, in_one_kernel, matmuls
from tinkerflow.backend.compute.kernels.triton_calls import LEAST_SIDE, MULTIPROCESSORS, triton_call
from tinkerflow.backend.compute.mesh import Array
from tinkerflow.backend.compute.platforms import RANK_COLUMNS
from tinkerflow.backend.compute.weights.quantized import Weight

_ROWS, _OUTS, _BYTES_IN = 32, 128, 256  # maxima of a tile; _BYTES_IN: of one of its rows
_PARTS = 512  # maximum rows of partial sums that a program of `adapter_update` adds; every program reads all of them


class DevicePart(NamedTuple):
    """A device's part of matrices that several devices split. Every device has all of A and B.

    number: int32 scalar, of the device. devices: how many there are. of_inputs: the inputs are split, and the updates
    of all devices must be added. Otherwise, the outputs are split.
    """

    number: jax.Array
    devices: int
    of_inputs: bool


class UpdateInPlace(Protocol):
    """update(x_BTi, pairs, part), as in `in_place`."""

    def __call__(self, x: jax.Array, pairs: Sequence[OfLayer], part: DevicePart | None = None) -> Updates: ...


def in_place(columns_B2: Array, width: int, *, interpret: bool = False) -> UpdateInPlace:
    """The function update(x_BTi, pairs, part): for each pair, every row's update [B, T, o] in the dtype of x.

    columns_B2 int32: row b sees the columns [columns_B2[b, 0], columns_B2[b, 1]). width: K, a multiple of
    `RANK_COLUMNS`. interpret: run the kernels on a CPU, for tests.

    pairs (of `update`): at least one, of projections that share the input x, with stacks A [L, K, i] and B [L, K, o] of
    one dtype. L and o may differ. part: with it, x has only the device's inputs, or updates only its outputs.
    """
    C, N = RANK_COLUMNS, width // RANK_COLUMNS
    columns_B2 = jnp.asarray(columns_B2)
    first_B1, end_B1 = columns_B2[:, :1], columns_B2[:, 1:]
    start_N = jnp.arange(N, dtype=jnp.int32) * C
    seen_N = jnp.cumsum(jnp.any((first_B1 < start_N + C) & (end_B1 > start_N), axis=0), dtype=jnp.int32)
    block_N = jnp.sum(seen_N <= jnp.arange(N, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)  # seen blocks first
    tables = block_N, seen_N[-1:], columns_B2[:, 0], columns_B2[:, 1]  # here, so that no layer computes them again

    return partial(Updates, tables=tables, interpret=interpret)


class Updates(Sequence[jax.Array]):
    """Every row's update [B, T, o] for each pair. The products with A are computed at once.

    If one kernel computes the base model's products, `last_step` multiplies by B in that kernel. Otherwise, another
    kernel computes all updates when the first of them is read.
    """

    def __init__(
        self,
        x_BTi: jax.Array,
        pairs: Sequence[OfLayer],
        part: DevicePart | None = None,
        *,
        tables: tuple[jax.Array, ...],
        interpret: bool,
    ) -> None:
        """x_BTi, pairs, part, interpret: see `in_place`.

        tables: int32, the indices of the seen blocks, [N]; their number, [1]; the first and the end column of each row,
        [B].
        """
        self._shape, self._dtype, self._interpret = x_BTi.shape[:2], x_BTi.dtype, interpret
        self._stacks = [pair.stack.B for pair in pairs]
        layers = tuple(jnp.reshape(pair.layer, 1) for pair in pairs)
        outs = [stack.shape[2] for stack in self._stacks]
        of_inputs, of_outputs = list[jax.Array](), list[jax.Array]()
        if part is not None and part.of_inputs:
            of_inputs = [jnp.reshape(part.number, 1)]
        elif part is not None:
            of_outputs, outs = [jnp.reshape(part.number, 1)], [o // part.devices for o in outs]
        self._outs, self._where = outs, (*layers, *tables, *of_outputs)
        stacks = [pair.stack.A for pair in pairs]
        where = *layers, *tables[:2], *of_inputs
        self._low_PMK = _low(x_BTi.reshape(-1, x_BTi.shape[-1]), stacks, where, interpret)

    def __len__(self) -> int:
        return len(self._stacks)

    def __getitem__(self, number: Any) -> Any:
        return self._each[number]

    @cached_property
    def _each(self) -> tuple[jax.Array, ...]:
        given = self._low_PMK, self._stacks, self._outs, self._where
        return tuple(
            update_Mo.reshape(*self._shape, -1)
            for update_Mo in _update(*given, self._shape[1], self._dtype, self._interpret)
        )

    def last_step(self) -> LastStep:
        """Adds all updates to the products of the base model's matrices with x, in the order of the pairs."""
        operands = self._low_PMK, *self._stacks, *self._where
        add = partial(_add_columns, self._low_PMK.shape, self._outs, self._shape[1], self._dtype)
        return LastStep("_adapted", operands, add)


def _low(x_Mi: jax.Array, stacks: Sequence[Array], where: tuple[jax.Array, ...], interpret: bool) -> jax.Array:
    """x times the transpose of one layer's A of every stack: partial sums, float32 [P, M, S * K].

    Blocks that no row uses are not written. where: int32, the layer's index in each stack, [1]; the indices of the seen
    blocks, [N]; the number of seen blocks, [1]; the number of the device's part of the inputs, [1], if they are split.
    """
    (M, i), S, K, C, c = x_Mi.shape, len(stacks), stacks[0].shape[1], RANK_COLUMNS, LEAST_SIDE
    r, k = side(M, _ROWS), side(i, _BYTES_IN // x_Mi.dtype.itemsize)
    steps, rows = pl.cdiv(i, k), pl.cdiv(M, r)
    each = pl.cdiv(steps, min(_PARTS // r, pl.cdiv(MULTIPROCESSORS, S * C // c * rows), steps))
    parts = pl.cdiv(steps, each)

    def kernel(x_ref: Any, *refs: Any) -> None:
        stack_refs, layer_refs, (block_ref, count_ref, *index_ref, out_ref) = refs[:S], refs[S : 2 * S], refs[2 * S :]
        part, first = pl.program_id(1), pl.program_id(2) * r
        before = index_ref[0][0] * i if index_ref else 0

        def of(number: int, tile: jax.Array) -> None:
            @pl.when(tile // (C // c) < count_ref[0])
            def _() -> None:
                layer, column = layer_refs[number][0], block_ref[tile // (C // c)] * C + tile % (C // c) * c
                there = first + jnp.arange(r) < M

                def add(step: jax.Array, sums_rc: jax.Array) -> jax.Array:
                    at = step * k
                    ins = at + jnp.arange(k) < i
                    mask = there[:, None] & ins[None]
                    x_rk = triton.load(x_ref.at[pl.ds(first, r), pl.ds(at, k)], mask=mask, other=0)
                    A_ref = stack_refs[number].at[layer, pl.ds(column, c), pl.ds(before + at, k)]
                    A_ck = triton.load(A_ref, mask=jnp.broadcast_to(ins[None], (c, k)), other=0)
                    return sums_rc + dot(x_rk, A_ck.astype(x_rk.dtype), trans_b=True)

                last = jnp.minimum((part + 1) * each, steps)
                sums_rc = jax.lax.fori_loop(part * each, last, add, jnp.zeros((r, c), jnp.float32))
                own = out_ref.at[part, pl.ds(first, r), pl.ds(number * K + column, c)]
                triton.store(own, sums_rc, mask=jnp.broadcast_to(there[:, None], (r, c)))

        by_matrix(pl.program_id(0), [K // c] * S, of)

    result: jax.Array = triton_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((parts, M, S * K), jnp.float32),
        grid=(S * K // c, parts, rows),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="adapter_low",
    )(x_Mi, *stacks, *where)
    return result


def _update(
    low_PMK: jax.Array,
    stacks: Sequence[Array],
    outs: Sequence[int],
    where: tuple[jax.Array, ...],
    T: int,
    dtype: Any,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The sum of low's parts times one layer's B of every stack, [M, o] in `dtype`, over the seen blocks.

    low_PMK: the result of `_low`. outs: the outputs of each. where: as in `_low`, then the first and the end column of
    each row, [B], and the number of the device's part of the outputs, [1], if they are split. T: as in the module.
    """
    M, S = low_PMK.shape[1], len(stacks)
    r = side(M, _ROWS)
    rows = pl.cdiv(M, r)
    n = side(pl.cdiv(sum(outs) * rows, MULTIPROCESSORS), _OUTS)
    tiles = [pl.cdiv(o, n) for o in outs]

    def kernel(*refs: Any) -> None:
        first, out_refs = pl.program_id(1) * r, refs[-S:]
        there = first + jnp.arange(r) < M

        def of(number: int, tile: jax.Array) -> None:
            column = tile * n
            inside = column + jnp.arange(n) < outs[number]
            at = Tile(jnp.int32(0), jnp.int32(0), first, column, there, inside)
            zeros_rn = jnp.zeros((r, n), jnp.float32)
            sums_rn = _add_columns(low_PMK.shape, outs, T, dtype, refs[:-S], number, at, zeros_rn)
            place = out_refs[number].at[pl.ds(first, r), pl.ds(column, n)]
            triton.store(place, sums_rn.astype(dtype), mask=there[:, None] & inside[None])

        by_matrix(pl.program_id(0), tiles, of)

    result = triton_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((M, o), dtype) for o in outs],
        grid=(sum(tiles), rows),
        # All parts of a program's sums fit its registers. With more stages, they would take shared memory.
        compiler_params=triton.CompilerParams(num_warps=8 if r * n >= 32 * 64 else 4, num_stages=1),
        interpret=interpret,
        name="adapter_update",
    )(low_PMK, *stacks, *where)
    return tuple(result)


def _add_columns(
    low: tuple[int, ...],
    outs: Sequence[int],
    T: int,
    dtype: Any,
    refs: Sequence[Any],
    number: int,
    at: Tile,
    sums_rn: jax.Array,
) -> jax.Array:
    """Inside a kernel: a tile's sums, plus low's parts times one layer's B of a stack, over the seen blocks.

    low: the shape of low_PMK. outs, T: as in `_update`. dtype: the factors' dtype. refs: to low_PMK, the stacks, and
    `where` as in `_update`. number: the index of the stack. at: the tile.
    """
    (P, _, SK), C, (r, n), S = low, RANK_COLUMNS, sums_rn.shape, len(outs)
    low_ref, *others = refs
    stack_ref, layer_ref, (block_ref, count_ref, first_ref, end_ref, *index_ref) = (
        others[number],
        others[S + number],
        others[2 * S :],
    )
    before = index_ref[0][0] * outs[number] if index_ref else 0
    row_r, layer = at.start + jnp.arange(r), layer_ref[0]
    begin_r, end_r = (triton.load(ref.at[row_r // T], mask=at.rows, other=0) for ref in (first_ref, end_ref))

    def add(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, sums_rn = state
        column = block_ref[count_ref[0] - left] * C
        column_C, mask = column + jnp.arange(C), jnp.broadcast_to(at.rows[:, None], (r, C))
        low_rC = jnp.zeros((r, C), jnp.float32)
        for part in range(P):
            part_ref = low_ref.at[jnp.int32(part), pl.ds(at.start, r), pl.ds(number * (SK // S) + column, C)]
            low_rC = low_rC + triton.load(part_ref, mask=mask, other=0)
        # Select, because an overflow in the columns of another row's adapter, times 0, would be NaN.
        own = (column_C[None] >= begin_r[:, None]) & (column_C[None] < end_r[:, None])
        low_rC = jnp.where(own, low_rC, 0).astype(dtype)
        B_ref = stack_ref.at[layer, pl.ds(column, C), pl.ds(before + at.column, n)]
        B_Cn = triton.load(B_ref, mask=jnp.broadcast_to(at.outs[None], (C, n)), other=0)
        return left - 1, sums_rn + dot(low_rC, B_Cn.astype(dtype))

    # Triton loads the operands of counted loops ahead, into shared memory, for which the parts are too large.
    return jax.lax.while_loop(lambda state: state[0] > 0, add, (count_ref[0], sums_rn))[1]


def adapted_products(x: jax.Array, weights: Sequence[Weight | OfLayer], updates: Updates) -> tuple[jax.Array, ...]:
    """`matmuls` of x with the weights, each plus its update. If possible, one kernel computes all of the sums."""
    if in_one_kernel(x, *weights):
        return matmuls(x, *weights, last=updates.last_step())
    return tuple(y + update for y, update in zip(matmuls(x, *weights), updates, strict=True))
