"""Attention of rows with tokens that are split over devices: DeepSpeed-Ulysses (arXiv 2309.14509).

Each device holds a piece of a row: some tokens with all heads. Before attention, the devices of a row exchange pieces,
so that each holds all tokens of some heads. Afterwards they exchange the results back. Heads are independent, so each
device runs the kernel for whole rows. A head is summed in the same order as on one device, and all devices have equal
work for any segments, windows and trees.

Letters: B pieces on a device, T tokens of a piece, H query heads, G key-value heads, d head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tinkerflow.backend.compute.mesh import CONTEXT

# (q_BTHd, k_BTGd, v_BTGd, ints_BT of tokens, sinks_H or None, more ints_BT) -> o_BTHd
Kernel = Callable[..., jax.Array]


def in_whole_rows(
    kernel: Kernel,
    pieces: int,
    q_BTHd: jax.Array,
    k_BTGd: jax.Array,
    v_BTGd: jax.Array,
    ints_BT: jax.Array,
    sinks_H: jax.Array | None = None,
    *more_BT: jax.Array,
) -> jax.Array:
    """The kernel's result for this device's pieces, [B, T, H, d], inside `shard_map` over a mesh of `mesh.split_rows`.

    pieces: the pieces of a row. The other arguments are the kernel's, for this device's pieces, with the sinks of all
    its heads. Every device gets whole key-value heads. If the number of pieces does not divide their number, heads are
    repeated.
    """

    def exchanged(x_BThd: jax.Array, split: int, joined: int) -> jax.Array:
        return jax.lax.all_to_all(x_BThd, CONTEXT, split_axis=split, concat_axis=joined, tiled=True)

    times = pieces // math.gcd(pieces, k_BTGd.shape[2])
    if times > 1:
        k_BTGd, v_BTGd = (jnp.repeat(x, times, axis=2) for x in (k_BTGd, v_BTGd))
    of_row = (jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True) for x in (ints_BT, *more_BT))
    if sinks_H is not None:
        sinks_H = sinks_H.reshape(pieces, -1)[jax.lax.axis_index(CONTEXT)]
    ints, *more = of_row
    o = kernel(*(exchanged(x, 2, 1) for x in (q_BTHd, k_BTGd, v_BTGd)), ints, sinks_H, *more)
    return exchanged(o, 1, 2)
