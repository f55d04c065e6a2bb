"""Attention of a packed training batch: causal, and only within an example.

Examples with a common prefix share its tokens, and form a tree in their row (`training.packing`). A token sees the
tokens that are at or before its own place and whose subtrees have not ended.

One block of queries is computed at a time, so that scores stay in the caches. The forward pass keeps one number for
each query, the logarithm of its softmax's denominator. The backward pass computes the scores again, as in
FlashAttention (arXiv 2205.14135, section 3.1 and appendix B.4), because the scores would be the largest arrays of
training. JAX's own derivative of the same forward pass took 1.2 times the CPU time at 128 tokens and 1.6 times at 512.

NVIDIA GPUs and TPUs use the kernels of `flash`. cuDNN's attention is not used, because it supports no trees, and
because the memory of its backward pass for rows of many examples is unknown until a device plans it.

A row that is split over devices comes in pieces. Each piece is a row of the arrays (`kernels.whole_rows`).

Letters: B rows, T queries, S keys, H query heads, G key-value heads, d head dimension. m is H / G times the queries of
a block, because the query heads of a key-value head are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from tinkerflow.backend.compute.kernels.flash import by_device, flash_attention
from tinkerflow.backend.compute.kernels.tree import sees
from tinkerflow.backend.compute.models.layers.step import AttentionFn

_BLOCK = 256  # queries that are scored together
_MOST_BLOCKS = 8
_SCORE_BYTES = 12  # weights and their slopes, float32, and both again in the dtype of a product's inputs
_UNSEEN = np.finfo(np.float32).min

Rows = tuple[jax.Array, jax.Array | None]  # ends_BT, and positions_BT if windows count positions and not columns
Residuals = tuple[jax.Array, jax.Array, jax.Array, Rows, jax.Array, tuple[jax.Array, ...], jax.Array | None]


def attend_trees(
    ends_BT: jax.Array,
    mesh: Mesh,
    positions_BT: jax.Array | None = None,
    *,
    save_memory: bool = False,
    pieces: int = 1,
) -> AttentionFn:
    """The `AttentionFn` in which a token sees itself and the tokens before it in its examples.

    ends_BT: see `MicroBatch`. mesh: rows and heads are split over it. positions_BT: the tokens' positions in their
    examples; given if examples share tokens, and kernels or windows depend on positions (`needs_tree_program`).
    save_memory: see `flash_attention`. pieces: the pieces of a row; see `flash.by_device`. This module computes the
    rows that no kernel of `flash` supports, and all rows on CPUs.
    """

    def attend(
        q_BTHd: jax.Array,
        k_BTGd: jax.Array | None,
        v_BTGd: jax.Array | None,
        *,
        window: int | None = None,
        sinks_H: jax.Array | None = None,
    ) -> jax.Array:
        assert k_BTGd is not None and v_BTGd is not None
        T, d = pieces * ends_BT.shape[1], q_BTHd.shape[-1]
        trees = () if positions_BT is None else (positions_BT,)
        how = partial(flash_attention, head_dim=d, save_memory=save_memory, tree=bool(trees), pieces=pieces)
        kernel = how(mesh, T, window)
        if kernel is not None:
            return kernel(q_BTHd, k_BTGd, v_BTGd, ends_BT, sinks_H, *trees)
        if pieces > 1:
            own = partial(_attend_row, window)
            return by_device(mesh, pieces, own, q_BTHd, k_BTGd, v_BTGd, ends_BT, sinks_H, *trees)
        return _attend(window, q_BTHd, k_BTGd, v_BTGd, (ends_BT, positions_BT), sinks_H)

    return attend


def _attend_row(
    window: int | None,
    q_BTHd: jax.Array,
    k_BTGd: jax.Array,
    v_BTGd: jax.Array,
    ends_BT: jax.Array,
    sinks_H: jax.Array | None,
    positions_BT: jax.Array | None = None,
) -> jax.Array:
    return _attend(window, q_BTHd, k_BTGd, v_BTGd, (ends_BT, positions_BT), sinks_H)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    window: int | None,
    q_BTHd: jax.Array,
    k_BTGd: jax.Array,
    v_BTGd: jax.Array,
    rows: Rows,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """softmax(q k / sqrt(d)) v over the keys seen; softmax in float32, result in the dtype of v."""
    return _forward(window, q_BTHd, k_BTGd, v_BTGd, rows, sinks_H)[0]


def _forward(
    window: int | None,
    q_BTHd: jax.Array,
    k_BTGd: jax.Array,
    v_BTGd: jax.Array,
    rows: Rows,
    sinks_H: jax.Array | None,
) -> tuple[jax.Array, Residuals]:
    k_BGSd, v_BGSd = _heads_first(k_BTGd), _heads_first(v_BTGd)
    outputs, log_totals = [], []
    for start, end in _blocks(q_BTHd.shape[1]):
        first = _first(window, start, rows)
        q_BGmd = _grouped(_scaled(q_BTHd[:, start:end]), k_BTGd.shape[2])
        scores_BGmS = _scores(window, q_BGmd, k_BGSd[:, :, first:end], rows, start, end)
        top = jnp.max(scores_BGmS, axis=-1, keepdims=True)
        weights = jnp.exp(scores_BGmS - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if sinks_H is not None:
            total = total + jnp.exp(_sinks(sinks_H, k_BTGd.shape[2], end - start) - top)
        o_BGmd = _product("bgms,bgsd->bgmd", weights.astype(v_BGSd.dtype), v_BGSd[:, :, first:end]) / total
        outputs.append(_ungrouped(o_BGmd.astype(v_BGSd.dtype), end - start))
        log_totals.append(checkpoint_name(top + jnp.log(total), "log_totals"))
    o_BTHd = checkpoint_name(jnp.concatenate(outputs, axis=1), "attended")
    return o_BTHd, (q_BTHd, k_BTGd, v_BTGd, rows, o_BTHd, tuple(log_totals), sinks_H)


def _backward(
    window: int | None, kept: Residuals, d_o_BTHd: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, jax.Array | None]:
    q_BTHd, k_BTGd, v_BTGd, rows, o_BTHd, log_totals, sinks_H = kept
    G = k_BTGd.shape[2]
    k_BGSd, v_BGSd = _heads_first(k_BTGd), _heads_first(v_BTGd)
    d_k, d_v = jnp.zeros(k_BGSd.shape, jnp.float32), jnp.zeros(v_BGSd.shape, jnp.float32)
    d_sinks_H = jnp.zeros(q_BTHd.shape[2], jnp.float32)
    d_q = []
    for (start, end), log_total in zip(_blocks(q_BTHd.shape[1]), log_totals, strict=True):
        here, first = slice(start, end), _first(window, start, rows)
        k, v = k_BGSd[:, :, first:end], v_BGSd[:, :, first:end]
        q_BGmd, o_BGmd, d_o_BGmd = (
            _grouped(x, G) for x in (_scaled(q_BTHd[:, here]), o_BTHd[:, here], d_o_BTHd[:, here])
        )
        # Weights without the sink's weight. The sink's value is 0, so the gradient of its weight is 0.
        weights = jnp.exp(_scores(window, q_BGmd, k, rows, start, end) - log_total)
        # The slope of a softmax is its weights times (their gradients - the mean of the gradients). The mean is the dot
        # product of d_o and o.
        mean = jnp.sum(d_o_BGmd.astype(jnp.float32) * o_BGmd, axis=-1, keepdims=True)
        d_scores = (weights * (_product("bgmd,bgsd->bgms", d_o_BGmd, v) - mean)).astype(q_BGmd.dtype)
        d_v = d_v.at[:, :, first:end].add(_product("bgms,bgmd->bgsd", weights.astype(v.dtype), d_o_BGmd))
        d_k = d_k.at[:, :, first:end].add(_product("bgms,bgmd->bgsd", d_scores, q_BGmd))
        if sinks_H is not None:
            of_sinks = jnp.exp(_sinks(sinks_H, G, end - start) - log_total) * mean
            d_sinks_H -= jnp.sum(of_sinks.reshape(len(of_sinks), len(sinks_H), -1), axis=(0, 2))
        d_q.append(_ungrouped(_scaled(_product("bgms,bgsd->bgmd", d_scores, k)), end - start))
    return (
        jnp.concatenate(d_q, axis=1).astype(q_BTHd.dtype),
        _heads_first(d_k).astype(k_BTGd.dtype),
        _heads_first(d_v).astype(v_BTGd.dtype),
        None,
        None if sinks_H is None else d_sinks_H.astype(sinks_H.dtype),
    )


_attend.defvjp(_forward, _backward)


def _sinks(sinks_H: jax.Array, G: int, queries: int) -> jax.Array:
    """[G, m, 1]: the sink of each row of `_grouped`."""
    return jnp.repeat(sinks_H.astype(jnp.float32).reshape(G, -1), queries, axis=1)[..., None]


def _blocks(T: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, end) of queries. Keys before `_first` and from `end` on are masked, so they are skipped."""
    step = _step(T)
    return ((start, min(start + step, T)) for start in range(0, T, step))


def _step(T: int) -> int:
    return max(_BLOCK, T // _MOST_BLOCKS)


def score_bytes(T: int, window: int | None, heads: int) -> int:
    """The maximum bytes of one query block's scores, while a row of T tokens is differentiated without a kernel.

    window: see `AttentionFn`. heads: on one device.
    """
    queries = min(T, _step(T))
    keys = T if window is None else min(T, queries + window - 1)
    return heads * queries * keys * _SCORE_BYTES


def _first(window: int | None, start: int, rows: Rows) -> int:
    """The first key that the query at `start` may see."""
    return 0 if window is None or rows[1] is not None else max(0, start - window + 1)


def _scores(window: int | None, q_BGmd: jax.Array, k_BGSd: jax.Array, rows: Rows, start: int, end: int) -> jax.Array:
    scores_BGmS = _product("bgmd,bgsd->bgms", q_BGmd, k_BGSd)
    B, G, m, S = scores_BGmS.shape
    first = _first(window, start, rows)
    ends_BT, positions_BT = rows
    queries, keys = jnp.arange(start, end)[:, None], jnp.arange(first, end)[None, :]
    places = queries, keys
    if positions_BT is not None:
        places = positions_BT[:, start:end, None], positions_BT[:, None, first:end]
    seen = sees(window, queries, keys, ends_BT[:, None, first:end], *places)
    by_head = scores_BGmS.reshape(B, G, m // (end - start), end - start, S)
    return jnp.where(seen[:, None, None], by_head, _UNSEEN).reshape(B, G, m, S)


def _product(letters: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(letters, left, right, preferred_element_type=jnp.float32)


def _scaled(x: jax.Array) -> jax.Array:
    return x * x.shape[-1] ** -0.5


def _heads_first(x_BTGd: jax.Array) -> jax.Array:
    """[B, G, T, d]; its own inverse."""
    return jnp.swapaxes(x_BTGd, 1, 2)


def _grouped(x_BTHd: jax.Array, G: int) -> jax.Array:
    """[B, G, m, d]: the query heads of a key-value head, one after another."""
    B, T, H, d = x_BTHd.shape
    return x_BTHd.reshape(B, T, G, H // G, d).transpose(0, 2, 3, 1, 4).reshape(B, G, H // G * T, d)


def _ungrouped(x_BGmd: jax.Array, T: int) -> jax.Array:
    """The inverse of `_grouped`."""
    B, G, m, d = x_BGmd.shape
    return x_BGmd.reshape(B, G, m // T, T, d).transpose(0, 3, 1, 2, 4).reshape(B, T, G * m // T, d)
