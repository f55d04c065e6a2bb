"""The key-value cache: written in place inside the layer loop, and read in blocks by attention.

Letters: L layers, S slots (or rows of a prefill), G key-value heads, T positions, d head dimension, H query heads,
Q queries of a row, r query heads per key-value head, b keys of a block, N pages (a page is a block of one slot).

Heads come before positions, so that a block of keys is one matrix per head: any other order makes XLA copy what it
multiplies. Keys lie with their positions last, values with theirs before d, each as its matmul reads it: with both
alike, XLA:CPU transposed every key for every token (64 rows at 128 positions: three times the values' time, now equal).
A cache is one array for all layers, or, for a loop over layers that is written out (`params.by_layer`), one a layer,
because XLA:CPU copies a layer out of a stack before it multiplies by it. Attention stops after the block that the
longest row has reached, so a long cache costs nothing while it is empty, and blocks beyond a row's end add exact
zeros: a row's result does not depend on the others' lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.mesh import FSDP, TENSOR, sharding
from tinkerflow.backend.compute.sampler.shapes import BLOCK

_KEYS, _VALUES = 4, 3  # the axes that are positions
PAGES = 16  # that are copied at once: 2,048 positions
_MASKED = -1e30


@flax.struct.dataclass
class KVCache:
    """Keys (rotated) [L, S, G, d, T], values [L, S, G, T, d], in the dtype of the weights; or L of each with L = 1."""

    k: jax.Array | tuple[jax.Array, ...]
    v: jax.Array | tuple[jax.Array, ...]

    @property
    def slots(self) -> int:
        """How many sequences it holds."""
        return int(jax.tree.leaves(self.k)[0].shape[1])

    @property
    def length(self) -> int:
        """How many positions of each."""
        return int(jax.tree.leaves(self.v)[0].shape[_VALUES])


@dataclass(frozen=True)
class SlotCopy:
    """The first `pages` pages of slot `source` of one cache are to be copied to slot `into` of another."""

    source: int
    into: int
    pages: int


def pages_for(tokens: int) -> int:
    """How many pages hold `tokens` positions."""
    return -(-tokens // BLOCK)


def cache_shape(cfg: ModelConfig, slots: int, length: int, axis: int = _VALUES) -> tuple[int, ...]:
    """[L, S, G, T, d] of values, or with T on the `axis` of keys."""
    inner = (length, cfg.head_dim) if axis == _VALUES else (cfg.head_dim, length)
    return (cfg.layers, slots, cfg.kv_heads, *inner)


def cache_sharding(cfg: ModelConfig, mesh: Mesh, slots: int, length: int) -> NamedSharding:
    """Slots over fsdp, heads over tensor (whole where the axis does not divide them); of a single layer as well."""
    return sharding(mesh, cache_shape(cfg, slots, length), None, FSDP, TENSOR, None, None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def empty_cache(cfg: ModelConfig, mesh: Mesh, slots: int, length: int, dtype: str, by_layer: bool) -> KVCache:
    """A cache of zeros. It must be zeros: a masked value is multiplied by a weight of 0, and 0 * nan is nan.

    cfg, mesh: the base model's shape, and the devices. slots, length: the size, length a multiple of BLOCK. dtype: by
    name. by_layer: one array for each layer.
    """

    def zeros(layers: int, axis: int) -> jax.Array:
        shape = (layers, *cache_shape(cfg, slots, length, axis)[1:])
        return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), cache_sharding(cfg, mesh, slots, length))

    def part(axis: int) -> jax.Array | tuple[jax.Array, ...]:
        return tuple(zeros(1, axis) for _ in range(cfg.layers)) if by_layer else zeros(cfg.layers, axis)

    return KVCache(k=part(_KEYS), v=part(_VALUES))


def copy_slots(cfg: ModelConfig, mesh: Mesh, into: KVCache, source: KVCache, copies: Sequence[SlotCopy]) -> KVCache:
    """`into`, updated in place, with the first pages of some slots of `source`. Several dispatches.

    cfg, mesh: the base model's shape, and the devices. into, source: caches of any two shapes. copies: which slots.
    Pages go through an array of a fixed size, so there is a program for each shape of cache, and none for each pair
    of shapes.
    """
    pages = [(each, page) for each in copies for page in range(each.pages)]
    for begin in range(0, len(pages), PAGES):
        here = pages[begin : begin + PAGES]
        source_N, into_N, page_N = (np.zeros(PAGES, np.int32) for _ in range(3))
        for i, (each, page) in enumerate(here):
            source_N[i], into_N[i], page_N[i] = each.source, each.into, page
        count = np.int32(len(here))
        into = pages_put(cfg, mesh, into, pages_of(cfg, mesh, source, source_N, page_N, count), into_N, page_N, count)
    return into


@functools.partial(jax.jit, static_argnums=(0, 1))
def pages_of(
    cfg: ModelConfig, mesh: Mesh, cache: KVCache, slot_N: jax.Array, page_N: jax.Array, count: jax.Array
) -> KVCache:
    """Some pages as a cache of N = PAGES slots of BLOCK positions, one array for all layers.

    cfg, mesh: the base model's shape, and the devices. cache: of any shape. slot_N, page_N int32: slot i of the
    result is page page_N[i] of slot slot_N[i], for i < count (int32 scalar); the other slots are zeros.
    """

    def one(axis: int, whole: Any) -> jax.Array:
        parts = whole if isinstance(whole, tuple) else (whole,)
        shape = cache_shape(cfg, PAGES, BLOCK, axis)

        def copy(i: jax.Array, room: jax.Array) -> jax.Array:
            for layer, part in enumerate(parts):
                begin = _begin(axis, slot_N[i], page_N[i])
                page = jax.lax.dynamic_slice(part, begin, (part.shape[0], 1, *shape[2:]))
                room = jax.lax.dynamic_update_slice(room, page, (layer, i, 0, 0, 0))
            return room

        room = jax.lax.fori_loop(0, count, copy, jnp.zeros(shape, parts[0].dtype))
        return jax.lax.with_sharding_constraint(room, cache_sharding(cfg, mesh, PAGES, BLOCK))

    return KVCache(k=one(_KEYS, cache.k), v=one(_VALUES, cache.v))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def pages_put(
    cfg: ModelConfig, mesh: Mesh, cache: KVCache, pages: KVCache, slot_N: jax.Array, page_N: jax.Array, count: jax.Array
) -> KVCache:
    """The inverse of `pages_of`: `cache`, updated in place, with these pages.

    cfg, mesh: the base model's shape, and the devices. cache: of any shape. pages: from `pages_of`. slot_N, page_N,
    count: where they go, as in `pages_of`.
    """

    def one(axis: int, whole: Any, source: Any) -> Any:
        parts = whole if isinstance(whole, tuple) else (whole,)

        def copy(i: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            page = jax.lax.dynamic_slice_in_dim(source, i, 1, axis=1)
            begin, made = _begin(axis, slot_N[i], page_N[i]), []
            for layer, part in enumerate(parts):
                made.append(jax.lax.dynamic_update_slice(part, page[layer : layer + part.shape[0]], begin))
            return tuple(made)

        where = cache_sharding(cfg, mesh, cache.slots, cache.length)
        parts = jax.lax.fori_loop(0, count, copy, parts)
        parts = tuple(jax.lax.with_sharding_constraint(part, where) for part in parts)
        return parts if isinstance(whole, tuple) else parts[0]

    return KVCache(k=one(_KEYS, cache.k, pages.k), v=one(_VALUES, cache.v, pages.v))


@functools.partial(jax.jit, static_argnums=(0, 1))
def page_of(cfg: ModelConfig, mesh: Mesh, cache: KVCache, page: jax.Array) -> KVCache:
    """A copy of positions [page * BLOCK, (page + 1) * BLOCK) of every slot."""

    def one(axis: int, x: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(x, page * BLOCK, BLOCK, axis)
        return jax.lax.with_sharding_constraint(part, cache_sharding(cfg, mesh, cache.slots, BLOCK))

    return _each(one, cache)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def with_page(cfg: ModelConfig, mesh: Mesh, cache: KVCache, part: KVCache, page: jax.Array) -> KVCache:
    """`cache`, updated in place, with `part`, BLOCK positions of every slot, at [page * BLOCK, (page + 1) * BLOCK).

    cfg, mesh: the base model's shape, and the devices. page: int32 scalar.
    """

    def one(axis: int, x: jax.Array, part: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_update_slice_in_dim(x, part, page * BLOCK, axis)
        return jax.lax.with_sharding_constraint(x, cache_sharding(cfg, mesh, cache.slots, cache.length))

    return _each(one, cache, part)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def zero_slots(cfg: ModelConfig, mesh: Mesh, cache: KVCache, dirty_S: jax.Array) -> KVCache:
    """`cache` with the slots where dirty_S is true set to zeros."""

    def one(x: jax.Array) -> jax.Array:
        x = jnp.where(dirty_S[None, :, None, None, None], 0, x)
        return jax.lax.with_sharding_constraint(x, cache_sharding(cfg, mesh, cache.slots, cache.length))

    clean: KVCache = jax.tree.map(one, cache)
    return clean


def attend_cached(
    mesh: Mesh, cache: KVCache, layer: Any, start_S: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[KVCache, jax.Array]:
    """Write k and v into a layer of the cache, then attend: the new cache, and o [S, Q, H, d].

    Causal: query i of a row sees positions 0 .. start_S + i. With Q > 1 all rows start together (start_S[0]) and must
    fit. With Q = 1, what would lie beyond the cache is not written, or, if there is only one row, is written over its
    last position: the sequence of that row has ended.

    mesh: slots are split over fsdp, heads over tensor. cache: updated in place. layer: its number, an int if the cache
    is by layer. start_S int32: where each row's first query stands. q [S, Q, H, d] and k [S, Q, G, d]: rotated.
    v [S, Q, G, d].
    """
    if isinstance(cache.k, tuple) and isinstance(cache.v, tuple):
        new_k, new_v, o = _attend_stacked(mesh, cache.k[layer], cache.v[layer], jnp.int32(0), start_S, q, k, v)
        before, after = slice(0, layer), slice(layer + 1, None)
        return KVCache(k=(*cache.k[before], new_k, *cache.k[after]), v=(*cache.v[before], new_v, *cache.v[after])), o
    new_k, new_v, o = _attend_stacked(mesh, cache.k, cache.v, layer, start_S, q, k, v)
    return KVCache(k=new_k, v=new_v), o


def _attend_stacked(
    mesh: Mesh,
    cache_k: Any,
    cache_v: Any,
    layer: Any,
    start_S: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    # By hand per device (shard_map), because left to itself XLA gathers a cache that is written at computed places.
    cell = _spec(mesh, cache_k.shape[1], k.shape[2])
    rows = PartitionSpec(cell[0])
    heads = PartitionSpec(cell[0], None, cell[1], None)
    held = PartitionSpec(None, cell[0], cell[1], None, None)
    local = jax.shard_map(
        _attend_local,
        mesh=mesh,
        in_specs=(held, held, PartitionSpec(), rows, heads, heads, heads),
        out_specs=(held, held, heads),
        check_vma=False,
    )
    results: tuple[jax.Array, jax.Array, jax.Array] = local(cache_k, cache_v, layer, start_S, q, k, v)
    return results


def _spec(mesh: Mesh, slots: int, heads: int) -> tuple[str | None, str | None]:
    return (
        FSDP if slots % mesh.shape[FSDP] == 0 else None,
        TENSOR if heads % mesh.shape[TENSOR] == 0 else None,
    )


def _attend_local(
    cache_k: jax.Array,
    cache_v: jax.Array,
    layer: jax.Array,
    start_S: jax.Array,
    q_SQHd: jax.Array,
    k_SQGd: jax.Array,
    v_SQGd: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    S, Q, H, d = q_SQHd.shape
    _, _, G, T, _ = cache_v.shape
    cache_k = _written(cache_k, _KEYS, layer, start_S, k_SQGd)
    cache_v = _written(cache_v, _VALUES, layer, start_S, v_SQGd)

    # The query heads that share a key-value head, and a row's queries, are rows of one matrix.
    q = (q_SQHd * d**-0.5).reshape(S, Q, G, H // G, d).transpose(0, 2, 3, 1, 4).reshape(S, G, H // G * Q, d)
    seen_SQ = start_S[:, None] + jnp.arange(Q, dtype=jnp.int32)
    seen = jnp.tile(seen_SQ, (1, H // G))[:, None, :, None]

    def block(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, out = state
        k_SGdb = jax.lax.dynamic_slice(cache_k, (layer, 0, 0, 0, i * BLOCK), (1, S, G, d, BLOCK))[0]
        v_SGbd = jax.lax.dynamic_slice(cache_v, (layer, 0, 0, i * BLOCK, 0), (1, S, G, BLOCK, d))[0]
        scores = jnp.einsum("sgqd,sgdb->sgqb", q, k_SGdb, preferred_element_type=jnp.float32)
        scores = jnp.where(i * BLOCK + jnp.arange(BLOCK) <= seen, scores, _MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - higher)
        shrink = jnp.exp(top - higher)
        part = jnp.einsum("sgqb,sgbd->sgqd", weights.astype(v_SGbd.dtype), v_SGbd, preferred_element_type=jnp.float32)
        return higher, total * shrink + jnp.sum(weights, axis=-1, keepdims=True), out * shrink + part

    state = (
        jnp.full((*q.shape[:3], 1), _MASKED, jnp.float32),
        jnp.zeros((*q.shape[:3], 1), jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    if T == BLOCK:
        _, total, out = block(jnp.int32(0), state)
    else:
        blocks = jnp.minimum((jnp.max(start_S) + Q - 1) // BLOCK + 1, T // BLOCK)
        _, total, out = jax.lax.fori_loop(0, blocks, block, state)
    o = (out / total).astype(q_SQHd.dtype)
    return cache_k, cache_v, o.reshape(S, G, H // G, Q, d).transpose(0, 3, 1, 2, 4).reshape(S, Q, H, d)


def _written(cache: jax.Array, axis: int, layer: jax.Array, start_S: jax.Array, new_SQGd: jax.Array) -> jax.Array:
    """The keys' or the values' part of a cache with new ones at positions start_S.., which are its `axis`."""
    new_SQGd = new_SQGd.astype(cache.dtype)
    if new_SQGd.shape[1] == 1 and new_SQGd.shape[0] > 1:
        slots = jnp.arange(new_SQGd.shape[0])
        if axis == _KEYS:
            return cache.at[layer, slots, :, :, start_S].set(new_SQGd[:, 0], mode="drop")
        return cache.at[layer, slots, :, start_S].set(new_SQGd[:, 0], mode="drop")
    new_SG = new_SQGd.transpose(0, 2, 3, 1) if axis == _KEYS else new_SQGd.transpose(0, 2, 1, 3)
    begin = (0, 0, start_S[0]) if axis == _KEYS else (0, start_S[0], 0)
    return jax.lax.dynamic_update_slice(cache, new_SG[None], (layer, 0, *begin))


def _each(change: Callable[..., jax.Array], *caches: KVCache) -> KVCache:
    """change(axis of positions, arrays...) of all keys, and of all values."""
    return KVCache(
        k=jax.tree.map(functools.partial(change, _KEYS), *(cache.k for cache in caches)),
        v=jax.tree.map(functools.partial(change, _VALUES), *(cache.v for cache in caches)),
    )


def _begin(axis: int, slot: jax.Array, page: jax.Array) -> tuple[Any, ...]:
    """Where a page of a slot begins in an array whose positions are its `axis`."""
    return (0, slot, 0, 0, page * BLOCK) if axis == _KEYS else (0, slot, 0, page * BLOCK, 0)
