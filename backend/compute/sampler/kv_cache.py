"""The KV cache: a pool of pages for all sequences, written in place inside the layer loop, and read by page tables.

Letters: L layers, N pages of all shards, G key-value heads, P positions of a page, d head dimension. S rows: slots of
the decode batch, or prompts of a prefill. W pages of a row's table, H query heads, Q queries of a row, r query heads
per key-value head.

Heads come before positions, so that a page is one matrix per head. With any other order, XLA copies the operands.
Positions are the last axis of keys, but come before d in values, because their matmuls read this order. With the same
order for both, XLA:CPU transposed every key for every token (64 rows at 128 positions: keys took three times as long as
values; now they take as long). The cache is one array for all layers. If the loop over layers is unrolled
(`params.by_layer`), each layer has its own array, because XLA:CPU copies a layer out of a stack before it multiplies by
it. Attention stops after the last page of the longest row, and pages beyond a row's end add exact zeros. So a row's
result does not depend on the lengths of other rows. On CPUs scattered pages are read as fast as contiguous rows (64
rows of 300 positions: 2.4 CPU-ms per layer, against 2.7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tinkerflow.backend.compute.kernels import paged_gpu, paged_tpu
from tinkerflow.backend.compute.mesh import FSDP, TENSOR, Array, cache_mesh
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import layers_with
from tinkerflow.backend.compute.models.layers import ATTENTION, GLOBAL, Attention
from tinkerflow.backend.compute.models.layers.delta_rule import DeltaState
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.platforms import CPU, TPU, on_cpu, on_nvidia, platform
from tinkerflow.backend.compute.sampler.pages import PageCopy, PagePool
from tinkerflow.backend.compute.sampler.states import empty_pool, pool_sharding
from tinkerflow.backend.spec.commands import CacheFormat

COPIES = 16  # the most pages that one dispatch copies
_MASKED = -1e30
_MOST_FLOAT8 = 448.0
_TOGETHER = 8  # rows of a decode step that CPUs attend together, up to the longest of them
_RUN = CPU.prefill_tokens[0]  # positions that prefill writes together: a divisor of a page and of every piece


@flax.struct.dataclass
class KVCache:
    """Keys (rotated) [L, N, G, d, P], values [L, N, G, P, d], in the dtype of `cache_dtype`; or L of each with L = 1.

    For the TPU kernel, k contains interleaved keys and values, [L, N, P, 2 G, d], and v is None. In models with latent
    attention, k contains the latent and the rotated part of a key as one head, and v, which is a part of the latent,
    has d = 0. states: the states of layers without keys; None in models without such layers, and within a dispatch.
    globals: the same pages in the layers with the mixer "global", which have different heads; None in models without
    such layers. Layers that read the keys and values of another layer have no pages.
    """

    k: Any
    v: Any
    states: DeltaState | None = None
    globals: KVCache | None = None

    def of(self, mixer: str) -> KVCache:
        """The pages in the layers with this mixer."""
        return KVCache(self.k, self.v) if mixer != GLOBAL or self.globals is None else self.globals

    def with_own(self, mixer: str, own: KVCache) -> KVCache:
        """The cache with its pages replaced in the layers with this mixer."""
        changed: KVCache = replace(self, globals=own) if mixer == GLOBAL else replace(self, k=own.k, v=own.v)
        return changed


def cache_dtype(kv_cache: CacheFormat, dtype: str) -> str:
    """The name of the number format of pages. kv_cache: the setting. dtype: the name of the activations' format.

    float8 has four bits of exponent and three bits of mantissa (E4M3 of arXiv 2209.05433, which ends at 448 and has no
    infinity). It has no scale, like vLLM's `fp8`.
    """
    return "float8_e4m3fn" if kv_cache == "float8" else dtype


def cache_sharding(cfg: ModelConfig, mesh: Mesh, *, together: bool) -> NamedSharding:
    """Pages over fsdp, heads over tensor, of the `cache_mesh` of these devices; also valid for a single layer.

    cfg, mesh: the base model's shape, and the devices. together: whether keys and values are one array.
    """
    return NamedSharding(cache_mesh(mesh, cfg.split_heads), _cache_spec(together=together))


def by_mixer(
    cfg: ModelConfig, mesh: Mesh, cache: KVCache, change: Callable[[jax.Array, NamedSharding], jax.Array]
) -> KVCache:
    """The cache after applying `change` to each array of pages and its sharding. cfg, mesh: the model's."""
    made = cache
    for mixer in (ATTENTION,) if cache.globals is None else (ATTENTION, GLOBAL):
        own = cache.of(mixer)
        where = cache_sharding(cfg, mesh, together=own.v is None)
        made = made.with_own(mixer, jax.tree.map(lambda part, where=where: change(part, where), own))
    return made


def _together(cfg: ModelConfig, mesh: Mesh, mixer: str, dtype: str) -> bool:
    """Whether keys and values are one array."""
    if platform() is not TPU or cfg.latent is not None or "sinks" in layers_with(cfg):
        return False
    own, tensor = cfg.attention_of(mixer), cache_mesh(mesh, cfg.split_heads).shape[TENSOR]
    assert isinstance(own, Attention)
    return paged_tpu.takes(own.kv_heads // tensor, own.head_dim, jnp.dtype(dtype).itemsize)


def _cache_spec(*, together: bool) -> PartitionSpec:
    return PartitionSpec(None, FSDP, *((None, TENSOR, None) if together else (TENSOR, None, None)))


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5, 6, 7))
def empty_cache(
    cfg: ModelConfig,
    mesh: Mesh,
    pages: int,
    page: int,
    dtype: str,
    by_layer: bool,
    states: int = 0,
    kv_cache: CacheFormat = "full",
) -> KVCache:
    """A cache of zeros. Zeros are necessary, because a masked value is multiplied by a weight of 0, and 0 * nan is nan.

    cfg, mesh: the base model's shape, and the devices. pages: N, a multiple of the fsdp axis. page: P, a multiple of
    32. dtype: the name of the activations' format. by_layer: an array per layer. states: the number of states of layers
    with linear attention, a multiple of the fsdp axis. kv_cache: the format of the pages, not of the states.
    """
    held = cache_dtype(kv_cache, dtype)

    def pages_of(mixer: str) -> KVCache:
        together, layers = _together(cfg, mesh, mixer, held), len(cfg.numbers(mixer))
        where = cache_sharding(cfg, mesh, together=together)

        def zeros(layers: int, inner: tuple[int, ...]) -> jax.Array:
            return jax.lax.with_sharding_constraint(jnp.zeros((layers, pages, *inner), held), where)

        def part(*inner: int) -> jax.Array | tuple[jax.Array, ...]:
            return tuple(zeros(1, inner) for _ in range(layers)) if by_layer else zeros(layers, inner)

        heads, key, value = cfg.attention_of(mixer).cached
        if together:
            return KVCache(k=part(page, 2 * heads, key), v=None)
        return KVCache(k=part(heads, key, page), v=part(heads, page, value))

    beside = pages_of(GLOBAL) if cfg.numbers(GLOBAL) else None
    return replace(pages_of(ATTENTION), states=empty_pool(cfg, mesh, states, dtype), globals=beside)


def cache_shape(pool: PagePool, params: Params, kv_cache: CacheFormat) -> tuple[int, int, str, bool, int, CacheFormat]:
    """The arguments of `empty_cache` after cfg and mesh, for the pages of `pool` and weights like `params`."""
    states = pool.states.pages * pool.shards if pool.states else 0
    return pool.pages * pool.shards, pool.page, params.embed_VD.dtype.name, params.unstacked, states, kv_cache


def copy_pages(
    cfg: ModelConfig, mesh: Mesh, cache: KVCache, copies: Sequence[PageCopy], *, states: bool = False
) -> KVCache:
    """Make copies in order, and return `cache`, updated in place. One dispatch makes up to COPIES of them.

    cfg, mesh: the base model's shape, and the devices. copies: the copies, by the pages' numbers in the whole pool.
    states: copy states instead.
    """
    made = copied_states if states else copied
    for begin in range(0, len(copies), COPIES):
        here = copies[begin : begin + COPIES]
        source_N, into_N = (np.zeros(COPIES, np.int32) for _ in range(2))
        source_N[: len(here)], into_N[: len(here)] = zip(*here, strict=True)
        cache = made(cfg, mesh, cache, source_N, into_N, np.int32(len(here)))
    return cache


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def copied(
    cfg: ModelConfig, mesh: Mesh, cache: KVCache, source_N: jax.Array, into_N: jax.Array, count: jax.Array
) -> KVCache:
    """Copy page source_N[i] to page into_N[i], for i < count in order, and return `cache`, updated in place.

    cfg, mesh: the base model's shape, and the devices. cache: of any shape. source_N, into_N int32: numbers in the
    whole pool. count: int32 scalar.
    """
    return by_mixer(cfg, mesh, cache, lambda part, where: _copied(where, part, source_N, into_N, count))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def copied_states(
    cfg: ModelConfig, mesh: Mesh, cache: KVCache, source_N: jax.Array, into_N: jax.Array, count: jax.Array
) -> KVCache:
    """Like `copied`, with the same arguments cfg, mesh, cache, source_N, into_N and count, but for states."""

    def one(part: jax.Array, where: NamedSharding) -> jax.Array:
        return _copied(where, part, source_N, into_N, count)

    return replace(cache, states=jax.tree.map(one, cache.states, pool_sharding(cfg, mesh)))


def _copied(
    where: NamedSharding, part: jax.Array, source_N: jax.Array, into_N: jax.Array, count: jax.Array
) -> jax.Array:
    shards = where.mesh.shape[FSDP]
    if not part.size:  # XLA of JAX 0.11 fails if `shard_map` passes it an empty array
        return part

    def local(part: jax.Array, source_N: jax.Array, into_N: jax.Array, count: jax.Array) -> jax.Array:
        mine, held, small = jax.lax.axis_index(FSDP), part.shape[1], part.dtype.itemsize == 1

        def copy(i: jax.Array, part: jax.Array) -> jax.Array:
            page = jax.lax.dynamic_slice_in_dim(part, source_N[i] % held, 1, axis=1)
            if shards == 1:
                return jax.lax.dynamic_update_slice_in_dim(part, page, into_N[i], axis=1)
            bits = jax.lax.bitcast_convert_type(page, jnp.uint8) if small else page  # no device sums float8
            bits = jax.lax.psum(jnp.where(source_N[i] // held == mine, bits, 0), FSDP)  # to every shard
            page = jax.lax.bitcast_convert_type(bits, page.dtype) if small else bits
            old = jax.lax.dynamic_slice_in_dim(part, into_N[i] % held, 1, axis=1)
            new = jnp.where(into_N[i] // held == mine, page, old)
            return jax.lax.dynamic_update_slice_in_dim(part, new, into_N[i] % held, axis=1)

        return jax.lax.fori_loop(0, count, copy, part)

    whole = PartitionSpec()
    made: jax.Array = jax.shard_map(
        local, mesh=where.mesh, in_specs=(where.spec, whole, whole, whole), out_specs=where.spec, check_vma=False
    )(part, source_N, into_N, count)
    return made


def attend_cached(
    mesh: Mesh,
    cache: KVCache,
    layer: Any,
    tables_SW: Array,
    start_S: jax.Array,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    *,
    window: int | None = None,
    sinks_H: jax.Array | None = None,
) -> tuple[KVCache, jax.Array]:
    """Write k and v, unless None, into a layer of the cache, then attend. Returns the new cache, and o [S, Q, H, d].

    Attention is causal: query i of a row sees positions 0 .. start_S + i, and with a window only the last `window` of
    them. Pages outside all rows' windows are not read, except by the TPU kernel. With Q > 1, all rows start at
    start_S[0].

    mesh: the `cache_mesh`; pages and rows are split over fsdp, heads over tensor. cache: updated in place. layer:
    the layer's number, an int if the cache is by layer. tables_SW int32: the pages of each row, as numbers in the row's
    own shard; 0: none, and writes to it are dropped. start_S int32: the position of each row's first query.
    q [S, Q, H, d] and k [S, Q, G, d]: rotated. v [S, Q, G, d]; if the cache has no array of values, the first
    dimensions of k. sinks_H: a score per head in the softmax that has no value.
    """
    if isinstance(cache.k, tuple) and isinstance(cache.v, tuple):
        own = KVCache(cache.k[layer], cache.v[layer])
        own, o = _attend_stacked(mesh, own, 0, tables_SW, start_S, q, k, v, window, sinks_H)
        before, after = slice(0, layer), slice(layer + 1, None)
        return KVCache(k=(*cache.k[before], own.k, *cache.k[after]), v=(*cache.v[before], own.v, *cache.v[after])), o
    return _attend_stacked(mesh, cache, layer, tables_SW, start_S, q, k, v, window, sinks_H)


def _attend_stacked(
    mesh: Mesh,
    cache: KVCache,
    layer: Any,
    tables_SW: Array,
    start_S: jax.Array,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    window: int | None,
    sinks_H: jax.Array | None,
) -> tuple[KVCache, Any]:
    # Explicitly per device (shard_map), because XLA gathers a cache that is written at computed places.
    held = _cache_spec(together=cache.v is None)
    unused = cache.v if cache.v is not None and not cache.v.size else None  # see `_copied`
    cache = cache if unused is None else replace(cache, v=None)
    rows, heads = PartitionSpec(FSDP), PartitionSpec(FSDP, None, TENSOR, None)
    local = jax.shard_map(
        partial(_attend_local, window, unused is not None),
        mesh=mesh,
        in_specs=(held, PartitionSpec(), rows, rows, heads, heads, heads, PartitionSpec(TENSOR)),
        out_specs=(held, heads),
        check_vma=False,
    )
    cache, o = local(cache, jnp.int32(layer), jnp.asarray(tables_SW), start_S, q, k, v, sinks_H)
    return cache if unused is None else replace(cache, v=unused), o


def _attend_local(
    window: int | None,
    latents: bool,
    cache: KVCache,
    layer: jax.Array,
    tables_SW: jax.Array,
    start_S: jax.Array,
    q_SQHd: jax.Array,
    k_SQGd: jax.Array | None,
    v_SQGd: jax.Array | None,
    sinks_H: jax.Array | None,
) -> tuple[KVCache, jax.Array]:
    """latents: whether the first dimensions of keys are their values. The cache then gets no array of values."""
    if latents:
        layers, pages, heads, _, page = cache.k.shape
        cache = replace(cache, v=jnp.zeros((layers, pages, heads, page, 0), cache.k.dtype))
    values = 0
    if k_SQGd is not None and v_SQGd is not None:
        values = v_SQGd.shape[-1] if latents else 0
        cache = _written(cache, layer, tables_SW, start_S, k_SQGd, v_SQGd[..., :0] if latents else v_SQGd)
    q_SQHd = q_SQHd * q_SQHd.shape[-1] ** -0.5
    if cache.v is None:
        return cache, paged_tpu.attend(cache.k, layer, tables_SW, start_S, q_SQHd, window)
    by_kernel = platform().kernels == "triton" and paged_gpu.takes(q_SQHd.shape[-1], values)
    attend = paged_gpu.attend if by_kernel else _attend_by_page
    o_SQHd = attend(cache.k, cache.v, layer, tables_SW, start_S, q_SQHd, window, sinks_H, values)
    return replace(cache, v=None) if latents else cache, o_SQHd


def _attend_by_page(
    cache_k: jax.Array,
    cache_v: jax.Array,
    layer: jax.Array,
    tables_SW: jax.Array,
    start_S: jax.Array,
    q_SQHd: jax.Array,
    window: int | None = None,
    sinks_H: jax.Array | None = None,
    values: int = 0,
) -> jax.Array:
    """The result of `paged_gpu.attend` for the same arguments. values: how many dimensions of a key are its value if
    the cache has no array of values.
    """
    S, Q, H, d = q_SQHd.shape
    (G, P), values = cache_v.shape[2:4], values or cache_v.shape[-1]

    # A row's queries and the query heads that share a key-value head are rows of one matrix.
    q = q_SQHd.reshape(S, Q, G, H // G, d).transpose(0, 2, 3, 1, 4).reshape(S, G, H // G * Q, d)
    seen_SQ = start_S[:, None] + jnp.arange(Q, dtype=jnp.int32)
    seen = jnp.tile(seen_SQ, (1, H // G))[:, None, :, None]

    def attended(rows: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        """o of several rows, up to the end of the longest row."""
        q, seen, tables = rows

        def page(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            top, total, out = state
            here_S = jax.lax.dynamic_index_in_dim(tables, i, axis=1, keepdims=False)
            k_SGdP = cache_k.at[layer, here_S].get(mode="promise_in_bounds").astype(q.dtype)
            if cache_v.shape[-1]:
                v_SGPd = cache_v.at[layer, here_S].get(mode="promise_in_bounds").astype(q.dtype)
            else:
                v_SGPd = jnp.swapaxes(k_SGdP[:, :, :values], 2, 3)
            scores = jnp.einsum("sgqd,sgdp->sgqp", q, k_SGdP, preferred_element_type=jnp.float32)
            places = i * P + jnp.arange(P)
            within = places <= seen if window is None else (places <= seen) & (places > seen - window)
            scores = jnp.where(within, scores, _MASKED)
            higher = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.exp(scores - higher)
            shrink = jnp.exp(top - higher)
            part = jnp.einsum(
                "sgqp,sgpd->sgqd", weights.astype(v_SGPd.dtype), v_SGPd, preferred_element_type=jnp.float32
            )
            return higher, total * shrink + jnp.sum(weights, axis=-1, keepdims=True), out * shrink + part

        state = (
            jnp.full((*q.shape[:3], 1), _MASKED, jnp.float32),
            jnp.zeros((*q.shape[:3], 1), jnp.float32),
            jnp.zeros((*q.shape[:3], values), jnp.float32),
        )
        pages: Any = jnp.minimum(jnp.max(seen) // P + 1, tables.shape[1])
        # The first page in the window cancels the contribution of earlier pages (weights of exp(0)).
        first: Any = 0
        if platform().host_decides:
            pages = tables.shape[1]  # all
        elif window is not None:  # an unused slot of a decode step has no page, and would start at the first page
            here_S1 = jnp.take_along_axis(tables, jnp.min(seen, axis=(1, 2)) // P, axis=1, mode="fill", fill_value=0)
            used = (here_S1 > 0)[:, :, None, None]
            first = jnp.maximum(jnp.min(jnp.where(used, seen, jnp.max(seen))) - window + 1, 0) // P
        top, total, out = jax.lax.fori_loop(first, pages, page, state)
        if sinks_H is not None:
            total = total + jnp.exp(jnp.repeat(sinks_H.astype(jnp.float32).reshape(G, -1), Q, axis=1)[..., None] - top)
        return (out / total).astype(q_SQHd.dtype)

    if on_cpu() and Q == 1 and S > _TOGETHER and S % _TOGETHER == 0:
        groups = jax.tree.map(lambda x: x.reshape(-1, _TOGETHER, *x.shape[1:]), (q, seen, tables_SW))
        o: jax.Array = jax.lax.map(attended, groups)
    else:
        o = attended((q, seen, tables_SW))
    return o.reshape(S, G, H // G, Q, values).transpose(0, 3, 1, 2, 4).reshape(S, Q, H, values)


def _written(
    cache: KVCache,
    layer: jax.Array,
    tables_SW: jax.Array,
    start_S: jax.Array,
    k_SQGd: jax.Array,
    v_SQGd: jax.Array,
) -> KVCache:
    """The cache with new keys and values from position start_S on in each row. Positions without a page are dropped."""
    k_SQGd, v_SQGd = _stored(k_SQGd, cache.k.dtype), _stored(v_SQGd, cache.k.dtype)
    S, Q = k_SQGd.shape[:2]
    by_scatter = cache.v is None or on_nvidia() or (on_cpu() and Q == 1 and S > 1)
    if not by_scatter:
        return _written_in_runs(cache, layer, tables_SW, start_S, k_SQGd, v_SQGd)
    P, N = cache.k.shape[2 if cache.v is None else 4], cache.k.shape[1]
    positions_SQ = start_S[:, None] + jnp.arange(Q, dtype=jnp.int32)
    page_SQ = jnp.take_along_axis(tables_SW, positions_SQ // P, axis=1, mode="fill", fill_value=0)
    nowhere_SQ = N + jnp.arange(S * Q, dtype=jnp.int32).reshape(S, Q)  # dropped, and unique as declared below
    page_SQ, place_SQ = jnp.where(page_SQ == 0, nowhere_SQ, page_SQ), positions_SQ % P

    def at(part: jax.Array, *place: Any) -> Any:
        return part.at[layer, page_SQ, *place]

    once: dict[str, Any] = {"mode": "drop", "unique_indices": True}
    if cache.v is None:
        return KVCache(k=at(cache.k, place_SQ).set(paged_tpu.interleaved(k_SQGd, v_SQGd), **once), v=None)
    everything = slice(None)
    return KVCache(
        k=at(cache.k, everything, everything, place_SQ).set(k_SQGd, **once),
        v=at(cache.v, everything, place_SQ).set(v_SQGd, **once),
    )


def _stored(x: jax.Array, dtype: Any) -> jax.Array:
    """Convert to the format of the cache. Numbers beyond the largest float8 become that number, not NaN."""
    if dtype.itemsize == 1:
        x = jnp.clip(x, -_MOST_FLOAT8, _MOST_FLOAT8)
    return x.astype(dtype)


def _written_in_runs(
    cache: KVCache,
    layer: jax.Array,
    tables_SW: jax.Array,
    start_S: jax.Array,
    k_SQGd: jax.Array,
    v_SQGd: jax.Array,
) -> KVCache:
    """Like `_written`, with an update in place for each run of positions, which is fast on CPUs.

    TPUs write whole pages. For a column of a page, they would transpose the cells of all layers, and do so again to
    attend.
    """
    S, Q, G, d = k_SQGd.shape
    P, run = cache.k.shape[4], min(_RUN, Q)
    k_SGdQ, v_SGQd = k_SQGd.transpose(0, 2, 3, 1), v_SQGd.transpose(0, 2, 1, 3)

    def write(i: jax.Array, cache: KVCache) -> KVCache:
        row, first = i // (Q // run), i % (Q // run) * run
        begin = start_S[row] + first
        page = tables_SW[row, begin // P]

        def into(part: Any, new: jax.Array, axis: int) -> jax.Array:
            at: list[Any] = [layer, page, 0, 0, 0]
            kept = page == 0
            if on_cpu():
                at[axis] = begin % P
            else:
                places = jnp.arange(P) - begin % P
                new = jnp.take(new, jnp.clip(places, 0, run - 1), axis=axis - 1)
                kept = kept | jnp.expand_dims((places < 0) | (places >= run), tuple(range(1, 5 - axis)))
            old = jax.lax.dynamic_slice(part, at, (1, *new.shape))
            return jax.lax.dynamic_update_slice(part, jnp.where(kept, old, new[None]), at)

        new_k = jax.lax.dynamic_slice(k_SGdQ, (row, 0, 0, first), (1, G, d, run))
        new_v = jax.lax.dynamic_slice(v_SGQd, (row, 0, first, 0), (1, G, run, v_SGQd.shape[-1]))
        return KVCache(k=into(cache.k, new_k, 4), v=into(cache.v, new_v, 3))

    written: KVCache = jax.lax.fori_loop(0, S * (Q // run), write, cache)
    return written
