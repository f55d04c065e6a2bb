"""Grouped matmuls by blocks against `jax.lax.ragged_dot`, also for experts without rows and rows without an expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close

from tinkerflow.backend.compute.grouped import Groups, by_blocks
from tinkerflow.backend.compute.quantized import Int8

ROWS, INS, OUTS = 150, 12, 20


@pytest.mark.parametrize(
    "sizes", [(0, 90, 3, 0, 41, 0), (0, 0, 0, 0, 0, 0), (150, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 145)]
)
def test_products_and_gradients_are_those_of_ragged_dot(sizes):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((ROWS, INS), (6, INS, OUTS)))
    sizes_E = jnp.asarray(sizes, jnp.int32)

    def run(dot):
        def slope(x, weight):
            return jnp.sum(jnp.sin(dot(x, weight, sizes_E)))

        return dot(x, weight, sizes_E), jax.grad(slope, argnums=(0, 1))(x, weight)

    for found, wanted in zip(jax.tree.leaves(run(by_blocks)), jax.tree.leaves(run(jax.lax.ragged_dot)), strict=True):
        close(found, wanted)
    assert not np.asarray(by_blocks(x, weight, sizes_E))[sum(sizes) :].any()


def test_int8_matrices_have_their_own_scales_and_no_gradient():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(30, INS)), jnp.float32)
    values = jnp.asarray(rng.integers(-127, 128, (3, INS, OUTS)), jnp.int8)
    scale = jnp.asarray(rng.uniform(0.5, 1, (3, OUTS)), jnp.float32)
    expert_M = jnp.asarray([0] * 10 + [2] * 20)
    groups = Groups(jnp.asarray([10, 0, 20], jnp.int32), expert_M, expert_M)
    meant = values * scale[:, None, :]
    wanted, pull_wanted = jax.vjp(lambda x: jnp.einsum("mi,mio->mo", x, meant[expert_M]), x)
    found, pull = jax.vjp(lambda x: groups.dot(x, Int8(values, scale)), x)
    close(found, wanted)
    close(pull(found)[0], pull_wanted(wanted)[0])
