"""The softmax over the vocabulary on GPUs, without logits in memory: two Pallas kernels through Triton.

XLA:GPU writes logits in float32, and reads them again for the maximum, the sum and the gradient. `totals` multiplies by
the unembedding tile by tile, and writes only the weights that the gradient needs, in the dtype of the activations.
`slopes` turns the weights in place into the gradient with respect to the logits, and multiplies it by both matrices of
a low-rank adapter while it is on the chip. XLA computes the large products with the gradient. Every program writes its
own block and sums in a fixed order, so results are reproducible.

Letters: M rows, D hidden, V vocabulary, K targets, R rank, N tiles of the vocabulary, G groups of tiles, P blocks of
rows. r, n, k: sizes of a program's tile of rows, tokens of the vocabulary and inputs; j of ranks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tinkerflow.backend.compute.kernels.grouped_gpu import dot, side
from tinkerflow.backend.compute.kernels.softmax import Product, Slopes, Totals
from tinkerflow.backend.compute.kernels.triton_calls import triton_call

_ROWS, _COLUMNS, _BYTES_IN = 256, 128, 128  # of a tile; _BYTES_IN: of one of its rows; half the rows in float32
_GROUP = 16  # tiles of the vocabulary that a program of `slopes` loops over
# The largest rank that `slopes` multiplies by, half of it in float32. Larger tiles would not fit in an L4's shared
# memory.
_MOST_RANK = 64


def totals(given: Product, *, keep: bool) -> Totals:
    """The totals of each tile of the vocabulary. keep: return the weights, too."""
    x_MD, head_VD, targets_MK, cap = given.x_MD, given.head_VD, given.targets_MK, given.cap
    (M, D), V, K = x_MD.shape, head_VD.shape[0], targets_MK.shape[1]
    r, n, k = _rows(x_MD), _COLUMNS, side(D, _BYTES_IN // x_MD.dtype.itemsize)
    N = pl.cdiv(V, n)
    adapter = () if given.low_MR is None else (given.low_MR, given.B_RV)
    in_turns = given.low_MR is not None and given.low_MR.shape[1] > _MOST_RANK

    def kernel(x_ref: Any, head_ref: Any, target_ref: Any, *refs: Any) -> None:
        adapter_refs, (largest_ref, total_ref, picked_ref, *kept) = refs[: len(adapter)], refs[len(adapter) :]
        first, tile = pl.program_id(0) * r, pl.program_id(1)
        rows, columns = first + jnp.arange(r) < M, tile * n + jnp.arange(n) < V

        def add(step: jax.Array, sums_rn: jax.Array) -> jax.Array:
            at = step * k
            ins = at + jnp.arange(k) < D
            x_rk = triton.load(x_ref.at[pl.ds(first, r), pl.ds(at, k)], mask=rows[:, None] & ins[None], other=0)
            there = columns[:, None] & ins[None]
            head_nk = triton.load(head_ref.at[pl.ds(tile * n, n), pl.ds(at, k)], mask=there, other=0)
            return sums_rn + dot(x_rk, head_nk, trans_b=True)

        logits_rn = jax.lax.fori_loop(0, pl.cdiv(D, k), add, jnp.zeros((r, n), jnp.float32))
        if adapter_refs:
            R = adapter_refs[0].shape[1]
            j = side(R, _MOST_RANK)

            def add_update(step: jax.Array, sums_rn: jax.Array) -> jax.Array:
                return sums_rn + dot(*_adapter(adapter_refs, (first, rows), (tile * n, columns), step * j, j))

            logits_rn = jax.lax.fori_loop(0, pl.cdiv(R, j), add_update, logits_rn)
        if cap:
            logits_rn = cap * jnp.tanh(logits_rn / cap)
        logits_rn = jnp.where(columns[None], logits_rn, -jnp.inf)

        @pl.loop(0, K)
        def _(place: jax.Array) -> None:
            target_r = triton.load(target_ref.at[pl.ds(first, r), place], mask=rows, other=-1) - tile * n
            picked_r = jnp.sum(jnp.where(jnp.arange(n)[None] == target_r[:, None], logits_rn, 0), axis=1)
            mine = rows & (target_r >= 0) & (target_r < n)
            triton.store(picked_ref.at[pl.ds(first, r), place], picked_r, mask=mine)

        largest_r = jnp.max(logits_rn, axis=1)
        weights_rn = jnp.exp(logits_rn - largest_r[:, None])
        triton.store(largest_ref.at[tile, pl.ds(first, r)], largest_r, mask=rows)
        triton.store(total_ref.at[tile, pl.ds(first, r)], jnp.sum(weights_rn, axis=1), mask=rows)
        for weights_ref in kept:
            there = weights_ref.at[pl.ds(first, r), pl.ds(tile * n, n)]
            triton.store(there, weights_rn.astype(weights_ref.dtype), mask=rows[:, None] & columns[None])

    shapes = [(N, M), (N, M), (M, K)]
    found = triton_call(
        kernel,
        out_shape=[
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
            *([jax.ShapeDtypeStruct((M, V), x_MD.dtype)] if keep else []),
        ],
        grid=(pl.cdiv(M, r), N),  # adjacent programs multiply by the same rows of the unembedding
        # If the ranks need a separate loop, a third stage would not fit in an L4's shared memory.
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=2 if in_turns else 3),
        interpret=given.interpret,
        name="softmax_totals",
    )(x_MD, head_VD, targets_MK, *adapter)
    return Totals(*found)


def slopes(given: Product, totals: Totals, largest_M: jax.Array, log_total_M: jax.Array, slope_MK: jax.Array) -> Slopes:
    """The gradient with respect to the logits. A target named twice counts twice.

    All float32. given: the product. totals: with weights. largest_M: the largest of a row's logits. log_total_M: the
    log of the sum of exp(logit - largest). slope_MK: the gradient with respect to each target's logprob.
    """
    weights_MV, targets_MK, cap = totals.weights_MV, given.targets_MK, given.cap
    assert weights_MV is not None
    (M, V), K, n = weights_MV.shape, targets_MK.shape[1], _COLUMNS
    N, r = pl.cdiv(V, n), _rows(weights_MV)
    P, G = pl.cdiv(M, r), pl.cdiv(N, _GROUP)
    most = 2 * _MOST_RANK // weights_MV.dtype.itemsize
    R = 0 if given.low_MR is None or given.low_MR.shape[1] > most else given.low_MR.shape[1]
    j = side(R, _MOST_RANK)

    def kernel(weights_ref: Any, factor_ref: Any, target_ref: Any, slope_ref: Any, *refs: Any) -> None:
        largest, (d_ref, *adapter_out) = refs[: bool(cap)], refs[bool(cap) + 2 * bool(R) :]
        block, group = pl.program_id(0), pl.program_id(1)
        first, ranks = block * r, jnp.arange(j) < R
        rows = first + jnp.arange(r) < M

        def turn(tile: jax.Array, d_low_rj: jax.Array) -> jax.Array:
            columns = tile * n + jnp.arange(n) < V
            there, mask = (pl.ds(first, r), pl.ds(tile * n, n)), rows[:, None] & columns[None]
            weights_rn = triton.load(weights_ref.at[there], mask=mask, other=0).astype(jnp.float32)
            factor_r = triton.load(factor_ref.at[tile, pl.ds(first, r)], mask=rows, other=0)

            def at_target(place: jax.Array, d_rn: jax.Array) -> jax.Array:
                target_r = triton.load(target_ref.at[pl.ds(first, r), place], mask=rows, other=-1) - tile * n
                slope_r = triton.load(slope_ref.at[pl.ds(first, r), place], mask=rows, other=0)
                return d_rn + jnp.where(jnp.arange(n)[None] == target_r[:, None], slope_r[:, None], 0)

            d_rn = jax.lax.fori_loop(0, K, at_target, weights_rn * factor_r[:, None])
            for largest_ref in largest:
                largest_r = triton.load(largest_ref.at[tile, pl.ds(first, r)], mask=rows, other=0)
                logits_rn = largest_r[:, None] + jnp.log(jnp.maximum(weights_rn, 1e-37))
                d_rn *= 1 - (logits_rn / cap) ** 2
            d_rn = d_rn.astype(d_ref.dtype)
            triton.store(d_ref.at[there], d_rn, mask=mask)
            if not R:
                return d_low_rj
            low_rj, B_jn = _adapter(refs[bool(cap) :][:2], (first, rows), (tile * n, columns), 0, j)
            d_B_jn, mine = dot(low_rj, d_rn, trans_a=True), ranks[:, None] & columns[None]
            triton.store(adapter_out[1].at[block, pl.ds(0, j), pl.ds(tile * n, n)], d_B_jn, mask=mine)
            return d_low_rj + dot(d_rn, B_jn, trans_b=True)

        tiles = group * _GROUP, jnp.minimum((group + 1) * _GROUP, N)
        d_low_rj = jax.lax.fori_loop(*tiles, turn, jnp.zeros((r, j), jnp.float32))
        if R:
            mine = rows[:, None] & ranks[None]
            triton.store(adapter_out[0].at[group, pl.ds(first, r), pl.ds(0, j)], d_low_rj, mask=mine)

    factor_NM = -jnp.sum(slope_MK, axis=1) * jnp.exp(totals.largest_NM - largest_M - log_total_M)
    d_MV, *parts = triton_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((M, V), weights_MV.dtype),
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ([(G, M, R), (P, R, V)] if R else [])),
        ],
        grid=(P, G),
        input_output_aliases={0: 0},
        # A second stage of an adapter's tiles would not fit: rank 64 on an H100, rank 32 on an A100, rank 8 on an L4.
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1 if R else 2),
        interpret=given.interpret,
        name="softmax_slopes_by_adapter" if R else "softmax_slopes",
    )(
        weights_MV,
        factor_NM,
        targets_MK,
        slope_MK,
        *((totals.largest_NM,) if cap else ()),
        *((given.low_MR, given.B_RV) if R else ()),
    )
    return Slopes(d_MV, *(jnp.sum(part, axis=0) for part in parts))


def _adapter(
    refs: tuple[Any, ...], rows: tuple[Any, Any], columns: tuple[Any, Any], at: Any, j: int
) -> tuple[jax.Array, jax.Array]:
    """Inside a kernel: tiles [r, j] of low_MR and [j, n] of B_RV, in the dtype of low.

    refs: both arrays. rows, columns: the tile's first row and column, and the masks of existing ones. at: the first
    rank. j: the number of ranks.
    """
    (low_ref, B_ref), (first, mine), (column, there) = refs, rows, columns
    r, n, ranks = mine.shape[0], there.shape[0], at + jnp.arange(j) < low_ref.shape[1]
    low_rj = triton.load(low_ref.at[pl.ds(first, r), pl.ds(at, j)], mask=mine[:, None] & ranks[None], other=0)
    B_jn = triton.load(B_ref.at[pl.ds(at, j), pl.ds(column, n)], mask=ranks[:, None] & there[None], other=0)
    return low_rj, B_jn.astype(low_rj.dtype)


def _rows(x_MK: jax.Array) -> int:
    return side(x_MK.shape[0], 2 * _ROWS // x_MK.dtype.itemsize)
