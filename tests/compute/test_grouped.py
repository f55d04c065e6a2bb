"""Grouped matmuls against `jax.lax.ragged_dot`, also for experts without rows and rows without an expert."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.closeness import close
from tests.compute.test_matmul import four_bit

from tinkerflow.backend.compute.kernels import grouped_gpu, grouped_tpu
from tinkerflow.backend.compute.kernels.grouped import Groups, by_blocks, differentiable
from tinkerflow.backend.compute.kernels.matmul import OfLayer
from tinkerflow.backend.compute.platforms import CUDA, TPU, compiling_for
from tinkerflow.backend.compute.weights.quantized import Int8

ROWS, INS, OUTS = 150, 12, 20


KERNELS = (grouped_gpu, grouped_tpu)
for_gpus, for_tpus = (
    differentiable(functools.partial(of.product, interpret=True), functools.partial(of.outer, interpret=True))
    for of in KERNELS
)


@pytest.mark.parametrize("dot", [by_blocks, for_gpus, for_tpus], ids=["by blocks", "for GPUs", "for TPUs"])
@pytest.mark.parametrize(
    "sizes", [(0, 90, 3, 0, 41, 0), (0, 0, 0, 0, 0, 0), (150, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 145)]
)
def test_grouped_products_and_gradients_equal_ragged_dot(sizes, dot):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((ROWS, INS), (6, INS, OUTS)))
    sizes_E = jnp.asarray(sizes, jnp.int32)

    found, wanted = (run(each, x, weight, sizes_E) for each in (dot, jax.lax.ragged_dot))
    for one, other in zip(found[1:], wanted[1:], strict=True):
        close(one, other)
    if dot is by_blocks:
        assert not np.asarray(found[0])[sum(sizes) :].any()


@functools.partial(jax.jit, static_argnums=0)
def run(dot, x, weight, sizes_E):
    """The product; the product of the experts' rows alone, and the gradients of its sine."""
    mine_M1 = jnp.arange(ROWS)[:, None] < jnp.sum(sizes_E)  # the kernel does not write the others

    def slope(x, weight):
        return jnp.sum(jnp.where(mine_M1, jnp.sin(dot(x, weight, sizes_E)), 0))

    result, (d_x, d_weight) = dot(x, weight, sizes_E), jax.grad(slope, argnums=(0, 1))(x, weight)
    return result, jnp.where(mine_M1, result, 0), jnp.where(mine_M1, d_x, 0), d_weight


@pytest.mark.parametrize("kernels", KERNELS, ids=["for GPUs", "for TPUs"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(
    ("ins", "outs"),
    [
        (130, 200),
        (140, 128),  # on TPUs, XLA stores these matrices by rows, because the rows fill all lanes
        *(pytest.param(*shape, marks=pytest.mark.thorough) for shape in ((200, 4), (4, 130), (130, 640), (700, 130))),
    ],
)
def test_the_kernels_take_shapes_that_tiles_do_not_divide(ins, outs, dtype, kernels):
    """Several tiles in a dimension with a remainder, an adapter's rank, and two experts in one block of rows."""
    rng = np.random.default_rng(2)
    x_dtype = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    x, y = (jnp.asarray(rng.normal(size=(70, size)), x_dtype) for size in (ins, outs))
    weight = jnp.asarray(rng.integers(-9, 9, (3, ins, outs)), dtype)
    sizes_E = jnp.asarray([33, 0, 30], jnp.int32)
    expert_M = np.repeat([0, 2], [33, 30])
    wide = np.asarray(weight, np.float32)[expert_M]
    products = (
        (kernels.product(x, weight, sizes_E, transposed=False, interpret=True), x, wide),
        (kernels.product(y, weight, sizes_E, transposed=True, interpret=True), y, wide.swapaxes(1, 2)),
    )
    for found, rows, matrices in products:
        wanted = np.einsum("mi,mio->mo", np.asarray(rows[:63], np.float32), matrices)
        assert found.dtype == x_dtype
        close(np.asarray(found[:63], np.float32), np.asarray(jnp.asarray(wanted, x_dtype), np.float32), dtype=x_dtype)
    found = np.asarray(kernels.outer(x, y, sizes_E, interpret=True))
    for expert, (start, end) in enumerate([(0, 33), (33, 33), (33, 63)]):
        close(found[expert], np.asarray(x, np.float32)[start:end].T @ np.asarray(y, np.float32)[start:end])


@pytest.mark.parametrize(
    ("kind", "kernels", "target"),
    [("float32", grouped_gpu, CUDA), ("int8", grouped_gpu, CUDA), ("float32", grouped_tpu, TPU)],
)
def test_experts_of_a_layer_are_read_in_the_stack_of_all_layers(kind, kernels, target, monkeypatch):
    monkeypatch.setattr(kernels, "product", functools.partial(kernels.product, interpret=True))
    rng = np.random.default_rng(3)
    x, y = (jnp.asarray(rng.normal(size=(30, size)), jnp.float32) for size in (INS, OUTS))
    stack = jnp.asarray(rng.integers(-9, 9, (4, 3, INS, OUTS)), kind)
    expert_M = jnp.asarray([0] * 10 + [2] * 20)
    groups, layer = Groups(jnp.asarray([10, 0, 20], jnp.int32), expert_M, expert_M), jnp.int32(2)
    weight = Int8(stack, jnp.asarray(rng.uniform(0.5, 1, (4, 3, OUTS)), jnp.float32)) if kind == "int8" else stack
    wanted = groups.dot(x, jax.tree.map(lambda part: part[2], weight))
    with compiling_for(target):
        found = groups.dot(x, OfLayer(weight, layer))
    close(found, wanted)
    if kind == "float32":
        with compiling_for(target):
            found = groups.dot_transposed(y, OfLayer(stack, layer))
        close(found, groups.dot_transposed(y, stack[2]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_experts_of_a_layer_are_read_in_the_stack_of_all_layers(dtype, monkeypatch):
    """70 outputs take several tiles with a remainder. One expert has no rows."""
    monkeypatch.setattr(grouped_gpu, "product", functools.partial(grouped_gpu.product, interpret=True))
    monkeypatch.setattr(grouped_gpu, "_MOST_OUT", 32)
    rng = np.random.default_rng(4)
    x, weight = jnp.asarray(rng.normal(size=(40, 128)), dtype), four_bit(rng.normal(size=(4, 3, 70, 128)), dtype)
    weight = jax.tree.map(lambda part: part.swapaxes(2, 3), weight)
    expert_M = jnp.asarray([0] * 10 + [2] * 25 + [2] * 5)
    groups, layer = Groups(jnp.asarray([10, 0, 25], jnp.int32), expert_M, expert_M), jnp.int32(2)
    wanted = groups.dot(x, jax.tree.map(lambda part: part[2], weight))[:35]
    with compiling_for(CUDA):
        found = groups.dot(x, OfLayer(weight, layer))[:35]
    assert found.dtype == wanted.dtype == dtype
    close(
        np.asarray(found, np.float32),
        np.asarray(wanted, np.float32),
        ulps=4 if dtype == jnp.bfloat16 else 128,
        dtype=dtype,
    )


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
