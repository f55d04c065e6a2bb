"""Kernels that loop over the chunks of linear attention equal XLA's loop, and so do their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close

from tinkerflow.backend.compute.kernels import delta_chunks_gpu
from tinkerflow.backend.compute.models.layers.delta_rule import _by_kernel, _in_loop

n, B, h, r, c = 4, 2, 2, 2, 32  # chunks, rows, key heads, value heads of each, tokens of a chunk


@pytest.mark.parametrize("branching", [False, True], ids=["rows", "rows with branches"])
@pytest.mark.parametrize(("k", "v"), [(24, 40), (16, 32)], ids=["tiles that are not full", "full tiles"])
def test_kernels_equal_the_loop(branching: bool, k: int, v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(k)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(0.3 * random.standard_normal(shape), jnp.float32)

    def share(*shape: int) -> jax.Array:
        return jax.nn.sigmoid(array(*shape))

    S, slopes = array(B, h, r, k, v), (array(B, n * c, h * r, v), array(B, h, r, k, v))
    tokens, heads = (array(n, B, h, c, k), array(n, B, h, c, k)), (n, B, h, r, c)
    parts = (
        *tokens,
        array(*heads, c) / c,
        array(*heads, v),
        array(*heads, k),
        array(*heads, c),
        share(*heads),
        share(*heads),
    )
    turns = None
    if branching:  # chunk 2 of the first row starts from the state after chunk 0, and so does chunk 3
        turns = jnp.array([[0, 0], [0, 0], [1, 0], [1, 1]], bool), jnp.array([[1, 0], [0, 1], [0, 0], [0, 0]], bool)

    @partial(jax.jit, static_argnums=0)
    def differentiated(mix: Any, S: jax.Array, parts: Any) -> Any:
        (o, end), pull = jax.vjp(lambda S, parts: mix(S, parts, turns), S, parts)
        return (o, end), pull((slopes[0], slopes[1].reshape(end.shape)))

    monkeypatch.setattr(delta_chunks_gpu, "mix_chunks", partial(delta_chunks_gpu.mix_chunks, interpret=True))
    (o, end), gradients = differentiated(partial(_by_kernel, dtype=jnp.float32), S, parts)
    (expected_o, expected_end), expected = differentiated(_in_loop, S, parts)
    close(o, expected_o, ulps=64)
    close(end.reshape(S.shape), expected_end.reshape(S.shape), ulps=64)
    jax.tree.map(lambda one, other: close(one, other, ulps=256), gradients, expected)
    rounded, _ = _by_kernel(S, parts, turns, dtype=jnp.bfloat16)
    error = 64 * jnp.finfo(jnp.float32).eps * jnp.maximum(abs(o), jnp.sqrt(jnp.mean(o * o)))  # as `close` allows
    assert ((o - error).astype(jnp.bfloat16) <= rounded).all() and (rounded <= (o + error).astype(jnp.bfloat16)).all()
