"""Programs for Turing GPUs, which have neither bfloat16 nor our kernels, run on CPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.conftest import Reference

from tinkerflow.backend.compute import platforms
from tinkerflow.backend.compute.kernels.matmul import matmul
from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.lora_weights import init_lora
from tinkerflow.backend.compute.models.params import load_params
from tinkerflow.backend.compute.platforms import CPU, CUDA, SMALL_CUDA, TURING, compiling_for
from tinkerflow.backend.compute.sampler import kv_cache
from tinkerflow.backend.compute.sampler.pages import PAGE
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.compute.training.token_losses import choose
from tinkerflow.backend.compute.training.train import DeviceBatch, make_steps
from tinkerflow.backend.spec.commands import LoraSpec
from tinkerflow.backend.spec.losses import packed_inputs


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        *(("7.5", TURING), ("8.0", CUDA), ("8.9", SMALL_CUDA), ("9.0", CUDA), ("10.0", CUDA), ("12.1", SMALL_CUDA)),
        ("gfx942", CUDA),
    ],
)
def test_the_compute_capability_chooses_the_profile(
    capability: str, expected: platforms.Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = type("Gpu", (), {"compute_capability": capability})()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert platforms.platform() is expected


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_products_in_float16_neither_overflow_nor_lose_small_rows(size: float) -> None:
    rng = np.random.default_rng(0)
    x, slope = (jnp.asarray(size * rng.normal(size=(3, width)), jnp.bfloat16) for width in (256, 128))
    x, slope = x.at[0].set(0), slope.at[1, :4].set(1000 * slope[1, :4])
    weight = jnp.asarray(0.02 * rng.normal(size=(128, 256)), jnp.bfloat16)
    with compiling_for(TURING):
        assert "f16" in jax.jit(matmul).lower(x, weight).as_text()
        y, pull = jax.vjp(lambda x: matmul(x, weight), x)
        (d_x,) = pull(slope)
    wide, x, slope = (np.asarray(array, np.float64) for array in (weight, x, slope))
    for found, exact in ((y, x @ wide.T), (d_x, slope @ wide)):
        assert found.dtype == jnp.bfloat16
        of_rows = np.abs(exact).max(axis=1, keepdims=True)  # bfloat16 rounds by 2**-9 of a number
        assert np.all(np.abs(np.asarray(found, np.float64) - exact) <= 2**-8 * of_rows)


def test_non_finite_row_has_no_finite_product() -> None:
    x = jnp.asarray([[1.0, jnp.inf], [jnp.nan, 1.0], [1.0, 1.0]], jnp.bfloat16)
    with compiling_for(TURING):
        y = matmul(x, jnp.ones((4, 2), jnp.bfloat16))
    assert not np.isfinite(y[:2]).any() and np.isfinite(y[2]).all()


@pytest.mark.parametrize("base_weights", ["full", "nf4"])
def test_training_step_equals_float32_gradients(qwen3: Reference, base_weights: Any) -> None:
    cfg, mesh, rng = load_config(qwen3.folder), make_mesh(1, 1), np.random.default_rng(0)
    lora = jax.tree.map(
        lambda leaf: rng.normal(scale=0.1, size=leaf.shape).astype(np.float32), init_lora(cfg, LoraSpec(4), 0)
    )
    ints = rng.integers(0, cfg.vocab, (2, 64, 4), np.int32)
    ints[..., 1], ints[..., 2] = np.arange(64), 1
    floats = np.ones((2, 64, len(packed_inputs()), 1), np.float32)
    batch = DeviceBatch(ints_BTI=ints, floats_BTJK=floats, choice=choose("cross_entropy", {}))
    found = {}
    for target, dtype in ((CPU, "float32"), (CPU, "bfloat16"), (TURING, "bfloat16")):
        with compiling_for(target):
            params = load_params(cfg, str(qwen3.folder), mesh, dtype, base_weights=base_weights)
            steps = make_steps(cfg, mesh, Budget(1024, 2**30))
            grads, scored = steps.backward(params, lora, jax.tree.map(jnp.zeros_like, lora), batch)
            leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(grads))]
            found[target, dtype] = np.concatenate([[float(scored.loss)], *leaves])
    exact, rounded, ours = found.values()
    assert np.linalg.norm(exact[1:]) > 0 and not np.array_equal(rounded, ours)
    assert abs(ours[0] - exact[0]) <= 2**-8 * exact[0]
    assert np.linalg.norm((ours - exact)[1:]) <= 1.2 * np.linalg.norm((rounded - exact)[1:])


@pytest.mark.parametrize("window", [None, 40])
def test_attention_over_all_pages_equals_attention_over_seen_pages(window: int | None) -> None:
    rng, start_S = np.random.default_rng(0), np.array([3, 200], np.int32)
    k, v = (jnp.asarray(rng.normal(size=(1, 9, 2, *sides)), jnp.float32) for sides in ((16, PAGE), (PAGE, 16)))
    tables_SW = np.array([[1, 0, 0, 0], [2, 3, 0, 0]], np.int32)
    q_SQHd = jnp.asarray(rng.normal(size=(2, 1, 4, 16)), jnp.float32)
    found = []
    for target in (CPU, TURING):
        with compiling_for(target):
            attend = jax.jit(lambda *arrays: kv_cache._attend_by_page(*arrays, window))
            found.append(np.asarray(attend(k, v, 0, tables_SW, start_S, q_SQHd)))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)
