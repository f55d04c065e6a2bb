"""Attention over pages on TPUs: JAX's ragged paged attention, for the queries of decode and of pieces of prompts.

The kernel expects the keys and values of a position side by side, so on TPUs a cache is one array for both. The kernel
takes the pages of one layer. We pass all layers as one pool of L x N pages, so no layer is copied out of the cache.

Letters: L layers, N pages, P positions of a page, G key-value heads, d head dimension, S rows, Q queries of a row,
H query heads, W pages of a row's table.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

_LANES, _SUBLANES = 128, 8
_PAGES, _QUERIES = 4, 32  # of a block, as the kernel's authors chose for 32 and 8 heads at 512 positions


def takes(kv_heads: int, head_dim: int, item: int) -> bool:
    """Whether the kernel supports attention with these heads, without sinks and latents.

    kv_heads: of each device. head_dim: of each head. item: bytes of a number in the cache. The kernel loads keys, or
    values, as every second row of a block. The TPU's compiler supports this only if a row has 128 numbers. Heads must
    fill its tiles, which have more rows for smaller numbers.
    """
    rows, rest = divmod(kv_heads, 2 if item == 1 else 1)
    return head_dim == _LANES and not rest and (rows in (1, 2, 4) or rows % _SUBLANES == 0)


def attend(
    cache_LNPKd: jax.Array,
    layer: jax.Array,
    tables_SW: jax.Array,
    start_S: jax.Array,
    q_SQHd: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """o [S, Q, H, d]: query i of a row sees positions 0 .. start_S + i of its pages.

    cache_LNPKd: keys and values of all layers, alternating along K = 2 G, including the queries' own positions. layer:
    int32 scalar. tables_SW int32: each row's pages. start_S int32: the position of each row's first query. q_SQHd:
    scaled. window: how many of the last positions a query sees; None = all.
    """
    (L, N, P, K, d), (S, Q, H, _), W = cache_LNPKd.shape, q_SQHd.shape, tables_SW.shape[1]
    scale = None if cache_LNPKd.dtype == q_SQHd.dtype else 1.0  # the kernel widens arrays that have a scale
    o: jax.Array = ragged_paged_attention(
        q_SQHd.reshape(S * Q, H, d),
        cache_LNPKd.reshape(L * N, P, K, d),
        jnp.minimum(start_S + Q, W * P),
        tables_SW + layer * N,
        jnp.arange(S + 1, dtype=jnp.int32) * Q,
        jnp.full(1, S, jnp.int32),
        sliding_window=window,
        k_scale=scale,
        v_scale=scale,
        num_kv_pages_per_block=min(_PAGES, W),
        num_queries_per_block=min(_QUERIES, S * Q),
    )
    return o.reshape(S, Q, H, d)


def interleaved(k: jax.Array, v: jax.Array) -> jax.Array:
    """Interleave keys and values [..., G, d] into [..., 2 G, d]."""
    return jnp.stack((k, v), axis=-2).reshape(*k.shape[:-2], 2 * k.shape[-2], k.shape[-1])
