"""Latent attention in the sampler: the cache stores latents, which are never expanded to the heads' keys and values.

A score is q . (K c) = (K^T q) . c, and the output of a head is the sum of w (V c) = V (sum of w c). Instead, queries
and outputs are multiplied by the matrix that expands latents to keys and values (DeepSeek V2, arXiv 2405.04434, section
2.1.2). All heads share one key, and its first part is their value. An adapter of this matrix is multiplied in the same
way. For queries, its B comes first.

Letters: S rows, Q tokens, H heads, K columns of the stack of adapters, c a latent's width. Per head: p dimensions
without rotation, r with rotation, v of values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import WEIGHTS, Array, sharding
from tinkerflow.backend.compute.models.layers import LatentAttention
from tinkerflow.backend.compute.models.layers.step import AttentionFn
from tinkerflow.backend.compute.models.lora import LoraPair
from tinkerflow.backend.compute.sampler.snapshot_cache import own_columns
from tinkerflow.backend.compute.weights.quantized import FourBit, Int8, Weight


def attend_latents(
    latent: LatentAttention,
    mesh: Mesh,
    attend: AttentionFn,
    columns_S2: Array,
    width: int | None,
    q_SQHp: jax.Array,
    q_SQHr: jax.Array,
    c_SQc: jax.Array,
    k_SQr: jax.Array,
    kv_b: Weight,
    pair: LoraPair | None,
) -> jax.Array:
    """The attention output of each query, [S, Q, H, v], in the dtype of queries.

    latent: the shapes. mesh: splits heads over WEIGHTS, if their number is divisible. attend: attends over the cache,
    with one key-value head. columns_S2 int32, width: each row's columns of the stack, and their number. q_SQHp, q_SQHr:
    the parts of queries without and with rotation. c_SQc: latents. k_SQr: the rotated part of keys. kv_b: the matrix
    [H * (p + v), c]. pair: the adapters' pair for kv_b, A [K, c] and B [K, H * (p + v)].
    """
    H, p = q_SQHp.shape[2:]
    keys_Hpc, values_Hvc, key_scale, value_scale = _halves(kv_b, H, p, q_SQHp.dtype)
    q_SQHc = jnp.einsum("sqhp,hpc->sqhc", q_SQHp * key_scale, keys_Hpc)
    if pair is not None:
        own = own_columns(columns_S2, pair, width)[:, None, None]
        keys_KHp, values_KHv = jnp.split(jnp.asarray(pair.B).reshape(-1, H, p + latent.values), (p,), axis=-1)
        low_SQHK = jnp.einsum("sqhp,khp->sqhk", q_SQHp, keys_KHp)
        # Not a product with 0, because an overflow in the columns of another row's adapter must not become NaN here.
        q_SQHK = jnp.where(own, low_SQHK, 0)
        q_SQHc = q_SQHc + pair.multiply(lambda part: jnp.einsum("sqhk,kc->sqhc", q_SQHK[..., part], pair.A[part]))
    # `attend` scales queries by the width of its keys. The correct scale uses the dimensions of a head.
    scale = jnp.asarray((latent.cell / (latent.plain + latent.rotary)) ** 0.5, q_SQHc.dtype)
    q = jnp.concatenate([q_SQHc, q_SQHr], axis=-1) * scale
    c_SQ1c = c_SQc[:, :, None]
    keys = jnp.concatenate([c_SQ1c, k_SQr[:, :, None]], axis=-1)
    # Attention splits rows, and the operations before and after it split heads. Without this hint XLA reshards slowly.
    seen_SQHc = _by_heads(mesh, attend(_by_heads(mesh, q), keys, c_SQ1c, window=None, sinks_H=None))
    o_SQHv = jnp.einsum("sqhc,hvc->sqhv", seen_SQHc, values_Hvc) * value_scale
    if pair is not None:
        low_SQHK = jnp.einsum("sqhc,kc->sqhk", seen_SQHc, pair.A)
        o_SQHK = jnp.where(own, low_SQHK, 0)
        o_SQHv = o_SQHv + pair.multiply(lambda part: jnp.einsum("sqhk,khv->sqhv", o_SQHK[..., part], values_KHv[part]))
    return o_SQHv


def _by_heads(mesh: Mesh, x_SQHd: jax.Array) -> jax.Array:
    where = sharding(mesh, x_SQHd.shape, None, None, WEIGHTS)
    return jax.lax.with_sharding_constraint(x_SQHd, where)


def _halves(kv_b: Weight, H: int, p: int, dtype: Any) -> tuple[jax.Array, jax.Array, Any, Any]:
    """The matrices of keys [H, p, c] and values [H, v, c], and their scales, [H, p] and [H, v], or 1."""
    matrix = kv_b.dense(dtype) if isinstance(kv_b, FourBit) else kv_b
    matrix = matrix.values.astype(dtype) if isinstance(matrix, Int8) else matrix
    by_head = matrix.reshape(H, -1, matrix.shape[-1])
    if not isinstance(kv_b, Int8):
        return by_head[:, :p], by_head[:, p:], 1, 1
    scale_Ho = kv_b.scale.reshape(H, -1)
    return by_head[:, :p], by_head[:, p:], scale_Ho[:, :p], scale_Ho[:, p:]
