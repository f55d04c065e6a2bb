"""Offsets of Triton kernels reach all elements of arrays of any size. Kernels are lowered for GPUs, but not run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import pytest
from tests.accelerators.budgets import BUDGETS, SHORT_OFFSETS, Budget
from tests.accelerators.triton_ir import short_offsets
from tests.compiled import lower_for

from tinkerflow.backend.compute.kernels import (
    adapter_gpu,
    delta_chunks_gpu,
    delta_gpu,
    grouped_gpu,
    paged_gpu,
    softmax_gpu,
    tree_gpu,
    triton_calls,
)
from tinkerflow.backend.compute.kernels.delta_chunks_gpu import ChunkParts
from tinkerflow.backend.compute.kernels.matmul import OfLayer, matmuls
from tinkerflow.backend.compute.kernels.softmax import Product, Totals
from tinkerflow.backend.compute.kernels.tree import How, TreeRows
from tinkerflow.backend.compute.kernels.triton_calls import triton_call
from tinkerflow.backend.compute.models.lora import LoraPair
from tinkerflow.backend.compute.weights.quantized import FourBit

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def of_layers(dtype: Any) -> Case:
    """A matrix of Qwen3-14B for all layers: 3.6e9 numbers."""

    def product(x: Any, stack: Any, layer: Any) -> Any:
        return grouped_gpu.layer_products(x, [stack], [layer])

    return product, (array("bfloat16", 64, 5120), array(dtype, 40, 17408, 5120), array("int32"))


def of_packed_layers() -> Case:
    """A matrix [10240, 8192] for 80 layers: 3.4e9 bytes."""
    packed, scale = array("uint8", 80, 10240, 4096), array("bfloat16", 80, 10240, 128)

    def product(x: Any, packed: Any, scale: Any, layer: Any) -> Any:
        return grouped_gpu.layer_products(x, [FourBit(packed, scale)], [layer])

    return product, (array("bfloat16", 64, 8192), packed, scale, array("int32"))


def of_packed_experts() -> Case:
    def product(x: Any, packed: Any, scale: Any, sizes: Any, layer: Any) -> Any:
        return grouped_gpu.product(x, FourBit(packed, scale, "mxfp4"), sizes, layer, transposed=False)

    packed, scale = array("uint8", 36, 128, 1440, 2880), array("uint8", 36, 128, 90, 2880)  # gpt-oss-120b
    return product, (array("bfloat16", 64, 2880), packed, scale, array("int32", 128), array("int32"))


def of_experts(dtype: Any) -> Case:
    rows, experts = array("bfloat16", 64, 2048), array(dtype, 16, 128, 768, 2048)
    return partial(grouped_gpu.product, transposed=True), (rows, experts, array("int32", 128), array("int32"))


def pages(dtype: Any) -> Case:
    """The pages of Qwen3-4B on an L40S, whose keys have 3.4e9 numbers."""
    parts = array(dtype, 36, 721, 8, 128, 128), array(dtype, 36, 721, 8, 128, 128)
    q, tables = array("bfloat16", 64, 1, 32, 128), array("int32", 64, 32)
    return paged_gpu.attend, (*parts, array("int32"), tables, array("int32", 64), q)


def adapters() -> Case:
    def updated(x: Any, A: Any, B: Any, weights: Any, columns: Any, layer: Any) -> Any:
        updates = adapter_gpu.in_place(columns, A.shape[1])(x, [OfLayer(LoraPair(A, B), layer)] * 2)
        return tuple(updates), matmuls(x, *[OfLayer(weights, layer)] * 2, last=updates.last_step())

    stack, weights = array("bfloat16", 64, 4096, 10240), array("bfloat16", 64, 10240, 10240)
    return updated, (
        *(array("bfloat16", 64, 1, 10240), stack, stack, weights),
        *(array("int32", 64, 2), array("int32")),
    )


def states() -> Case:
    of_heads = (array("float32", 64, 32, 128),) * 3
    numbers = (array("float32", 64, 32),) * 2
    pool = array("float32", 24, 200, 32, 128, 128)
    return delta_gpu.step, (pool, array("int32"), array("int32", 64), *of_heads, *numbers)


def chunks() -> Case:
    n, B, c, k, v = 512, 16, 64, 128, 128
    of_keys = (array("float32", n, B, 16, c, k),) * 2
    of_heads = (array("float32", n, B, 32, c, size) for size in (v, k, c))
    decays = (array("float32", n, B, 32, c),) * 2

    def both(S: Any, *parts: Any) -> Any:
        o, pull = jax.vjp(
            lambda S, parts: delta_chunks_gpu.mix_chunks(S, parts, None, "bfloat16"), S, ChunkParts(*parts)
        )
        return o, pull(o)

    return both, (array("float32", B, 32, k, v), *of_keys, *of_heads, *decays)


def attention() -> Case:
    how = How(scale=0.1, window=None, interpret=False)

    def both(q: Any, k: Any, ends: Any, sinks: Any, numbers: Any) -> Any:
        tree = TreeRows(ends, ends)
        return (
            tree_gpu.KERNELS.forward(how, q, k, k, tree, sinks),
            tree_gpu.KERNELS.slopes(how, q, k, k, tree, q, numbers, numbers),
        )

    B, T, H = 16, 131072, 16
    queries, keys = array("bfloat16", B, T, H, 128), array("bfloat16", B, T, 8, 128)
    return both, (queries, keys, array("int32", B, T), array("float32", H), array("float32", B, H, T))


def vocabulary() -> Case:
    M, V = 16384, 151936

    def both(x: Any, head: Any, low: Any, B: Any, targets: Any, slope: Any) -> Any:
        given = Product(x, head, low, B, targets)
        totals = softmax_gpu.totals(given, keep=True)
        assert isinstance(totals, Totals)
        return softmax_gpu.slopes(given, totals, slope[:, 0], slope[:, 0], slope)

    return both, (
        *(array("bfloat16", M, 2560), array("bfloat16", V, 2560), array("bfloat16", M, 32)),
        *(array("float32", 32, V), array("int32", M, 1), array("float32", M, 1)),
    )


CASES = {
    "int8 weights": (of_layers("int8"), {"layer_product"}),
    "bfloat16 weights": (of_layers("bfloat16"), {"layer_product"}),
    "packed weights": (of_packed_layers(), {"packed_product"}),
    "packed experts": (of_packed_experts(), {"packed_product"}),
    "int8 experts": (of_experts("int8"), {"grouped_product"}),
    "float8 pages": (pages("float8_e4m3fn"), {"paged_attention"}),
    "bfloat16 pages": (pages("bfloat16"), {"paged_attention"}),
    "adapters": (adapters(), {"adapter_low", "adapter_update", "layer_product_adapted"}),
    "states": (states(), {"delta_step"}),
    "chunks": (chunks(), {"delta_chunks", "delta_chunk_states", "delta_chunks_backward"}),
    "attention": (attention(), {"tree_attention_forward", "tree_attention_dq", "tree_attention_dkv"}),
    "vocabulary": (vocabulary(), {"softmax_totals", "softmax_slopes_by_adapter"}),
}


def lowered(case: Case) -> Any:
    function, args = case
    assert any(each.size > 2**31 for each in args) or function.__name__ == "both"
    return lower_for("cuda", jax.jit(lambda *args: function(*args)), *args)


@pytest.mark.parametrize(("case", "kernels"), CASES.values(), ids=CASES)
def test_offsets_reach_all_of_a_large_array(case: Case, kernels: set[str]) -> None:
    assert short_offsets(lowered(case)) == {kernel: [] for kernel in kernels}


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (of_layers("int8"), {"layer_product": ["i8[40,1,17408,5120]"]}),
        (pages("float8_e4m3fn"), {"paged_attention": ["f8E4M3FN[36,721,8,128,128]"]}),
    ],
    ids=["int8 weights", "float8 pages"],
)
def test_check_without_the_workaround_names_the_kernel_and_the_array(
    case: Case, named: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_calls, "_wraps", lambda array: False)
    assert short_offsets(lowered(case)) == named
    broken, ((kernel, (array,)),) = Budget(BUDGETS[0].case, SHORT_OFFSETS, 0), named.items()
    assert not broken.holds(SHORT_OFFSETS.of({"short_offsets": named}))
    assert f"limit 0: {kernel} {array}" in broken.describe({"short_offsets": named})


def test_array_whose_offsets_cannot_be_widened_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_calls, "_widened", lambda: False)
    with pytest.raises(NotImplementedError, match=r"layer_product: array int8\[40, 1, 17408, 5120\]: offsets of 32"):
        lowered(of_layers("int8"))


def test_invalid_cuda_grid_is_refused() -> None:
    def call(*grid: int) -> Any:
        one = array("float32", 1)
        return jax.eval_shape(triton_call(lambda *_: None, grid=grid, name="wide", interpret=False, out_shape=one), one)

    call(2**31 - 1, 65535, 65535)
    for grid in ((2**31,), (1, 65536), (1, 1, 65536)):
        with pytest.raises(ValueError, match=r"kernel wide: grid .* CUDA takes at most"):
            call(*grid)
