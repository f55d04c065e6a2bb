"""Kernels for rows of trees, interpreted on CPUs, against attention with a mask."""

from __future__ import annotations

import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import lower_for
from tests.compute.closeness import close

from tinkerflow.backend.compute.kernels import tree_gpu, tree_tpu
from tinkerflow.backend.compute.kernels.flash import flash_attention
from tinkerflow.backend.compute.kernels.tree import How, TreeRows, listed, sees
from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.platforms import CUDA, TPU, Platform, compiling_for

B, H, G = 2, 4, 2


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks smaller than a device's, so that a short row has many."""
    for module, names in ((tree_gpu, ("_QUERIES", "_KEYS", "_BACKWARD")), (tree_tpu, ("_BLOCK",))):
        for name in names:
            monkeypatch.setattr(module, name, 8 if name == "_QUERIES" else 16)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("target", [CUDA, TPU], ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("window", "sinks", "values"),
    [
        (5, [1.0, 0.0, -2.0, 4.0], 16),
        pytest.param(None, [1.0, 0.0, -2.0, 4.0], 8, marks=pytest.mark.thorough),
        pytest.param(5, None, 8, marks=pytest.mark.thorough),
    ],
)
def test_rows_of_trees_give_the_values_and_gradients_of_a_mask(
    target: Platform, window: int | None, sinks: list[float] | None, values: int
) -> None:
    check(target, forest(128, seed=1), window, sinks, values)


@pytest.mark.parametrize(
    ("target", "T"),
    [
        (CUDA, 32),
        pytest.param(CUDA, 256, marks=pytest.mark.thorough),
        pytest.param(TPU, 128, marks=pytest.mark.thorough),
        pytest.param(TPU, 1024, marks=pytest.mark.thorough),
    ],
)
def test_blocks_of_device_size_give_equal_results(target: Platform, T: int) -> None:
    check(target, forest(T, seed=2), None, None, 8)


def check(target: Platform, trees: TreeRows, window: int | None, sinks: list[float] | None, values: int) -> None:
    T, sinks_H = trees.ends_BT.shape[1], None if sinks is None else jnp.asarray(sinks)
    sizes = ((H, 8), (G, 8), (G, values), (H, values))
    rng = np.random.default_rng(0)
    q, k, v, slope = (jnp.asarray(rng.normal(size=(B, T, *size)), jnp.float32) for size in sizes)
    with compiling_for(target):
        kernel = flash_attention(make_mesh(1, 1), T, window, tree=True, interpret=True)
    assert kernel is not None
    ends, depths = trees

    @jax.jit
    def both(q: Any, k: Any, v: Any, slope: Any, ends: Any, depths: Any) -> Any:
        """Values and gradients of the kernels and of masked attention."""
        o, pull = jax.vjp(lambda q, k, v, sinks_H: kernel(q, k, v, ends, sinks_H, depths), q, k, v, sinks_H)
        rows = TreeRows(ends, depths)
        expected, pull_plain = jax.vjp(lambda q, k, v, sinks_H: plain(q, k, v, rows, window, sinks_H), q, k, v, sinks_H)
        return jax.tree.leaves((o, pull(slope))), jax.tree.leaves((expected, pull_plain(slope)))

    for found, expected in zip(*both(q, k, v, slope, ends, depths), strict=True):
        close(found, expected, ulps=64)


def plain(q: Any, k: Any, v: Any, trees: TreeRows, window: int | None, sinks_H: Any) -> jax.Array:
    """Attention with the mask of `trees`, which computes all scores together."""
    ends, depths = trees
    place = jnp.arange(q.shape[1])
    seen = (place[None] <= place[:, None]) & (place[:, None] < ends[:, None])
    if window is not None:
        seen &= depths[:, :, None] - depths[:, None] < window
    k, v = (jnp.repeat(x, H // G, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    if sinks_H is not None:
        more = jnp.broadcast_to(sinks_H[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, more], axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores)[..., : len(place)], v)


def forest(T: int, seed: int) -> TreeRows:
    """Rows of random trees of three levels and a sequence without branches, with padding at the end."""
    rows = []
    for row in range(B):
        draw = random.Random(seed + row)
        ends, depths = np.full(T, T), np.zeros(T, int)

        def grow(place: int, depth: int, levels: int, draw: Any = draw, ends: Any = ends, depths: Any = depths) -> int:
            """Write a node and its descendants from `place` on, and return their end."""
            limit = T - T // 8
            own = min(draw.choice([1, 2, 7, T // 8]), limit - place)
            after = place + own
            for _ in range(draw.choice([2, 3]) if levels else 0):
                after = grow(after, depth + own, levels - 1)
            ends[place : place + own], depths[place : place + own] = after, range(depth, depth + own)
            return after

        place = 0
        for levels in itertools.cycle((3, 0, 2)):
            if (place := grow(place, 0, levels)) == T - T // 8:
                break
        rows.append((ends, depths))
    ends_BT, positions_BT = (jnp.asarray(np.stack(x), jnp.int32) for x in zip(*rows, strict=True))
    return TreeRows(ends_BT, positions_BT)


@pytest.mark.parametrize("target", [CUDA, TPU], ids=lambda target: target.name)
def test_the_programs_for_devices_have_three_kernels_and_add_in_a_fixed_order(target: Platform) -> None:
    T = 1024
    with compiling_for(target):
        kernel = flash_attention(make_mesh(1, 1), T, 100, tree=True)
        assert kernel is not None

        def both(q: Any, k: Any, v: Any, ends: Any, depths: Any, sinks_H: Any) -> Any:
            o, pull = jax.vjp(lambda q, k, v: kernel(q, k, v, ends, sinks_H, depths), q, k, v)
            return pull(o)

        of_heads = (jax.ShapeDtypeStruct((B, T, heads, 64), jnp.bfloat16) for heads in (H, G, G))
        of_row, sinks_H = jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((H,), jnp.float32)
        text = lower_for(target.name, jax.jit(both), *of_heads, of_row, of_row, sinks_H).as_text()
    called = {CUDA.name: "@__gpu$xla.gpu.triton", TPU.name: "@tpu_custom_call"}[target.name]
    assert text.count(f"stablehlo.custom_call {called}") == 3
    assert "atomic" not in text
    assert "stablehlo.scatter" not in text


@pytest.mark.parametrize("window", [None, 3])
def test_seen_blocks_match_the_mask_and_are_listed_first(window: int | None) -> None:
    trees, n, m = forest(64, seed=3), 4, 8
    how, place = How(True, window, 1.0), np.arange(64)
    ends, depths = map(np.asarray, trees)
    seen = sees(how.window, place[:, None], place, ends[:, None], depths[:, :, None], depths[:, None])
    needed = seen.reshape(B, 64 // n, n, 64 // m, m).any(axis=(2, 4))
    found = np.asarray(how.seen_blocks(trees, n, m))
    assert needed.sum() < needed.size / 2
    assert found.sum() < needed.sum() * 1.5
    assert (found | ~needed).all()
    assert window is not None or (found == needed).all()
    places, counts = map(np.asarray, listed(jnp.asarray(found)))
    for b, i in itertools.product(range(B), range(64 // n)):
        assert list(places[b, i, : counts[b, i]]) == list(np.flatnonzero(found[b, i]))
