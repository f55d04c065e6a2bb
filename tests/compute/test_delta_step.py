"""Kernels that update states of linear attention in their pool equal `_step`, and change no other state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close

from tinkerflow.backend.compute.kernels import delta_gpu, delta_tpu
from tinkerflow.backend.compute.models.layers.delta_rule import _step

STEPS = pytest.mark.parametrize("step", [delta_gpu.step, delta_tpu.step], ids=["GPU", "TPU"])
PLACES = (3, 0, 1, 5)  # the second row has no state


@STEPS
@pytest.mark.parametrize(("H", "k", "v"), [(2, 24, 40), (16, 16, 32)], ids=["tiles that are not full", "full tiles"])
def test_a_token_changes_states_of_its_row_and_layer_alone(step: Callable[..., Any], H: int, k: int, v: int) -> None:
    random = np.random.default_rng(H)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    pool, B, layer = array(2, 6, H, k, v).at[:, 0].set(0), len(PLACES), 1
    pool = pool.at[layer, PLACES[3]].set(jnp.nan)  # left by an ended sequence; the new row has no token yet
    q, key, value = array(B, 1, H, k), array(B, 1, H, k), array(B, 1, H, v)
    g, beta = -jnp.abs(array(B, 1, H)), jax.nn.sigmoid(array(B, 1, H))
    decay_BH = jnp.exp(g[:, 0]).at[3].set(0)
    given = (jnp.int32(layer), jnp.asarray(PLACES), q[:, 0], key[:, 0], value[:, 0], decay_BH, beta[:, 0])
    o_BHv, changed = jax.jit(lambda *given: step(*given, interpret=True))(pool, *given)

    before = pool[layer, np.array(PLACES)].at[3].set(0)
    expected, after = _step(before, q, key, value, g, beta, jnp.zeros(()))
    # Sums over keys have another order, so the bits differ.
    close(o_BHv, expected[:, 0], ulps=64)
    own = np.array([0, 2, 3])
    close(changed[layer, np.array(PLACES)[own]], after[own], ulps=64)
    untouched = np.ones((2, 6), bool)
    untouched[layer, [PLACES[row] for row in own]] = False
    np.testing.assert_array_equal(changed[untouched], pool[untouched])
