"""Decoding gives equal results with weights that kernels read from the stack of all layers."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compute.sampler.conftest import make_tiny, save_tiny

from tinkerflow.backend.compute.kernels import adapter_gpu, grouped_gpu
from tinkerflow.backend.compute.platforms import CUDA, compiling_for
from tinkerflow.backend.compute.sampler import forward as forward_module
from tinkerflow.backend.compute.sampler.forward import StepInputs, run_layers
from tinkerflow.backend.compute.sampler.kv_cache import empty_cache
from tinkerflow.backend.compute.sampler.pages import PAGE
from tinkerflow.backend.compute.sampler.snapshot_cache import empty_stack


@pytest.mark.parametrize("base_weights", ["full", pytest.param("nf4", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "family",
    ["qwen3", pytest.param("gpt_oss", marks=pytest.mark.thorough)],
    ids=["layers alike", "two kinds of layers, with experts"],
)
def test_weights_read_in_place_give_equal_results(
    family: str, base_weights: Any, qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alike = family == "qwen3" and base_weights == "full"
    tiny = qwen if alike else make_tiny(tmp_path, family, base_weights)
    cache = empty_cache(tiny.cfg, tiny.mesh, 3, PAGE, "float32", False)
    random, empty = np.random.default_rng(0), empty_stack(tiny.cfg, tiny.mesh, (32, 32), "float32", False, False)
    stack = jax.tree.map(lambda part: jnp.asarray(random.normal(size=part.shape) / 4, jnp.float32), empty)
    tokens_SQ, start_S = np.array([[5], [7]], np.int32), jnp.zeros(2, jnp.int32)
    pages = {"tables_SW": np.array([[1], [2]], np.int32), "columns_S2": np.array([[0, 0], [8, 24]], np.int32)}

    def hidden() -> Any:
        inputs = StepInputs(tokens_SQ, start_S, **pages)
        return run_layers(tiny.cfg, tiny.mesh, tiny.params, stack, cache, None, inputs)[2]

    expected = hidden()
    with compiling_for(CUDA):
        names = forward_module._in_place(tiny.cfg, tiny.params)
    assert {"q", "k", "v", "o", "gate", "up", "down"} <= names
    monkeypatch.setattr(forward_module, "_in_place", lambda cfg, params: names)
    for kernel in ("layer_products", "product"):
        monkeypatch.setattr(grouped_gpu, kernel, partial(getattr(grouped_gpu, kernel), interpret=True))
    monkeypatch.setattr(adapter_gpu, "in_place", partial(adapter_gpu.in_place, interpret=True))
    np.testing.assert_allclose(hidden(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "base_weights", "axes"),
    [
        ("gpt_oss", "nf4", (2, 1, 2)),
        *(
            pytest.param(family, base_weights, axes, marks=pytest.mark.thorough)
            for family, base_weights, axes in (
                ("qwen3", "full", (2, 1, 2)),
                ("qwen3", "int8", (1, 1, 2)),
                ("gpt_oss", "full", (1, 2, 2)),
                ("glm4_moe_lite", "full", (2, 1, 2)),
            )
        ),
    ],
)
def test_each_device_reads_its_part_of_a_matrix_in_place(
    family: str, base_weights: str, axes: tuple[int, int, int], tmp_path: Path
) -> None:
    save_tiny(tmp_path, family)
    worker = Path(__file__).with_name("in_place_worker.py")
    command = [sys.executable, *map(str, (worker, tmp_path, base_weights, *axes))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["difference"] < 1e-5
    assert found["shapes"] and all(shape in found["parts"] for shape in found["shapes"])
    assert set(found["of_inputs"]) == {False, True}
