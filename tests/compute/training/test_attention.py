"""Attention in blocks against plain NumPy, with trees that cross the blocks, windows and sinks."""

from __future__ import annotations

from functools import partial

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


def trees(seed, B, T):
    """ends_BT and positions_BT of random trees: each token continues a path before it, or begins another tree."""
    rng = np.random.default_rng(seed)
    ends, positions = np.full((2, B, T), T, np.int32)
    for row in range(B):
        path = []
        for column in range(T):
            if rng.random() < 0.15:
                kept = rng.integers(len(path) + 1) if rng.random() < 0.7 else 0
                ends[row, path[kept:]] = column
                path = path[:kept]
            positions[row, column] = len(path)
            path.append(column)
    return ends, positions


def seen_from(ends, positions, window):
    columns = np.arange(ends.shape[1])
    within = positions[:, :, None] - positions[:, None, :] < (window or len(columns))
    return (columns[:, None] >= columns) & (columns[:, None] < ends[:, None, :]) & within


@of_every_kind
@pytest.mark.parametrize("block", [16, 64])
def test_token_attends_to_its_example_causally(monkeypatch, block, window, sinks):
    monkeypatch.setattr(attention, "_BLOCK", block)
    rng = np.random.default_rng(0)
    B, T, H, G, d = 2, 64, 4, 2, 8
    q, k, v = (rng.normal(size=(B, T, heads, d)).astype(np.float32) for heads in (H, G, G))
    ends, positions = trees(0, B, T)
    attend = attention.attend_trees(jnp.asarray(ends), make_mesh(1, 1), positions_BT=jnp.asarray(positions))
    found = jax.jit(partial(attend, window=window, sinks_H=sinks))(q, k, v)
    k, v = (np.repeat(x, H // G, axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(d)
    weights = np.where(seen_from(ends, positions, window)[:, None], np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[:, None, None])
    close(found, np.einsum("bhts,bshd->bthd", weights / total, v), ulps=64)


@of_every_kind
@pytest.mark.parametrize("block", [16, 64])
def test_attention_gradient_matches_the_plain_formula(monkeypatch, block, window, sinks):
    monkeypatch.setattr(attention, "_BLOCK", block)
    rng = np.random.default_rng(1)
    q, k, v, slope = (jnp.asarray(rng.normal(size=(2, 64, heads, 8)), jnp.float32) for heads in (4, 2, 2, 4))
    ends, positions = map(jnp.asarray, trees(1, 2, 64))

    def plainly(q, k, v, sinks):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        seen = seen_from(ends, positions, window)
        scores = jnp.where(seen[:, None], jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(8), -1e30)
        sink = jnp.full((4,), -1e30) if sinks is None else sinks
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink[:, None, None], (2, 4, 64, 1))], axis=-1)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1)[..., :-1], v)

    def ours(q, k, v, sinks):
        attend = attention.attend_trees(ends, make_mesh(1, 1), positions_BT=positions)
        return attend(q, k, v, window=window, sinks_H=sinks)

    gradients = jax.jit(lambda *of: [jax.tree.leaves(jax.vjp(by, *of)[1](slope)) for by in (ours, plainly)])
    found, expected = gradients(q, k, v, sinks)
    for a, b in zip(found, expected, strict=True):
        close(a, b, ulps=64)


def test_windows_of_rows_without_shared_tokens_count_columns():
    q, k, v = (jnp.asarray(np.random.default_rng(2).normal(size=(2, 64, 2, 8)), jnp.float32) for _ in range(3))
    lengths = np.array([[20, 30, 14], [7, 40, 17]])
    ends = np.stack([np.repeat(row.cumsum(), row) for row in lengths]).astype(np.int32)
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in lengths]).astype(np.int32)
    how = {"window": 9, "sinks_H": None}
    plain = attention.attend_trees(jnp.asarray(ends), make_mesh(1, 1))(q, k, v, **how)
    tree = attention.attend_trees(jnp.asarray(ends), make_mesh(1, 1), positions_BT=jnp.asarray(positions))
    close(tree(q, k, v, **how), plain, ulps=8)
