"""Attention of a packed training batch: causal, and only within a segment.

Letters: B rows, T and S tokens (queries, keys), G key-value heads, r query heads per key-value head, d head dimension.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from backend.compute.transformer import Attend

_BLOCK = 256  # queries scored at once, so that scores stay in the caches
_MOST_BLOCKS = 8
_UNSEEN = np.finfo(np.float32).min


def attend_segments(segments_BT: jax.Array) -> Attend:
    """The `Attend` in which a token sees itself and earlier tokens of its own segment, by position in the row."""
    T = segments_BT.shape[1]
    step = max(_BLOCK, T // _MOST_BLOCKS)

    def attend(q_BTHd: jax.Array, k_BTGd: jax.Array, v_BTGd: jax.Array) -> jax.Array:
        outputs = []
        for start in range(0, T, step):
            end = min(start + step, T)  # keys after the last query of a block are never seen: they are not multiplied
            mask = _mask(segments_BT, start, end)
            outputs.append(attend_masked(q_BTHd[:, start:end], k_BTGd[:, :end], v_BTGd[:, :end], mask))
        return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)

    return attend


# Scores are computed again in the backward pass: kept, they would be the largest thing that training holds.
@functools.partial(jax.checkpoint, prevent_cse=False)
def attend_masked(q_BTHd: jax.Array, k_BSGd: jax.Array, v_BSGd: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """softmax(q k / sqrt(d)) v over the keys that `mask_BTS` allows; softmax in float32, result in the dtype of q."""
    B, T, H, d = q_BTHd.shape
    G = k_BSGd.shape[2]
    q_BTGrd = (q_BTHd * d**-0.5).reshape(B, T, G, H // G, d)
    scores = jnp.einsum("btgrd,bsgd->bgrts", q_BTGrd, k_BSGd, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_BTS[:, None, None], scores, _UNSEEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSGd.dtype)
    return jnp.einsum("bgrts,bsgd->btgrd", weights, v_BSGd).reshape(B, T, H, d)


def _mask(segments_BT: jax.Array, start: int, end: int) -> jax.Array:
    same = segments_BT[:, start:end, None] == segments_BT[:, None, :end]
    earlier = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :]
    return same & earlier
