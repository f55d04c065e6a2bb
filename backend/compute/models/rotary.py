"""Rotary position embeddings on the devices: their cosines and sines, and the rotation.

Letters: B rows, T tokens, H heads, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tinkerflow.backend.compute.models.rope import Rope, rope_frequencies

CosSin = tuple[jax.Array, jax.Array]  # [B, T, dims / 2], float32


def rope_table(rope: Rope, positions: jax.Array, axes: Sequence[int] | None = None) -> tuple[CosSin, CosSin]:
    """cos and sin for queries, and for keys.

    positions: int32 [B, T], or with `axes` [B, T, 3] with time, row and column. axes: for each pair of dimensions, the
    index of the position that rotates it (M-RoPE).
    """
    rotated_by = positions[..., None] if axes is None else positions[..., np.array(axes)]
    angles = rotated_by.astype(jnp.float32) * jnp.asarray(rope_frequencies(rope), jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention != 1:
        cos, sin = cos * rope.attention, sin * rope.attention
    if not rope.query_beta:
        return (cos, sin), (cos, sin)
    periods_BT = (positions // rope.query_period).astype(jnp.float32)
    growth = 1 + rope.query_beta * jnp.log1p(periods_BT)[..., None]
    return (cos * growth, sin * growth), (cos, sin)


def rotate(x_BTHd: jax.Array, table: CosSin) -> jax.Array:
    """x with its dimensions rotated, the first half against the second half, as in Hugging Face's weights.

    table: cos and sin for the first dimensions of d; the other dimensions stay.
    """
    cos, sin = (part[:, :, None, :] for part in table)
    dims = 2 * cos.shape[-1]
    if dims < x_BTHd.shape[-1]:
        return jnp.concatenate([rotate(x_BTHd[..., :dims], table), x_BTHd[..., dims:]], axis=-1)
    first, second = jnp.split(x_BTHd.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHd.dtype)
