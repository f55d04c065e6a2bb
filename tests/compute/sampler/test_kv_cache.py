"""Attention over pages: unused slots and windows, and rounding in a cache in float8."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.sampler import kv_cache
from tinkerflow.backend.compute.sampler.kv_cache import KVCache, attend_cached

PAGE, G, H, D, PAGES_OF_ROW = 32, 2, 4, 16, 5


def scattered(lengths: list[int], rng: np.random.Generator, d: int = D) -> tuple[KVCache, np.ndarray[Any, Any]]:
    """A cache of one layer, and page tables for rows of these lengths: pages of random numbers in a random order."""
    needed = [-(-length // PAGE) for length in lengths]
    free = iter(rng.permutation(sum(needed)) + 1)
    tables_SW = np.zeros((len(lengths), PAGES_OF_ROW), np.int32)
    for row, pages in enumerate(needed):
        tables_SW[row, :pages] = [next(free) for _ in range(pages)]

    def cells(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal((1, sum(needed) + 1, G, *shape)), jnp.float32).at[:, 0].set(0)

    return KVCache(k=cells(d, PAGE), v=cells(PAGE, d)), tables_SW


def test_unused_slots_do_not_read_pages_before_the_window() -> None:
    cache, tables_SW = scattered([160, 150] + [0] * 14, np.random.default_rng(7))
    q = jnp.ones((16, 1, H, D), jnp.float32)
    start_S = jnp.asarray([159, 149] + [0] * 14, jnp.int32)

    def attend(cache: KVCache) -> Any:
        return kv_cache._attend_by_page(cache.k, cache.v, jnp.int32(0), jnp.asarray(tables_SW), start_S, q, 40)

    before = jnp.asarray(tables_SW[:2, :3].ravel())
    broken = KVCache(k=cache.k.at[:, before].set(np.nan), v=cache.v.at[:, before].set(np.nan))
    np.testing.assert_array_equal(attend(broken)[:2], attend(cache)[:2])


def test_float8_cache_rounds_to_the_nearest_number_and_saturates() -> None:
    cache, tables_SW = scattered([33], np.random.default_rng(7))
    cache = KVCache(*(part.astype(jnp.float8_e4m3fn) for part in (cache.k, cache.v)))
    values = np.zeros((1, 1, G, D), np.float32)
    values[..., :5] = [0.3, -17, 1e-9, 1e4, -np.inf]
    q, new = jnp.ones((1, 1, H, D)), jnp.asarray(values)
    cache, _ = attend_cached(make_mesh(1, 1), cache, jnp.int32(0), tables_SW, jnp.int32([32]), q, new, new)
    page = int(tables_SW[0, 1])
    for found in (cache.k[0, page, 0, :5, 0], cache.v[0, page, 0, 0, :5]):
        assert found.astype(jnp.float32).tolist() == [0.3125, -16, 0, 448, -448]


def test_empty_values_of_latents_are_not_passed_to_shard_map() -> None:
    """XLA of JAX 0.11 ends the process if they are, and if there are several devices."""
    mesh, pages = make_mesh(1, 1), 3
    cache = KVCache(k=jnp.zeros((1, pages, 1, D, PAGE)), v=jnp.zeros((1, pages, 1, PAGE, 0)))
    q, key, tables_SW = jnp.ones((1, 1, H, D)), jnp.ones((1, 1, 1, D)), np.ones((1, PAGES_OF_ROW), np.int32)

    def attended(cache: KVCache) -> Any:
        return attend_cached(mesh, cache, jnp.int32(0), tables_SW, jnp.int32([0]), q, key, key[..., : D // 2])

    def copied(cache: KVCache) -> Any:
        where = NamedSharding(mesh, PartitionSpec())
        numbers = np.zeros(2, np.int32)
        return jax.tree.map(lambda part: kv_cache._copied(where, part, numbers, numbers, jnp.int32(1)), cache)

    for function in (attended, copied):
        traced = jax.make_jaxpr(function)(cache)
        mapped = [equation for equation in traced.eqns if equation.primitive.name == "shard_map"]
        assert mapped and all(one.aval.size for equation in mapped for one in (*equation.invars, *equation.outvars))
    after, o = attended(cache)
    assert after.v.shape == cache.v.shape and o.shape == (1, 1, H, D // 2)
