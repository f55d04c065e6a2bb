"""The kernels of `tree` for NVIDIA GPUs: Pallas through Triton, in the structure of JAX's own attention kernels.

A program of `forward` takes a block of queries of a head, and loops over the blocks of keys that the queries see. The
backward pass has a kernel of the same kind for dQ. In its other kernel, a program takes a block of keys, and loops over
the queries of all their heads, so dK and dV need no memory for each query head.

Letters: as in `tree`. r = H / G.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tinkerflow.backend.compute.kernels.tree import How, Kernels, TreeRows, listed, sees
from tinkerflow.backend.compute.kernels.triton_calls import triton_call
from tinkerflow.backend.compute.platforms import platform

# Tokens of a block. To fit in shared memory, blocks in float32 have half as many, and so have blocks of large heads on
# GPUs with little of it.
_QUERIES, _KEYS, _BACKWARD = 128, 64, 64
_LARGE = 128  # the largest dimension of other heads
_WARPS = 8
_STAGES = 2


def _forward(
    how: How, q: jax.Array, k: jax.Array, v: jax.Array, tree: TreeRows, sinks_H: jax.Array
) -> tuple[jax.Array, jax.Array]:
    B, T, H, d = q.shape
    r, n, m = H // k.shape[2], _block(_QUERIES, q), _block(_KEYS, q)

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, *tree_refs, sinks_ref, places_ref, count_ref, o_ref, log_total_ref = refs
        block, q_nd, sink = pl.program_id(0), q_ref[...], sinks_ref[pl.program_id(2)]

        def add(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            o_nd, top_n, total_n = sums
            first = places_ref[step] * m
            keys = pl.ds(first, m)
            scores_nm = _scores(how, q_nd, k_ref[keys], tree_refs, block * n, first)
            higher_n = jnp.maximum(top_n, jnp.max(scores_nm, axis=1))
            weights_nm, less_n = jnp.exp2(scores_nm - higher_n[:, None]), jnp.exp2(top_n - higher_n)
            o_nd = o_nd * less_n[:, None] + triton.dot(weights_nm.astype(v_ref.dtype), v_ref[keys])
            return o_nd, higher_n, total_n * less_n + jnp.sum(weights_nm, axis=1)

        top_n, zeros_n = jnp.full(n, sink), jnp.zeros(n, jnp.float32)
        total_n = jnp.where(top_n > -jnp.inf, zeros_n + 1, zeros_n)
        sums = (jnp.zeros((n, d), jnp.float32), top_n, total_n)
        o_nd, top_n, total_n = jax.lax.fori_loop(0, count_ref[block], add, sums)
        o_ref[...] = (o_nd / total_n[:, None]).astype(o_ref.dtype)
        log_total_ref[...] = top_n + jnp.log2(total_n)

    queries = pl.BlockSpec((None, n, None, d), lambda i, b, h: (b, i, h, 0))
    keys = pl.BlockSpec((None, T, None, d), lambda i, b, h: (b, 0, h // r, 0))
    row = pl.BlockSpec((None, T), lambda i, b, h: (b, 0))
    o, log_totals = triton_call(
        kernel,
        grid=(T // n, B, H),
        in_specs=[
            *(queries, keys, keys, row, row, pl.BlockSpec((H,), lambda i, b, h: (0,))),
            pl.BlockSpec((None, None, T // m), lambda i, b, h: (b, i, 0)),
            pl.BlockSpec((None, T // n), lambda i, b, h: (b, 0)),
        ],
        out_shape=[jax.ShapeDtypeStruct(q.shape, v.dtype), jax.ShapeDtypeStruct((B, H, T), jnp.float32)],
        out_specs=[queries, pl.BlockSpec((None, None, n), lambda i, b, h: (b, h, i))],
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=how.interpret,
        name="tree_attention_forward",
    )(q, k, v, *tree, sinks_H, *listed(how.seen_blocks(tree, n, m)))
    return o, log_totals


def _slopes(
    how: How,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tree: TreeRows,
    d_o: jax.Array,
    log_totals: jax.Array,
    means: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    B, T, H, d = q.shape
    G, n = k.shape[2], _block(_BACKWARD, q)
    r, seen = H // G, how.seen_blocks(tree, n, n)

    def queries_kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, *tree_refs, d_o_ref, log_total_ref, mean_ref, places_ref, count_ref, d_q_ref = refs
        block = pl.program_id(2)
        q_nd, d_o_nd, log_total_n, mean_n = q_ref[...], d_o_ref[...], log_total_ref[...], mean_ref[...]

        def add(step: jax.Array, d_q_nd: jax.Array) -> jax.Array:
            first = places_ref[step] * n
            keys = pl.ds(first, n)
            k_md = k_ref[keys]
            scores_nm = _scores(how, q_nd, k_md, tree_refs, block * n, first)
            weights_nm = jnp.exp2(scores_nm - log_total_n[:, None])
            d_scores_nm = weights_nm * (triton.dot(d_o_nd, v_ref[keys].T) - mean_n[:, None])
            return d_q_nd + triton.dot(d_scores_nm.astype(k_md.dtype), k_md)

        d_q_nd = jax.lax.fori_loop(0, count_ref[block], add, jnp.zeros((n, d), jnp.float32))
        d_q_ref[...] = (d_q_nd * how.scale).astype(d_q_ref.dtype)

    def keys_kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, *tree_refs, d_o_ref, log_total_ref, mean_ref, places_ref, count_ref, d_k_ref, d_v_ref = (
            refs
        )
        block, k_md, v_md = pl.program_id(2), k_ref[...], v_ref[...]

        def of_head(head: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            def add(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                d_k_md, d_v_md = sums
                first = places_ref[step] * n
                queries = pl.ds(first, n)
                q_nd, d_o_nd = q_ref[queries, head], d_o_ref[queries, head]
                scores_nm = _scores(how, q_nd, k_md, tree_refs, first, block * n)
                weights_nm = jnp.exp2(scores_nm - log_total_ref[head, queries][:, None])
                d_scores_nm = weights_nm * (triton.dot(d_o_nd, v_md.T) - mean_ref[head, queries][:, None])
                d_k_md += triton.dot(d_scores_nm.astype(q_nd.dtype).T, q_nd)
                return d_k_md, d_v_md + triton.dot(weights_nm.astype(d_o_nd.dtype).T, d_o_nd)

            return jax.lax.fori_loop(0, count_ref[block], add, sums)

        zeros_md = jnp.zeros((n, d), jnp.float32)
        d_k_md, d_v_md = jax.lax.fori_loop(0, r, of_head, (zeros_md, zeros_md))
        for ref, found in ((d_k_ref, d_k_md * how.scale), (d_v_ref, d_v_md)):
            ref[...] = found.astype(ref.dtype)

    # A program is (b, h, i). In the second kernel h is a key-value head, and `heads` are its query heads.
    one = pl.BlockSpec((None, n, None, d), lambda b, h, i: (b, i, h, 0))
    keys = pl.BlockSpec((None, T, None, d), lambda b, h, i: (b, 0, h // r, 0))
    heads = pl.BlockSpec((None, T, r, d), lambda b, h, i: (b, 0, h, 0))
    numbers = pl.BlockSpec((None, None, n), lambda b, h, i: (b, h, i))
    numbers_of_heads = pl.BlockSpec((None, r, T), lambda b, h, i: (b, h, 0))
    row = pl.BlockSpec((None, T), lambda b, h, i: (b, 0))
    lists = (
        pl.BlockSpec((None, None, T // n), lambda b, h, i: (b, i, 0)),
        pl.BlockSpec((None, T // n), lambda b, h, i: (b, 0)),
    )
    how_compiled: Any = {
        "compiler_params": triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        "interpret": how.interpret,
    }
    given = (q, k, v, *tree, d_o, log_totals, means)
    d_q = triton_call(
        queries_kernel,
        grid=(B, H, T // n),
        in_specs=[one, keys, keys, row, row, one, numbers, numbers, *lists],
        out_shape=q,
        out_specs=one,
        name="tree_attention_dq",
        **how_compiled,
    )(*given, *listed(seen))
    d_k, d_v = triton_call(
        keys_kernel,
        grid=(B, G, T // n),
        in_specs=[heads, one, one, row, row, heads, numbers_of_heads, numbers_of_heads, *lists],
        out_shape=[k, v],
        out_specs=[one, one],
        name="tree_attention_dkv",
        **how_compiled,
    )(*given, *listed(jnp.swapaxes(seen, 1, 2)))
    return d_q, d_k, d_v


KERNELS = Kernels(_forward, _slopes)


def _scores(how: How, q_nd: jax.Array, k_md: jax.Array, tree_refs: Any, first_query: Any, first_key: Any) -> jax.Array:
    """The scores of two blocks, [n, m]. tree_refs: the row of `TreeRows`. first_query, first_key: their places."""
    (ends_ref, positions_ref), n, m = tree_refs, len(q_nd), len(k_md)
    queries, keys = pl.ds(first_query, n), pl.ds(first_key, m)
    seen_nm = sees(
        how.window,
        (first_query + jnp.arange(n))[:, None],
        (first_key + jnp.arange(m))[None],
        ends_ref[keys][None],
        positions_ref[queries][:, None],
        positions_ref[keys][None],
    )
    return how.scores(triton.dot(q_nd, k_md.T), seen_nm)


def _block(most: int, q_BTHd: jax.Array) -> int:
    """The tokens of a block: at most `most` for two-byte numbers."""
    if q_BTHd.shape[-1] > _LARGE and platform().little_shared_memory:
        most //= 2
    return math.gcd(2 * most // q_BTHd.dtype.itemsize, q_BTHd.shape[1])
