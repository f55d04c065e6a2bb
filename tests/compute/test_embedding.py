"""The gradient of an embedding: tokens that occur often, and columns of a row in pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinkerflow.backend.compute.models.layers import embedding
from tinkerflow.backend.compute.models.layers.embedding import rows_of
from tinkerflow.backend.compute.platforms import CPU, CUDA, TPU, Platform, compiling_for

PLATFORMS = pytest.mark.parametrize("target", [CPU, CUDA, TPU], ids=["cpu", "cuda", "tpu"])


def gradient(table: jax.Array, ids: np.ndarray, slopes: jax.Array, target: Platform) -> jax.Array:
    with compiling_for(target):
        _, pull = jax.vjp(lambda table: rows_of(table, jnp.asarray(ids)), table)
        return pull(slopes)[0]


@PLATFORMS
def test_a_frequent_token_has_the_sum_of_all_its_gradients(target: Platform) -> None:
    """In bfloat16, 256 + 1 is 256."""
    ids = np.full((2, 1000), 3, np.int32)
    found = gradient(jnp.zeros((5, 4), jnp.bfloat16), ids, jnp.ones((2, 1000, 4), jnp.bfloat16), target)
    assert found.dtype == jnp.bfloat16
    assert (found == np.array([0, 0, 0, 2000, 0])[:, None]).all()


@PLATFORMS
@pytest.mark.parametrize("at_once", [1, 4, 7, 1024])
def test_gradients_are_those_of_plain_indexing(monkeypatch: pytest.MonkeyPatch, at_once: int, target: Platform) -> None:
    monkeypatch.setattr(embedding, "_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    ids, table = rng.integers(0, 6, (3, 7)), jnp.asarray(rng.normal(size=(8, 5)), jnp.float32)
    slopes = jnp.asarray(rng.integers(-8, 8, (3, 7, 5)), jnp.float32)  # whose sums are exact in any order
    assert (rows_of(table, jnp.asarray(ids)) == table[ids]).all()
    expected = np.zeros((8, 5), np.float32)
    np.add.at(expected, ids, np.asarray(slopes))
    assert (gradient(table, ids, slopes, target) == expected).all()


def test_no_gradient_on_a_gpu_adds_at_indices() -> None:
    """XLA would sort the index of each element."""
    ids = jnp.zeros((2, 8), int)
    with compiling_for(CUDA):
        text = str(jax.make_jaxpr(jax.grad(lambda table: rows_of(table, ids).sum()))(jnp.ones((5, 4))))
    assert "dot_general" in text and "scatter" not in text
