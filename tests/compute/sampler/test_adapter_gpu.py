"""Kernels that read adapters in the stack of all layers multiply every row by its own columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close

from tinkerflow.backend.compute.kernels.adapter_gpu import in_place
from tinkerflow.backend.compute.models.lora import LoraPair
from tinkerflow.backend.compute.sampler.snapshot_cache import stack_apply

WIDTH, LAYERS, INS, OUTS = 160, 2, 700, 70  # sums in several parts, and tiles that are not full


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_updates_are_those_of_the_whole_stack(tokens: int, dtype: jnp.dtype) -> None:
    random = np.random.default_rng(tokens)
    # two adapters in one block, one in two blocks; no row uses the second and third
    places = [(0, 0), (8, 24), (24, 32), (96, 136)]
    columns_B2 = np.array([places[i] for i in random.integers(0, 4, 20)], np.int32)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), dtype)

    x_BTi, stack = array(20, tokens, INS), LoraPair(array(LAYERS, WIDTH, INS), array(LAYERS, WIDTH, OUTS))
    # Columns that no row uses are not read. Otherwise all rows would be NaN.
    stack = LoraPair(A=stack.A.at[:, 32:96].set(jnp.nan), B=stack.B.at[:, 32:96].set(jnp.nan))
    found = in_place(columns_B2, WIDTH, interpret=True)(x_BTi, stack, jnp.int32(1))
    known = LoraPair(*(jnp.nan_to_num(part[1]) for part in (stack.A, stack.B)))
    (expected,) = stack_apply(columns_B2, WIDTH)(x_BTi, (known,))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert not np.any(np.asarray(found, np.float32)[columns_B2[:, 1] == 0]), "rows of the base model use no column"
    one, other = (np.asarray(part, np.float32) for part in (found, expected))
    close(one, other, ulps=64 if dtype == jnp.float32 else 4, scale=200.0, dtype=dtype)


def test_a_batch_of_the_base_model_alone_reads_no_block() -> None:
    stack = LoraPair(*(jnp.full((1, 32, 16), jnp.nan) for _ in range(2)))
    assert not np.any(
        in_place(np.zeros((3, 2), np.int32), 32, interpret=True)(jnp.ones((3, 1, 16)), stack, jnp.int32(0))
    )
