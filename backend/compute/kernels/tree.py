"""Attention in rows of trees: sequences with a common prefix share the tokens of the prefix.

A row contains its trees in depth-first order. Each token has an end: the place where the subtree below its node ends.
The query at place i sees the key at place j if j <= i < end of j. These keys are the token itself and its ancestors.
With a window W, position of i - position of j must also be less than W. A token's position is its place in its
sequence.

The kernels for GPUs and TPUs (`tree_gpu`, `tree_tpu`) visit only blocks in which a query sees a key. Each program
writes rows that no other program writes, and adds in a fixed order. Both share this module's derivative, mask and
lists.

Letters: B rows, T tokens, H query heads, G key-value heads, d head dimension. n, m: blocks of queries and of keys, or
the tokens of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

TO_BASE_2 = math.log2(math.e)
UNSEEN = -0.7 * float(np.finfo(np.float32).max)  # finite: the difference of two is 0


class TreeRows(NamedTuple):
    """The ends and positions of tokens, int32. Padding has the end T."""

    ends_BT: jax.Array
    positions_BT: jax.Array


def sees(window: int | None, query: Any, key: Any, end: Any, position_of_query: Any, position_of_key: Any) -> Any:
    """Whether each query sees each key; the shapes are broadcast.

    window: as in `flash_attention`. query, key: their places in the row. end: the key's end. position_of_query,
    position_of_key: their places in their sequences.
    """
    found = (key <= query) & (query < end)
    return found if window is None else found & (position_of_query - position_of_key < window)


@dataclass(frozen=True)
class How:
    """How a kernel computes. interpret: use plain operations. window: as in `flash_attention`. scale: of scores."""

    interpret: bool
    window: int | None
    scale: float

    def scores(self, product: jax.Array, seen: Any) -> jax.Array:
        """The base-2 exponents of attention's weights. product: of queries and keys."""
        return jnp.where(seen, product * (self.scale * TO_BASE_2), UNSEEN)

    def seen_blocks(self, tree: TreeRows, queries: int, keys: int) -> jax.Array:
        """Whether a query of a block may see a key of a block, [B, n, m]. queries, keys: tokens of a block."""
        (ends_BT, positions_BT), (B, T) = tree, tree.ends_BT.shape
        first_n1, first_m = jnp.arange(0, T, queries)[:, None], jnp.arange(0, T, keys)
        # If any query of a block sees a key before the block, this key's end is after the block's first query.
        seen = (first_m < first_n1 + queries) & (jnp.max(ends_BT.reshape(B, 1, -1, keys), axis=-1) > first_n1)
        if self.window is None:
            return seen
        least_Bn1 = jnp.min(positions_BT.reshape(B, -1, 1, queries), axis=-1)
        return seen & (least_Bn1 - jnp.max(positions_BT.reshape(B, 1, -1, keys), axis=-1) < self.window)


def listed(seen_Bnm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each block, the indices of seen blocks in order, then of unseen ones [B, n, m]; the number of seen [B, n]."""
    places = jnp.argsort(~seen_Bnm, axis=-1, stable=True)
    return places.astype(jnp.int32), jnp.sum(seen_Bnm, axis=-1, dtype=jnp.int32)


class Kernels(NamedTuple):
    """The kernels of one platform.

    forward: (how, q_BTHd, k_BTGd, v_BTGd, tree, sinks_H) -> the result, and the base-2 logarithms of the softmax's
    denominators, [B, H, T] float32. Sinks are also base-2 logarithms; -inf = none.
    slopes: (how, q_BTHd, k_BTGd, v_BTGd, tree, d_o_BTHd, log_totals, means) -> the gradients with respect to q, k and
    v. The means [B, H, T] are the means of the gradients with respect to a query's weights.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    slopes: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    kernels: Kernels,
    how: How,
    q_BTHd: jax.Array,
    k_BTGd: jax.Array,
    v_BTGd: jax.Array,
    ends_BT: jax.Array,
    sinks_H: jax.Array | None,
    positions_BT: jax.Array,
) -> jax.Array:
    """softmax(q k scale) v over the keys seen, [B, T, H, d].

    kernels: the platform's kernels. how: how they compute. sinks_H: one more term of a head's denominators. ends_BT,
    positions_BT: as in `TreeRows`.
    """
    return _forward(kernels, how, q_BTHd, k_BTGd, v_BTGd, ends_BT, sinks_H, positions_BT)[0]


def _forward(
    kernels: Kernels,
    how: How,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ends: jax.Array,
    sinks_H: jax.Array | None,
    positions: jax.Array,
) -> tuple[jax.Array, tuple[Any, ...]]:
    none, tree = jnp.full(q.shape[2], -jnp.inf, jnp.float32), TreeRows(ends, positions)
    sinks = none if sinks_H is None else sinks_H.astype(jnp.float32) * TO_BASE_2
    o, log_totals = kernels.forward(how, q, k, v, tree, sinks)
    o, log_totals = checkpoint_name(o, "attended"), checkpoint_name(log_totals, "log_totals")
    return o, (q, k, v, tree, o, log_totals, sinks_H)


def _backward(kernels: Kernels, how: How, kept: tuple[Any, ...], d_o: jax.Array) -> tuple[Any, ...]:
    q, k, v, tree, o, log_totals, sinks_H = kept
    means = jnp.einsum("bthd,bthd->bht", d_o, o, preferred_element_type=jnp.float32)
    d_sinks_H = None
    if sinks_H is not None:  # a sink's value is 0, so the gradient of its weight is 0
        weights_BHT = jnp.exp2(sinks_H.astype(jnp.float32)[:, None] * TO_BASE_2 - log_totals)
        d_sinks_H = -jnp.sum(weights_BHT * means, axis=(0, 2)).astype(sinks_H.dtype)
    return *kernels.slopes(how, q, k, v, tree, d_o, log_totals, means), None, d_sinks_H, None


attend.defvjp(_forward, _backward)
