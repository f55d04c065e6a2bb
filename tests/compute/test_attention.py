"""Attention in blocks against plain NumPy, with segments that cross the blocks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from backend.compute import attention


@pytest.mark.parametrize("block", [16, 32, 64])
def test_a_token_sees_its_segment_up_to_itself(monkeypatch, block):
    monkeypatch.setattr(attention, "_BLOCK", block)
    rng = np.random.default_rng(0)
    B, T, H, G, d = 2, 64, 4, 2, 8
    q, k, v = (rng.normal(size=(B, T, heads, d)).astype(np.float32) for heads in (H, G, G))
    segments = np.sort(rng.integers(0, 4, (B, T)), axis=1).astype(np.int32)
    found = attention.attend_segments(jnp.asarray(segments))(q, k, v)
    k, v = (np.repeat(x, H // G, axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(d)
    seen = (segments[:, :, None] == segments[:, None, :]) & np.tri(T, dtype=bool)
    weights = np.where(seen[:, None], np.exp(scores), 0)
    expected = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    assert np.abs(found - expected).max() < 1e-5
