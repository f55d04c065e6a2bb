"""Attention in blocks against plain NumPy, with segments that cross the blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close

from tinkerflow.backend.compute import attention
from tinkerflow.backend.compute.mesh import make_mesh


@pytest.mark.parametrize("block", [16, 32, 64])
def test_a_token_sees_its_segment_up_to_itself(monkeypatch, block):
    monkeypatch.setattr(attention, "_BLOCK", block)
    rng = np.random.default_rng(0)
    B, T, H, G, d = 2, 64, 4, 2, 8
    q, k, v = (rng.normal(size=(B, T, heads, d)).astype(np.float32) for heads in (H, G, G))
    segments = np.sort(rng.integers(0, 4, (B, T)), axis=1).astype(np.int32)
    found = attention.attend_segments(jnp.asarray(segments), make_mesh(1, 1))(q, k, v)
    k, v = (np.repeat(x, H // G, axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(d)
    seen = (segments[:, :, None] == segments[:, None, :]) & np.tri(T, dtype=bool)
    weights = np.where(seen[:, None], np.exp(scores), 0)
    expected = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    close(found, expected, ulps=64)


@pytest.mark.parametrize("block", [16, 64])
def test_its_derivative_is_that_of_what_it_computes(monkeypatch, block):
    monkeypatch.setattr(attention, "_BLOCK", block)
    rng = np.random.default_rng(1)
    q, k, v, slope = (jnp.asarray(rng.normal(size=(2, 64, heads, 8)), jnp.float32) for heads in (4, 2, 2, 4))
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (2, 64)), axis=1), jnp.int32)

    def plainly(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        seen = (segments[:, :, None] == segments[:, None, :]) & jnp.tri(64, dtype=bool)
        scores = jnp.where(seen[:, None], jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(8), -1e30)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)

    found = jax.vjp(attention.attend_segments(segments, make_mesh(1, 1)), q, k, v)[1](slope)
    expected = jax.vjp(plainly, q, k, v)[1](slope)
    for a, b in zip(found, expected, strict=True):
        close(a, b, ulps=64)
