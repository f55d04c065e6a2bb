"""Grouped matmuls on GPUs: Pallas kernels through Triton, for any NVIDIA GPU from Ampere on.

XLA:GPU computes `jax.lax.ragged_dot` as a product of every row with every expert's matrix. tokamax's Triton kernel
(0.0.12) copies all matrices to transpose them, and launches a program for every block of rows and every expert. It also
starts a new row block at an expert without rows. JAX's kernels for Hopper do not support float32, int8 or adapters'
ranks.

Every program writes its own block and sums in a fixed order, so results are reproducible. Rows without an expert are
not written, so their contents are undefined.

Letters: M rows, E experts, i in, o out, b row blocks; r, n, k: sizes of a program's tile of rows, outputs and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tinkerflow.backend.compute.kernels.triton_calls import LEAST_SIDE, MULTIPROCESSORS, triton_call
from tinkerflow.backend.compute.weights.quantized import FourBit, numbers_of, scale_of

_MOST_ROWS, _MOST_OUT, _BYTES_IN = 128, 128, 128  # of a tile; _BYTES_IN: of one of its rows
_FEW_ROWS, _FEW_OUT = 64, 64  # of a tile, if reading the matrix takes longer than multiplying by it
_PROGRAMS = 2 * MULTIPROCESSORS


def product(
    x_Mi: jax.Array,
    weight: jax.Array | FourBit,
    sizes_E: jax.Array,
    layer: jax.Array | None = None,
    *,
    transposed: bool,
    interpret: bool = False,
) -> jax.Array:
    """Each row times its expert's matrix, or times the matrix's transpose: [M, o] in the dtype of x.

    x_Mi: rows sorted by expert. weight: [E, i, o], or [E, o, i] if transposed, of any dtype; int8 is converted tile by
    tile. A packed weight must satisfy `takes`, have a layer, and not be transposed. sizes_E: int32, rows of each
    expert. layer: int32 scalar if `weight` holds the matrices of all layers, [L, E, ...]; the matrices of this layer
    are read in place. interpret: run the kernel on a CPU, for tests.
    """
    (M, i), E = x_Mi.shape, sizes_E.shape[0]
    r = _rows(M, E)
    blocks = _blocks(sizes_E, r, pl.cdiv(M, r) + min(E, M))  # the most possible blocks
    if isinstance(weight, FourBit):
        assert layer is not None
        tile = r, side(weight.packed.shape[3], _MOST_OUT)
        return _packed_products(x_Mi, [weight], [layer], blocks, tile=tile, transposed=transposed, interpret=interpret)[
            0
        ]
    stack, layer = (weight[None], jnp.int32(0)) if layer is None else (weight, layer)
    o = stack.shape[2 if transposed else 3]
    n, k = side(o, _MOST_OUT), side(i, _BYTES_IN // x_Mi.dtype.itemsize)
    tiles = r, n, k
    return _products(
        x_Mi, [stack], [layer], blocks, tile=tiles, transposed=transposed, interpret=interpret, name="grouped_product"
    )[0]


def layer_products(
    x_Mi: jax.Array,
    stacks: Sequence[jax.Array | FourBit],
    layers: Sequence[jax.Array],
    last: LastStep | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Few rows times the transpose of each matrix, which is read in place from its stack: [M, o] in the dtype of x.

    XLA:GPU copies a matrix out of a stack before it multiplies by it, and for few rows this copy costs twice as much as
    the product. A kernel for each matrix would leave most of a GPU idle if the matrix is small.

    stacks: for each matrix, the matrices of all L layers, [L, o, i]. All have one dtype, or all are packed in blocks of
    one size and satisfy `takes`. L and o may differ. layers: for each matrix, an int32 scalar. last: adds to the sums
    before they are rounded. interpret: as in `product`.
    """
    M, i = x_Mi.shape
    outs = sum(jax.tree.leaves(stack)[0].shape[1] for stack in stacks)
    r = side(M, _FEW_ROWS)
    rows = pl.cdiv(M, r)
    n = side(pl.next_power_of_2(pl.cdiv(outs * rows, _PROGRAMS)), _FEW_OUT)
    k = side(i, 2 * _BYTES_IN // x_Mi.dtype.itemsize)
    start_b = jnp.arange(rows, dtype=jnp.int32) * r
    blocks = jnp.zeros(rows, jnp.int32), start_b, jnp.full(rows, M, jnp.int32)
    of_experts = [jax.tree.map(lambda part: part[:, None], stack) for stack in stacks]
    if isinstance(stacks[0], FourBit):
        return _packed_products(
            x_Mi, of_experts, layers, blocks, last, tile=(r, n), transposed=True, interpret=interpret
        )
    tile, name = (r, n, k), f"layer_product{last.suffix if last else ''}"
    return _products(x_Mi, of_experts, layers, blocks, last, tile=tile, transposed=True, interpret=interpret, name=name)


def _products(
    x_Mi: jax.Array,
    stacks: Sequence[jax.Array],
    layers: Sequence[jax.Array],
    blocks: tuple[jax.Array, jax.Array, jax.Array],
    last: LastStep | None = None,
    *,
    tile: tuple[int, int, int],
    transposed: bool,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, ...]:
    (M, i), (r, n, k) = x_Mi.shape, tile

    def add(refs: Sequence[Any], at: Tile, step: jax.Array, sums: jax.Array) -> jax.Array:
        (x_ref, stack_ref), first = refs, step * k
        ins = first + jnp.arange(k) < i
        x_rk = triton.load(x_ref.at[pl.ds(at.start, r), pl.ds(first, k)], mask=at.rows[:, None] & ins[None], other=0)
        here = (pl.ds(at.column, n), pl.ds(first, k)) if transposed else (pl.ds(first, k), pl.ds(at.column, n))
        mask = at.outs[:, None] & ins[None] if transposed else ins[:, None] & at.outs[None]
        matrix = triton.load(stack_ref.at[at.layer, at.expert, *here], mask=mask, other=0).astype(x_rk.dtype)
        return sums + dot(x_rk, matrix, trans_b=transposed)

    matrices = [
        _Matrix((stack,), layer, stack.shape[2 if transposed else 3])
        for stack, layer in zip(stacks, layers, strict=True)
    ]
    return _sum_tiles(add, (x_Mi,), matrices, blocks, M, (r, n), pl.cdiv(i, k), last, interpret=interpret, name=name)


class _Matrix(NamedTuple):
    """A matrix to multiply by. operands: its stack, and arrays like it. layer: its index in them. outs: o."""

    operands: tuple[jax.Array, ...]
    layer: jax.Array
    outs: int


class Tile(NamedTuple):
    """The tile of one program. start, column: its first row and output. rows, outs: masks of existing ones."""

    layer: jax.Array
    expert: jax.Array
    start: jax.Array
    column: jax.Array
    rows: jax.Array
    outs: jax.Array


class LastStep(NamedTuple):
    """Adds to the float32 sums of each tile before they are rounded. suffix: of the kernel's name.

    add(refs, number, tile, sums) returns the new sums. refs: to `operands`. number: the index of the tile's matrix.
    """

    suffix: str
    operands: tuple[jax.Array, ...]
    add: Callable[[Sequence[Any], int, Tile, jax.Array], jax.Array]


def _sum_tiles(
    add: Callable[[Sequence[Any], Tile, jax.Array, jax.Array], jax.Array],
    rows: tuple[jax.Array, ...],
    matrices: Sequence[_Matrix],
    blocks: tuple[jax.Array, jax.Array, jax.Array],
    M: int,
    tile: tuple[int, int],
    steps: int,
    last: LastStep | None,
    *,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, ...]:
    """Compute [M, o] for each matrix, with one program for each block of rows and each tile of a matrix's outputs.

    A program sums over steps of inputs. add(refs, tile, step, sums): returns the float32 sums with the step added.
    refs: to `rows`, and to the matrix's operands. blocks: see `_blocks`. tile: rows and outputs of one program. steps:
    the number of steps. last: the step after them.
    """
    (r, n), S, each = tile, len(matrices), len(matrices[0].operands)
    more = last.operands if last else ()
    tiles = [pl.cdiv(matrix.outs, n) for matrix in matrices]

    def kernel(*refs: Any) -> None:
        row_refs, operand_refs = refs[: len(rows)], refs[len(rows) : len(rows) + S * each]
        others = refs[len(rows) + S * each : -S]
        last_refs, (*layer_refs, expert_ref, start_ref, end_ref) = others[: len(more)], others[len(more) :]
        program, block, out_refs = pl.program_id(0), pl.program_id(1), refs[-S:]
        expert, start, end = expert_ref[block], start_ref[block], end_ref[block]

        def of(number: int, tile: jax.Array) -> None:
            there, column = start + jnp.arange(r) < end, tile * n
            outs = column + jnp.arange(n) < matrices[number].outs
            at = Tile(layer_refs[number][0], expert, start, column, there, outs)
            mine = (*row_refs, *operand_refs[number * each : (number + 1) * each])
            sums_rn = jax.lax.fori_loop(0, steps, partial(add, mine, at), jnp.zeros((r, n), jnp.float32))
            if last:
                sums_rn = last.add(last_refs, number, at, sums_rn)
            place = out_refs[number].at[pl.ds(start, r), pl.ds(column, n)]
            triton.store(place, sums_rn.astype(place.dtype), mask=there[:, None] & outs[None])

        pl.when(start < end)(partial(by_matrix, program, tiles, of))

    return tuple(
        triton_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct((M, matrix.outs), rows[0].dtype) for matrix in matrices],
            grid=(sum(tiles), blocks[0].shape[0]),
            compiler_params=triton.CompilerParams(num_warps=8 if r * n >= 128 * 64 else 4, num_stages=3),
            interpret=interpret,
            name=name,
        )(
            *rows,
            *(operand for matrix in matrices for operand in matrix.operands),
            *more,
            *(jnp.reshape(matrix.layer, 1) for matrix in matrices),
            *blocks,
        )
    )


def by_matrix(program: jax.Array, tiles: Sequence[int], of: Callable[[int, jax.Array], None]) -> None:
    """Inside a kernel for the tiles of several matrices: call of(index of the matrix, tile) for the program's tile.

    program: int32 scalar, the program's index among the tiles of all matrices. tiles: the number of tiles of each
    matrix.
    """
    if len(tiles) == 1:
        of(0, program)
        return
    start = 0
    for number, count in enumerate(tiles):
        tile = program - start
        pl.when((tile >= 0) & (tile < count))(partial(of, number, tile))
        start += count


def takes(weight: FourBit, *, of_experts: bool = False) -> bool:
    """Whether `product` and `layer_products` take the packed weight: a tile is one block, of 16, 32, 64, ... bytes."""
    axis = -2 if of_experts else -1
    half = weight.packed.shape[axis] // weight.scale.shape[axis]
    return half >= LEAST_SIDE and half == pl.next_power_of_2(half)


def _packed_products(
    x_Mi: jax.Array,
    weights: Sequence[FourBit],
    layers: Sequence[jax.Array],
    blocks: tuple[jax.Array, jax.Array, jax.Array],
    last: LastStep | None = None,
    *,
    tile: tuple[int, int],
    transposed: bool,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """`_products` with matrices of two numbers in a byte, decoded tile by tile to the same bits as by `dense`.

    The first numbers of all bytes are multiplied by the even columns of x, and the second numbers by the odd columns,
    so a tile is never interleaved. A step covers one block, in which each output has a scale.
    """
    (M, i), (r, n), table = x_Mi.shape, tile, weights[0].table
    steps = weights[0].scale.shape[3 if transposed else 2]
    half = i // 2 // steps

    def add(refs: Sequence[Any], at: Tile, step: jax.Array, sums: jax.Array) -> jax.Array:
        (even_ref, odd_ref, packed_ref, scale_ref), first = refs, step * half
        here = (pl.ds(at.column, n), pl.ds(first, half)) if transposed else (pl.ds(first, half), pl.ds(at.column, n))
        where = (pl.ds(at.column, n), step) if transposed else (step, pl.ds(at.column, n))
        mask = at.outs[:, None] if transposed else at.outs[None]
        bits = triton.load(packed_ref.at[at.layer, at.expert, *here], mask=mask, other=0).astype(jnp.int32)
        scale_n = scale_of(triton.load(scale_ref.at[at.layer, at.expert, *where], mask=at.outs, other=0))
        scale = scale_n[:, None] if transposed else scale_n[None]
        for x_ref, codes in ((even_ref, bits & 15), (odd_ref, bits >> 4)):
            x = triton.load(x_ref.at[pl.ds(at.start, r), pl.ds(first, half)], mask=at.rows[:, None], other=0)
            numbers = (numbers_of(codes, table) * scale).astype(x.dtype)
            sums = sums + dot(x, numbers, trans_b=transposed)
        return sums

    matrices = [
        _Matrix((weight.packed, weight.scale), layer, weight.packed.shape[2 if transposed else 3])
        for weight, layer in zip(weights, layers, strict=True)
    ]
    halves = x_Mi[:, ::2], x_Mi[:, 1::2]
    name = f"packed_product{last.suffix if last else ''}"
    return _sum_tiles(add, halves, matrices, blocks, M, tile, steps, last, interpret=interpret, name=name)


def outer(x_Mi: jax.Array, y_Mo: jax.Array, sizes_E: jax.Array, *, interpret: bool = False) -> jax.Array:
    """[E, i, o] float32: the sum over an expert's rows of their outer products; zeros for an expert without rows."""
    (M, i), o, E = x_Mi.shape, y_Mo.shape[1], sizes_E.shape[0]
    n_i, n_o = side(i, _MOST_OUT), side(o, _MOST_OUT)
    r = side(M, _BYTES_IN // x_Mi.dtype.itemsize)

    def kernel(x_ref: Any, y_ref: Any, start_ref: Any, end_ref: Any, out_ref: Any) -> None:
        row, column, expert = pl.program_id(0) * n_i, pl.program_id(1) * n_o, pl.program_id(2)
        start, end = start_ref[expert], end_ref[expert]
        ins, outs = row + jnp.arange(n_i) < i, column + jnp.arange(n_o) < o

        def add(step: jax.Array, sums: jax.Array) -> jax.Array:
            at = start + step * r
            rows = at + jnp.arange(r) < end
            x = triton.load(x_ref.at[pl.ds(at, r), pl.ds(row, n_i)], mask=rows[:, None] & ins[None], other=0)
            y = triton.load(y_ref.at[pl.ds(at, r), pl.ds(column, n_o)], mask=rows[:, None] & outs[None], other=0)
            return sums + dot(x, y, trans_a=True)

        sums = jax.lax.fori_loop(0, pl.cdiv(end - start, r), add, jnp.zeros((n_i, n_o), jnp.float32))
        there = out_ref.at[expert, pl.ds(row, n_i), pl.ds(column, n_o)]
        triton.store(there, sums, mask=ins[:, None] & outs[None])

    ends_E = jnp.cumsum(sizes_E)
    result: jax.Array = triton_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((E, i, o), jnp.float32),
        grid=(pl.cdiv(i, n_i), pl.cdiv(o, n_o), E),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="grouped_outer",
    )(x_Mi, y_Mo, ends_E - sizes_E, ends_E)
    return result


def _blocks(sizes_E: jax.Array, r: int, blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The expert, the first row, and the end of the expert's rows, for each block. Surplus blocks have no rows."""
    ends_E = jnp.cumsum(sizes_E)
    blocks_E = -(-sizes_E // r)
    last_E = jnp.cumsum(blocks_E)
    number_b = jnp.arange(blocks, dtype=jnp.int32)
    after_b = jnp.sum(number_b[:, None] >= last_E, axis=1, dtype=jnp.int32)
    expert_b = jnp.minimum(after_b, sizes_E.shape[0] - 1)
    within_b = number_b - (last_E - blocks_E)[expert_b]
    start_b = (ends_E - sizes_E)[expert_b] + within_b * r
    return expert_b, start_b, jnp.where(number_b < last_E[-1], ends_E[expert_b], 0)


def dot(a: jax.Array, b: jax.Array, **transposed: bool) -> jax.Array:
    """Inside a kernel: the product of two tiles, float32. transposed: trans_a, trans_b."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None  # else float32 would be TF32
    return triton.dot(a, b, precision=precision, **transposed)


def _rows(M: int, E: int) -> int:
    """Rows of a block: about as many as an expert gets on average."""
    return max(LEAST_SIDE, min(_MOST_ROWS, pl.next_power_of_2(max(1, M // E))))


def side(size: int, most: int) -> int:
    """The length of a tile along a dimension of `size`: a power of two, at most `most`."""
    return max(LEAST_SIDE, min(most, pl.next_power_of_2(size)))
