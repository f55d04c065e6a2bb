"""Products with frozen matrices, for any number of rows and every format of the matrix."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close

from tinkerflow.backend.compute.kernels import grouped_gpu
from tinkerflow.backend.compute.kernels.matmul import IN_PLACE, PACKED_IN_PLACE, OfLayer, matmul, matmuls
from tinkerflow.backend.compute.weights.quantized import FourBit, Int8, block_of, block_scales, packed

IN, OUT = 48, 80


def four_bit(matrices: np.ndarray, dtype: Any) -> FourBit:
    """Matrices [..., out, in] in NF4, on the devices. dtype: of the scales."""
    rows, block = matrices.reshape(-1, matrices.shape[-1]).astype(np.float32), block_of(matrices.shape[-1])
    halves, scale = packed(rows, block, dtype), block_scales(rows, block, dtype)
    return jax.tree.map(lambda part: jnp.asarray(part.reshape(*matrices.shape[:-1], -1)), FourBit(halves, scale))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "nf4"])
@pytest.mark.parametrize("shape", [(1,), (2, 1), (2, 16), (4, 16), (65,)], ids=str)
def test_matmul_gives_the_product_and_gradient_for_any_number_of_rows(shape: tuple[int, ...], kind: str) -> None:
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16 if kind == "bfloat16" else jnp.float32
    x, slope = (jnp.asarray(rng.normal(size=(*shape, size)), dtype) for size in (IN, OUT))
    if kind == "int8":
        values, scale = rng.integers(-127, 128, (OUT, IN)).astype(np.int8), rng.random(OUT).astype(np.float32)
        weight, meant = Int8(jnp.asarray(values), jnp.asarray(scale)), values * scale[:, None]
    elif kind == "nf4":
        weight = four_bit(rng.normal(size=(OUT, IN)), "float32")
        meant = weight.dense("float32")
    else:
        weight = jnp.asarray(rng.normal(size=(OUT, IN)), dtype)
        meant = np.asarray(weight, np.float32)

    @jax.jit
    def both(x: jax.Array, weight: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pull = jax.vjp(lambda x: matmul(x, weight), x)
        return y, *pull(slope)

    y, d_x = both(x, weight, slope)
    assert y.dtype == dtype
    ulps = 4 if dtype == jnp.bfloat16 else 128
    close(np.asarray(y, np.float32), np.asarray(x, np.float32) @ meant.T, ulps=ulps, dtype=dtype)
    close(np.asarray(d_x, np.float32), np.asarray(slope, np.float32) @ meant, ulps=ulps, dtype=dtype)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "nf4 of float32", "nf4 of bfloat16"])
@pytest.mark.parametrize("rows", [1, 60, PACKED_IN_PLACE + 1, IN_PLACE + 1])
def test_stacked_matrices_give_the_products_of_separate_ones(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows share one GPU kernel, and many rows use copies. A matrix of another kind is computed alone."""
    monkeypatch.setattr(grouped_gpu, "layer_products", partial(grouped_gpu.layer_products, interpret=True))
    monkeypatch.setattr(grouped_gpu, "_FEW_OUT", 32)  # several tiles in each direction, the last one partial
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16 if "bfloat16" in kind else jnp.float32

    def of_layer(layers: int, outs: int, kind: str = kind) -> OfLayer:
        stack: Any = rng.normal(size=(layers, outs, 320))
        if kind == "int8":
            stack = Int8(jnp.asarray(stack * 40, jnp.int8), jnp.asarray(rng.random((layers, outs)), jnp.float32))
        elif kind.startswith("nf4"):
            stack = four_bit(stack, dtype)
        else:
            stack = jnp.asarray(stack, dtype)
        return OfLayer(stack, jnp.int32(layers - 2))

    x = jnp.asarray(rng.normal(size=(rows, 1, 320)), dtype)
    weights = of_layer(3, OUT), of_layer(2, 24, "plain"), of_layer(2, 50)
    products = jax.jit(lambda x, weights: (matmuls(x, *weights), [matmul(x, weight.own) for weight in weights]))
    for y, alone in zip(*products(x, weights), strict=True):
        assert (y.shape, y.dtype) == (alone.shape, alone.dtype)
        ulps = 4 if dtype == jnp.bfloat16 else 512
        close(np.asarray(y, np.float32), np.asarray(alone, np.float32), ulps=ulps, dtype=dtype)
