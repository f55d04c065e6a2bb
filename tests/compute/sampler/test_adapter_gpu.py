"""Kernels that read adapters in the stacks of all layers multiply every row by its own columns."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close

from tinkerflow.backend.compute.kernels import grouped_gpu
from tinkerflow.backend.compute.kernels.adapter_gpu import in_place
from tinkerflow.backend.compute.kernels.matmul import OfLayer, in_one_kernel, matmuls
from tinkerflow.backend.compute.models.lora import LoraPair
from tinkerflow.backend.compute.sampler.snapshot_cache import stack_apply

INS = 300  # several partial sums, and partial tiles
MANY = [(0, 0), (8, 24), (24, 32), (96, 136)]  # two adapters in one block, one in two blocks, and the base model


@pytest.mark.parametrize(
    ("rows", "tokens", "outs", "places"),
    [
        (1, 1, (70,), [(32, 288)]),
        (20, 1, (300, 70, 130), [(0, 0), (33, 41)]),
        (10, 4, (130, 70), MANY),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_adapter_updates_equal_those_of_whole_stacks(
    rows: int,
    tokens: int,
    outs: tuple[int, ...],
    places: list[tuple[int, int]],
    dtype: jnp.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random, width = np.random.default_rng(rows), -(-max(end for _, end in places) // 32) * 32
    columns_B2 = np.array([places[i % len(places)] for i in random.permutation(rows)], np.int32)
    seen = np.zeros(width, bool)
    for first, end in columns_B2:
        seen[first // 32 * 32 : -(-end // 32) * 32] |= end > first

    def array(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(dtype)

    x_BTi = array(rows, tokens, INS)
    pairs = [LoraPair(array(2 + number, width, INS), array(2 + number, width, o)) for number, o in enumerate(outs)]
    for part in jax.tree.leaves(pairs):
        part[:, ~seen] = np.nan  # columns of blocks that no row uses are not read; otherwise all rows would be NaN
    given = [OfLayer(pair, np.int32(1 + number)) for number, pair in enumerate(pairs)]
    known = [
        LoraPair(*(np.where(seen[:, None], part[one.layer], 0) for part in jax.tree.leaves(one.stack))) for one in given
    ]
    expected = jax.jit(stack_apply(columns_B2, width))(x_BTi, tuple(known))
    weights = [OfLayer(array(3, o, INS), np.int32(2)) for o in outs]
    monkeypatch.setattr(grouped_gpu, "layer_products", partial(grouped_gpu.layer_products, interpret=True))

    @jax.jit
    def products(x_BTi: jax.Array, given: list[OfLayer], weights: list[OfLayer]) -> Any:
        assert in_one_kernel(x_BTi, *weights)
        updates = in_place(columns_B2, width, interpret=True)(x_BTi, given)
        return tuple(updates), matmuls(x_BTi, *weights), matmuls(x_BTi, *weights, last=updates.last_step())

    found, plain, sums = products(x_BTi, given, weights)
    closely = partial(close, ulps=64 if dtype == jnp.float32 else 4, scale=500.0, dtype=dtype)
    for y, product, update in zip(sums, plain, expected, strict=True):
        closely(*(np.asarray(part, np.float32) for part in (y, product + update)))
    for one, other, o in zip(found, expected, outs, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype) == ((rows, tokens, o), dtype)
        one, other = (np.asarray(part, np.float32) for part in (one, other))
        assert not np.any(one[columns_B2[:, 1] == 0]), "rows of the base model use no column"
        closely(one, other)


def test_a_batch_of_the_base_model_alone_reads_no_block() -> None:
    pair = OfLayer(LoraPair(*(np.full((1, 32, 16), np.nan, np.float32) for _ in range(2))), np.int32(0))
    update = jax.jit(lambda columns, x, pairs: tuple(in_place(columns, 32, interpret=True)(x, pairs)))
    updates = update(np.zeros((3, 2), np.int32), np.ones((3, 1, 16), np.float32), [pair, pair])
    assert not np.any(np.asarray(updates))
