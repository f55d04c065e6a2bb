"""The KV cache: one pool of pages for all sequences, written in place inside the layer loop, and read by page tables.

Letters: L layers, N pages of all shards, G key-value heads, P positions of a page, d head dimension, S rows (slots of
the decode batch, or prompts of a prefill), W pages of a row's table, H query heads, Q queries of a row, r query heads
per key-value head.

Heads come before positions, so that a page is one matrix per head: any other order makes XLA copy what it multiplies.
Keys lie with their positions last, values with theirs before d, each as its matmul reads it: with both alike, XLA:CPU
transposed every key for every token (64 rows at 128 positions: three times the values' time, now equal). The cache is
one array for all layers, or, for a loop over layers that is written out (`params.by_layer`), one a layer, because
XLA:CPU copies a layer out of a stack before it multiplies by it. Attention stops after the page that the longest row
has reached, and pages beyond a row's end add exact zeros: a row's result does not depend on the lengths of other rows.
On CPUs pages that lie anywhere are read as fast as rows that lie in one piece (64 rows of 300 positions: 2.4 CPU-ms a
layer against 2.7).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.mesh import FSDP, TENSOR, Array
from tinkerflow.backend.compute.sampler.pages import PageCopy
from tinkerflow.backend.compute.sampler.shapes import PREFILL_TOKENS

COPIES = 16  # pages that one dispatch copies, at most
_MASKED = -1e30
_RUN = PREFILL_TOKENS[0]  # positions that prefill writes at once: they divide a page and every piece


@flax.struct.dataclass
class KVCache:
    """Keys (rotated) [L, N, G, d, P], values [L, N, G, P, d], in the dtype of the weights; or L of each with L = 1."""

    k: jax.Array | tuple[jax.Array, ...]
    v: jax.Array | tuple[jax.Array, ...]

    @property
    def page(self) -> int:
        """How many positions a page has."""
        return int(jax.tree.leaves(self.k)[0].shape[-1])


def cache_sharding(cfg: ModelConfig, mesh: Mesh) -> NamedSharding:
    """Pages over fsdp, heads over tensor (whole where the axis does not divide them); of a single layer as well."""
    heads = TENSOR if cfg.kv_heads % mesh.shape[TENSOR] == 0 else None
    return NamedSharding(mesh, PartitionSpec(None, FSDP, heads, None, None))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def empty_cache(cfg: ModelConfig, mesh: Mesh, pages: int, page: int, dtype: str, by_layer: bool) -> KVCache:
    """A cache of zeros. It must be zeros: a masked value is multiplied by a weight of 0, and 0 * nan is nan.

    cfg, mesh: the base model's shape, and the devices. pages: N, a multiple of the fsdp axis. page: P, a multiple of
    32. dtype: by name. by_layer: one array for each layer.
    """

    def zeros(layers: int, inner: tuple[int, int]) -> jax.Array:
        shape = (layers, pages, cfg.kv_heads, *inner)
        return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), cache_sharding(cfg, mesh))

    def part(*inner: int) -> jax.Array | tuple[jax.Array, ...]:
        size = (inner[0], inner[1])
        layers = len(cfg.numbers("attention"))
        return tuple(zeros(1, size) for _ in range(layers)) if by_layer else zeros(layers, size)

    return KVCache(k=part(cfg.head_dim, page), v=part(page, cfg.head_dim))


def copy_pages(cfg: ModelConfig, mesh: Mesh, cache: KVCache, copies: Sequence[PageCopy]) -> KVCache:
    """`cache`, updated in place, after these copies, one after the other. A dispatch for every COPIES of them.

    cfg, mesh: the base model's shape, and the devices. copies: of pages by their numbers in the whole pool.
    """
    for begin in range(0, len(copies), COPIES):
        here = copies[begin : begin + COPIES]
        source_N, into_N = (np.zeros(COPIES, np.int32) for _ in range(2))
        source_N[: len(here)], into_N[: len(here)] = zip(*here, strict=True)
        cache = copied(cfg, mesh, cache, source_N, into_N, np.int32(len(here)))
    return cache


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def copied(
    cfg: ModelConfig, mesh: Mesh, cache: KVCache, source_N: jax.Array, into_N: jax.Array, count: jax.Array
) -> KVCache:
    """`cache`, updated in place, with page source_N[i] copied to page into_N[i], for i < count in order.

    cfg, mesh: the base model's shape, and the devices. cache: of any shape. source_N, into_N int32: numbers in the
    whole pool. count: int32 scalar.
    """
    where = cache_sharding(cfg, mesh)
    shards = mesh.shape[FSDP]

    def local(part: jax.Array, source_N: jax.Array, into_N: jax.Array, count: jax.Array) -> jax.Array:
        mine, held = jax.lax.axis_index(FSDP), part.shape[1]

        def copy(i: jax.Array, part: jax.Array) -> jax.Array:
            page = jax.lax.dynamic_slice_in_dim(part, source_N[i] % held, 1, axis=1)
            if shards == 1:
                return jax.lax.dynamic_update_slice_in_dim(part, page, into_N[i], axis=1)
            page = jax.lax.psum(jnp.where(source_N[i] // held == mine, page, 0), FSDP)  # to every shard
            old = jax.lax.dynamic_slice_in_dim(part, into_N[i] % held, 1, axis=1)
            new = jnp.where(into_N[i] // held == mine, page, old)
            return jax.lax.dynamic_update_slice_in_dim(part, new, into_N[i] % held, axis=1)

        return jax.lax.fori_loop(0, count, copy, part)

    whole = PartitionSpec()
    everywhere = jax.shard_map(
        local, mesh=mesh, in_specs=(where.spec, whole, whole, whole), out_specs=where.spec, check_vma=False
    )
    made: KVCache = jax.tree.map(lambda part: everywhere(part, source_N, into_N, count), cache)
    return made


def attend_cached(
    mesh: Mesh,
    cache: KVCache,
    layer: Any,
    tables_SW: Array,
    start_S: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    sinks_H: jax.Array | None = None,
) -> tuple[KVCache, jax.Array]:
    """Write k and v into a layer of the cache, then attend: the new cache, and o [S, Q, H, d].

    Causal: query i of a row sees positions 0 .. start_S + i, and with a window the last `window` of these; pages that
    no row's window reaches are not read. With Q > 1 all rows start together, at start_S[0].

    mesh: pages and rows are split over fsdp, heads over tensor. cache: updated in place. layer: its number, an int if
    the cache is by layer. tables_SW int32: the pages of each row, as numbers in the row's own shard; 0 = none, and what
    is written there is dropped. start_S int32: where each row's first query stands. q [S, Q, H, d] and k [S, Q, G, d]:
    rotated. v [S, Q, G, d]. sinks_H: a score of each head that takes part in the softmax and has no value.
    """
    if isinstance(cache.k, tuple) and isinstance(cache.v, tuple):
        own_k, own_v = cache.k[layer], cache.v[layer]
        new_k, new_v, o = _attend_stacked(
            mesh, window, own_k, own_v, jnp.int32(0), tables_SW, start_S, q, k, v, sinks_H
        )
        before, after = slice(0, layer), slice(layer + 1, None)
        return KVCache(k=(*cache.k[before], new_k, *cache.k[after]), v=(*cache.v[before], new_v, *cache.v[after])), o
    new_k, new_v, o = _attend_stacked(mesh, window, cache.k, cache.v, layer, tables_SW, start_S, q, k, v, sinks_H)
    return KVCache(k=new_k, v=new_v), o


def _attend_stacked(
    mesh: Mesh,
    window: int | None,
    cache_k: Any,
    cache_v: Any,
    layer: Any,
    tables_SW: Array,
    start_S: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks_H: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    # By hand per device (shard_map), because left to itself XLA gathers a cache that is written at computed places.
    axis = TENSOR if k.shape[2] % mesh.shape[TENSOR] == 0 else None
    rows, heads = PartitionSpec(FSDP), PartitionSpec(FSDP, None, axis, None)
    held = PartitionSpec(None, FSDP, axis, None, None)
    local = jax.shard_map(
        functools.partial(_attend_local, window),
        mesh=mesh,
        in_specs=(held, held, PartitionSpec(), rows, rows, heads, heads, heads, PartitionSpec(axis)),
        out_specs=(held, held, heads),
        check_vma=False,
    )
    results: tuple[jax.Array, jax.Array, jax.Array] = local(
        cache_k, cache_v, layer, jnp.asarray(tables_SW), start_S, q, k, v, sinks_H
    )
    return results


def _attend_local(
    window: int | None,
    cache_k: jax.Array,
    cache_v: jax.Array,
    layer: jax.Array,
    tables_SW: jax.Array,
    start_S: jax.Array,
    q_SQHd: jax.Array,
    k_SQGd: jax.Array,
    v_SQGd: jax.Array,
    sinks_H: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    S, Q, H, d = q_SQHd.shape
    P, G = cache_v.shape[3], k_SQGd.shape[2]
    cache_k, cache_v = _written(cache_k, cache_v, layer, tables_SW, start_S, k_SQGd, v_SQGd)

    # The query heads that share a key-value head, and a row's queries, are rows of one matrix.
    q = (q_SQHd * d**-0.5).reshape(S, Q, G, H // G, d).transpose(0, 2, 3, 1, 4).reshape(S, G, H // G * Q, d)
    seen_SQ = start_S[:, None] + jnp.arange(Q, dtype=jnp.int32)
    seen = jnp.tile(seen_SQ, (1, H // G))[:, None, :, None]

    def page(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, out = state
        here_S = jax.lax.dynamic_index_in_dim(tables_SW, i, axis=1, keepdims=False)
        k_SGdP = cache_k.at[layer, here_S].get(mode="promise_in_bounds")
        v_SGPd = cache_v.at[layer, here_S].get(mode="promise_in_bounds")
        scores = jnp.einsum("sgqd,sgdp->sgqp", q, k_SGdP, preferred_element_type=jnp.float32)
        places = i * P + jnp.arange(P)
        within = places <= seen if window is None else (places <= seen) & (places > seen - window)
        scores = jnp.where(within, scores, _MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - higher)
        shrink = jnp.exp(top - higher)
        part = jnp.einsum("sgqp,sgpd->sgqd", weights.astype(v_SGPd.dtype), v_SGPd, preferred_element_type=jnp.float32)
        return higher, total * shrink + jnp.sum(weights, axis=-1, keepdims=True), out * shrink + part

    state = (
        jnp.full((*q.shape[:3], 1), _MASKED, jnp.float32),
        jnp.zeros((*q.shape[:3], 1), jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    pages = jnp.minimum((jnp.max(start_S) + Q - 1) // P + 1, tables_SW.shape[1])
    # A page before a row's window, read for another row, adds weights of exp(0) that the row's first page in it undoes.
    first = 0 if window is None else jnp.maximum(jnp.min(start_S) - window + 1, 0) // P
    top, total, out = jax.lax.fori_loop(first, pages, page, state)
    if sinks_H is not None:
        total = total + jnp.exp(jnp.repeat(sinks_H.astype(jnp.float32).reshape(G, -1), Q, axis=1)[..., None] - top)
    o = (out / total).astype(q_SQHd.dtype)
    return cache_k, cache_v, o.reshape(S, G, H // G, Q, d).transpose(0, 3, 1, 2, 4).reshape(S, Q, H, d)


def _written(
    cache_k: jax.Array,
    cache_v: jax.Array,
    layer: jax.Array,
    tables_SW: jax.Array,
    start_S: jax.Array,
    k_SQGd: jax.Array,
    v_SQGd: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The cache with new keys and values at positions start_S.. of each row, but for those that have no page."""
    S, Q = k_SQGd.shape[:2]
    P, N = cache_k.shape[4], cache_k.shape[1]
    k_SQGd, v_SQGd = k_SQGd.astype(cache_k.dtype), v_SQGd.astype(cache_v.dtype)
    if Q == 1 and S > 1:
        page_S = jnp.take_along_axis(tables_SW, start_S[:, None] // P, axis=1, mode="fill", fill_value=0)[:, 0]
        page_S = jnp.where(page_S == 0, N, page_S)  # dropped
        cache_k = cache_k.at[layer, page_S, :, :, start_S % P].set(k_SQGd[:, 0], mode="drop")
        return cache_k, cache_v.at[layer, page_S, :, start_S % P].set(v_SQGd[:, 0], mode="drop")
    run = min(_RUN, Q)
    k_SGdQ, v_SGQd = k_SQGd.transpose(0, 2, 3, 1), v_SQGd.transpose(0, 2, 1, 3)
    G, d = k_SGdQ.shape[1:3]

    def write(i: jax.Array, cache: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row, first = i // (Q // run), i % (Q // run) * run
        begin = start_S[row] + first
        page = tables_SW[row, begin // P]

        def into(part: jax.Array, new: jax.Array, at: tuple[Any, ...]) -> jax.Array:
            old = jax.lax.dynamic_slice(part, at, (1, *new.shape))
            return jax.lax.dynamic_update_slice(part, jnp.where(page == 0, old, new[None]), at)

        new_k = jax.lax.dynamic_slice(k_SGdQ, (row, 0, 0, first), (1, G, d, run))
        new_v = jax.lax.dynamic_slice(v_SGQd, (row, 0, first, 0), (1, G, run, d))
        return (
            into(cache[0], new_k, (layer, page, 0, 0, begin % P)),
            into(cache[1], new_v, (layer, page, 0, begin % P, 0)),
        )

    return jax.lax.fori_loop(0, S * (Q // run), write, (cache_k, cache_v))
