"""`apply_one` gives the same updates and gradients on every platform, with fewer matmuls on GPUs and TPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close

from tinkerflow.backend.compute.models.lora import LoraPair, apply_one
from tinkerflow.backend.compute.platforms import CPU, CUDA, TPU, Platform, compiling_for

B, T, D, R, OUTS = 2, 8, 16, 4, (12, 6, 6)


def drawn(dtype: Any) -> tuple[jax.Array, tuple[LoraPair, ...]]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return draw(B, T, D).astype(dtype), tuple(LoraPair(draw(R, D), draw(R, out)) for out in OUTS)


def summed(x: jax.Array, pairs: tuple[LoraPair, ...]) -> jax.Array:
    return sum((jnp.sum(jnp.sin(update.astype(jnp.float32))) for update in apply_one(x, pairs)), jnp.float32(0))


def on(target: Platform, x: jax.Array, pairs: tuple[LoraPair, ...]) -> Any:
    with compiling_for(target):
        return apply_one(x, pairs), jax.grad(summed, argnums=(0, 1))(x, pairs)


@pytest.mark.parametrize("target", [CUDA, TPU], ids=lambda target: target.name)
def test_lora_updates_and_gradients_equal_those_on_cpus(target):
    x, pairs = drawn(jnp.float32)
    for found, expected in zip(*(jax.tree.leaves(on(one, x, pairs)) for one in (target, CPU)), strict=True):
        close(found, expected, ulps=64)


def test_gradients_of_an_adapter_are_not_rounded_to_bfloat16_off_cpus():
    x, pairs = drawn(jnp.bfloat16)
    _, gradients = on(CUDA, x, pairs)[1]
    for leaf in jax.tree.leaves(gradients):
        assert leaf.dtype == jnp.float32
        assert not np.array_equal(leaf, leaf.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize(("target", "count"), [(CPU, 18), (CUDA, 12)])
def test_pairs_that_share_their_input_share_the_matmuls_with_it(target, count):
    x, pairs = drawn(jnp.float32)
    with compiling_for(target):
        program = jax.make_jaxpr(jax.grad(summed, argnums=(0, 1)))(x, pairs)
    # Forward, one with A and one with B of each pair. Backward, two for each of these.
    assert str(program).count("dot_general[") == count
