"""The attention kernels of GPUs and TPUs, interpreted on a CPU, against the loop over pages, and their cache writes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import get_min_heads_per_blk
from tests.compute.sampler.test_kv_cache import PAGE, scattered
from tests.compute.shapes import QWEN3_0_6B, config_like

from tinkerflow.backend.compute.kernels import paged_gpu, paged_tpu
from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.platforms import CUDA, TPU, compiling_for
from tinkerflow.backend.compute.sampler import kv_cache
from tinkerflow.backend.compute.sampler.kv_cache import KVCache, cache_sharding, empty_cache
from tinkerflow.backend.spec.commands import CacheFormat

SMALL = QWEN3_0_6B | {"num_hidden_layers": 2}
ENDS = {1: [160, 129, 128, 65, 33, 32, 2, 1], 32: [160, 96, 64, 32]}  # by queries of a row: the last position + 1


def stacked(queries: int, head_dim: int) -> tuple[KVCache, Any, Any, Any]:
    """A cache with three layers of different content, page tables, the rows' starts, and queries."""
    rng, ends = np.random.default_rng(queries), ENDS[queries]
    caches = [scattered(ends, np.random.default_rng(seed), head_dim)[0] for seed in range(3)]
    _, tables_SW = scattered(ends, np.random.default_rng(0), head_dim)
    cache = KVCache(k=jnp.concatenate([one.k for one in caches]), v=jnp.concatenate([one.v for one in caches]))
    q = jnp.asarray(rng.standard_normal((len(ends), queries, 8, head_dim)), jnp.float32)
    return cache, jnp.asarray(tables_SW), jnp.asarray(ends, jnp.int32) - queries, q


def together(cache: KVCache) -> Any:
    """The same cache in the layout of TPUs."""
    return paged_tpu.interleaved(cache.k.transpose(0, 1, 4, 2, 3), cache.v.transpose(0, 1, 3, 2, 4))


@pytest.mark.parametrize("programs", [1, 264], ids=["one program for each row", "several programs for each row"])
@pytest.mark.parametrize(("head_dim", "window"), [(16, None), (24, 40)])
@pytest.mark.parametrize("queries", ENDS)
def test_the_kernel_of_gpus(
    queries: int, head_dim: int, window: int | None, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_gpu, "_PROGRAMS", programs)
    cache, tables_SW, start_S, q = stacked(queries, head_dim)
    sinks_H = jnp.linspace(-3, 3, q.shape[2]) if window else None
    args = cache.k, cache.v, jnp.int32(1), tables_SW, start_S, q, window, sinks_H
    expected = kv_cache._attend_by_page(*args)
    np.testing.assert_allclose(paged_gpu.attend(*args, interpret=True), expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("queries", [1, pytest.param(32, marks=pytest.mark.thorough)])
def test_float8_pages_are_attended_as_their_stored_numbers(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tables_SW, start_S, q = stacked(queries, 128)
    small = jax.tree.map(lambda part: part.astype(jnp.float8_e4m3fn), cache)
    wide = jax.tree.map(lambda part: part.astype(jnp.float32), small)
    rest = jnp.int32(1), tables_SW, start_S, q
    expected = kv_cache._attend_by_page(wide.k, wide.v, *rest)
    np.testing.assert_array_equal(kv_cache._attend_by_page(small.k, small.v, *rest), expected)
    np.testing.assert_allclose(
        paged_gpu.attend(small.k, small.v, *rest, interpret=True), expected, rtol=1e-4, atol=5e-5
    )
    monkeypatch.setattr(paged_tpu, "ragged_paged_attention", reference_ragged_attention)
    np.testing.assert_allclose(paged_tpu.attend(together(small), *rest), expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("queries", ENDS)
def test_the_kernel_of_gpus_takes_values_that_are_a_part_of_keys(queries: int) -> None:
    cache, tables_SW, start_S, q = stacked(queries, 48)
    args = cache.k, cache.v[..., :0], jnp.int32(1), tables_SW, start_S, q, None, None, 32
    own = cache.k[..., :32, :].swapaxes(3, 4)
    assert paged_gpu.takes(48, 32) and paged_gpu.takes(576, 512) and not paged_gpu.takes(24, 20)
    expected = kv_cache._attend_by_page(cache.k, own, *args[2:6])
    np.testing.assert_allclose(kv_cache._attend_by_page(*args), expected, rtol=1e-4, atol=5e-5)
    np.testing.assert_allclose(paged_gpu.attend(*args, interpret=True), expected, rtol=1e-4, atol=5e-5)


def reference_ragged_attention(*args: Any, num_kv_pages_per_block: int, num_queries_per_block: int, **more: Any) -> Any:
    """JAX's reference, because its interpreter of TPU kernels does not support reshaped references."""
    return ref_ragged_paged_attention(*args, **more)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("queries", ENDS)
def test_tpu_kernel_gets_arguments_that_match_its_reference(
    queries: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tables_SW, start_S, q = stacked(queries, 128)
    expected = kv_cache._attend_by_page(cache.k, cache.v, jnp.int32(1), tables_SW, start_S, q, window)
    monkeypatch.setattr(paged_tpu, "ragged_paged_attention", reference_ragged_attention)
    o = paged_tpu.attend(together(cache), jnp.int32(1), tables_SW, start_S, q, window)
    np.testing.assert_allclose(o, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("queries", ENDS)
def test_all_platforms_write_equal_caches(queries: int) -> None:
    cache, tables_SW, start_S, q = stacked(queries, 16)
    tables_SW = tables_SW.at[-1].set(0)  # a row without pages is not written
    new = q[:, :, :2], q[:, :, 2:4]
    expected = kv_cache._written(cache, jnp.int32(1), tables_SW, start_S, *new)
    assert (expected.k != cache.k).any()
    with compiling_for(CUDA):
        written = kv_cache._written(cache, jnp.int32(1), tables_SW, start_S, *new)
    np.testing.assert_array_equal(written.k, expected.k)
    np.testing.assert_array_equal(written.v, expected.v)
    with compiling_for(TPU):
        apart = kv_cache._written(cache, jnp.int32(1), tables_SW, start_S, *new)
        both = kv_cache._written(KVCache(k=together(cache), v=None), jnp.int32(1), tables_SW, start_S, *new)
    np.testing.assert_array_equal(apart.k, expected.k)
    np.testing.assert_array_equal(apart.v, expected.v)
    np.testing.assert_array_equal(both.k, together(expected))


def kernel_supports_float8(heads: int) -> bool:
    """Whether JAX's kernel supports this number of key-value heads."""
    try:
        get_min_heads_per_blk(heads, 2 * heads, jnp.bfloat16, jnp.float8_e4m3fn)
    except ValueError:
        return False
    return True


def test_keys_and_values_share_an_array_for_the_tpu_kernel() -> None:
    mesh = make_mesh(1, 1)

    def made(cfg: ModelConfig, kv_cache: CacheFormat = "full") -> KVCache:
        return empty_cache(cfg, mesh, 6, PAGE, "float32", False, 0, kv_cache)

    wide = config_like(SMALL, head_dim=128)
    assert made(wide).v is not None
    with compiling_for(TPU):
        cache = made(wide)
        assert cache.v is None
        assert cache.k.shape == (wide.layers, 6, PAGE, 2 * 8, 128)
        assert cache.k.sharding.is_equivalent_to(cache_sharding(wide, mesh, together=True), 5)
        assert all(made(config_like(SMALL, head_dim=size)).v is not None for size in (64, 256))
        for number in (1, 2, 3, 4, 8, 16, 24, 32):
            cfg = config_like(SMALL, num_attention_heads=number, num_key_value_heads=number)
            assert (made(cfg, "float8").v is None) is kernel_supports_float8(number)
