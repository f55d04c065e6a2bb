"""Attention in blocks against plain NumPy, with segments that cross the blocks, windows and sinks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.training import attention

SINKS = jnp.array([-1.0, 0.5, 2.0, 5.0])
HOW = [(None, None), (2, None), (7, None), (40, None), (None, SINKS), (20, SINKS)]
of_every_kind = pytest.mark.parametrize(("window", "sinks"), HOW, ids=lambda value: str(value)[:8])


def seen_from(segments, T, window):
    behind = np.arange(T)[:, None] - np.arange(T)[None, :]
    within = (behind >= 0) & (behind < (window or T))
    return (segments[:, :, None] == segments[:, None, :]) & within


@of_every_kind
@pytest.mark.parametrize("block", [16, 32, 64])
def test_a_token_sees_its_segment_up_to_itself(monkeypatch, block, window, sinks):
    monkeypatch.setattr(attention, "_BLOCK", block)
    rng = np.random.default_rng(0)
    B, T, H, G, d = 2, 64, 4, 2, 8
    q, k, v = (rng.normal(size=(B, T, heads, d)).astype(np.float32) for heads in (H, G, G))
    segments = np.sort(rng.integers(0, 4, (B, T)), axis=1).astype(np.int32)
    attend = attention.attend_segments(jnp.asarray(segments), make_mesh(1, 1))
    found = attend(q, k, v, window=window, sinks_H=sinks)
    k, v = (np.repeat(x, H // G, axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(d)
    weights = np.where(seen_from(segments, T, window)[:, None], np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[:, None, None])
    close(found, np.einsum("bhts,bshd->bthd", weights / total, v), ulps=64)


@of_every_kind
@pytest.mark.parametrize("block", [16, 64])
def test_its_derivative_is_that_of_what_it_computes(monkeypatch, block, window, sinks):
    monkeypatch.setattr(attention, "_BLOCK", block)
    rng = np.random.default_rng(1)
    q, k, v, slope = (jnp.asarray(rng.normal(size=(2, 64, heads, 8)), jnp.float32) for heads in (4, 2, 2, 4))
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (2, 64)), axis=1), jnp.int32)

    def plainly(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        seen = seen_from(segments, 64, window)
        scores = jnp.where(seen[:, None], jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(8), -1e30)
        sink = jnp.full((4,), -1e30) if sinks is None else sinks
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink[:, None, None], (2, 4, 64, 1))], axis=-1)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1)[..., :-1], v)

    def ours(q, k, v):
        return attention.attend_segments(segments, make_mesh(1, 1))(q, k, v, window=window, sinks_H=sinks)

    found = jax.vjp(ours, q, k, v)[1](slope)
    expected = jax.vjp(plainly, q, k, v)[1](slope)
    for a, b in zip(found, expected, strict=True):
        close(a, b, ulps=64)
