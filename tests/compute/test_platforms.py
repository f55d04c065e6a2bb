"""Programs for NVIDIA GPUs and TPUs on a machine without one: JAX lowers them, and they contain the right kernels.

tests/benchmarks/speed.py runs them on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import lower_for
from tests.compute.conftest import Reference

from tinkerflow.backend.compute import platforms
from tinkerflow.backend.compute.mesh import make_mesh, replicated
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.params import by_layer, load_params
from tinkerflow.backend.compute.platforms import CPU, CUDA, TPU, TURING, compiling_for
from tinkerflow.backend.compute.sampler.decode import Rows, decided, decode
from tinkerflow.backend.compute.sampler.kv_cache import empty_cache
from tinkerflow.backend.compute.sampler.pages import PAGE
from tinkerflow.backend.compute.sampler.prefill import Piece, fill, prefill, score
from tinkerflow.backend.compute.sampler.prompt_scores import Widths, empty_queries
from tinkerflow.backend.compute.sampler.sampling import greedy_choice
from tinkerflow.backend.compute.sampler.snapshot_cache import empty_stack
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.compute.training.optimizer import fresh_state
from tinkerflow.backend.compute.training.train import make_steps
from tinkerflow.backend.compute.training.train_programs import adapter_like, batch_like
from tinkerflow.backend.compute.warming import like
from tinkerflow.backend.spec.commands import LoraSpec
from tinkerflow.backend.spec.optimizers import OPTIMIZERS

SLOTS, CHUNK, TOP, LENGTH = 4, 8, 5, 256


@pytest.fixture(params=[CUDA, TURING, TPU], ids=["cuda", "turing", "tpu"])
def platform(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a platform. Our code makes programs for it during the test."""
    with compiling_for(request.param):
        yield request.param.name


@pytest.fixture(params=["qwen3", "moe"])
def model(request: pytest.FixtureRequest) -> Reference:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    "base_weights", ["full", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("int8", "nf4"))]
)
def test_every_step_can_be_made_for_a_gpu_and_a_tpu(model: Reference, platform: str, base_weights: str) -> None:
    programs = dict(steps(model, base_weights))
    made = {name: lower_for(platform, function, *args).as_text() for name, (function, args) in programs.items()}
    if platforms.platform().host_decides:
        assert not [name for name in ("prefill", "score", "decode") if "stablehlo.case" in made[name]]
    experts = load_config(model.folder).experts > 0
    for name in ("forward_backward", "forward", "prefill", "decode"):
        assert "ragged_dot" not in made[name], "XLA knows a dense product only"
        kernels = {"triton": ("xla.gpu.triton",), "mosaic": ("gmm", "tpu_custom_call"), None: ()}
        assert all(kernel in made[name] for kernel in kernels[platforms.platform().kernels]) or not experts
        assert "triton" not in made[name] or platforms.platform() is CUDA
        assert "optimization_barrier" not in made[name] or name == "forward_backward", "and few rows turned around"


def steps(model: Reference, base_weights: str) -> Iterator[tuple[str, tuple[Callable[..., Any], tuple[Any, ...]]]]:
    """Every jitted function of training and sampling, and arguments for it."""
    cfg, mesh = load_config(model.folder), make_mesh(1, 1, 1)
    params = load_params(cfg, str(model.folder), mesh, "bfloat16", lambda line: None, base_weights=base_weights)
    assert by_layer(cfg, params) is params, "views of a stack are for XLA:CPU"
    lora, batch, whole = adapter_like(cfg, mesh, LoraSpec(32)), batch_like(mesh, 4, LENGTH), replicated(mesh)
    training = make_steps(cfg, mesh, Budget(1024, 2**30))
    yield "forward_backward", (training.backward, (params, lora, lora, batch))
    yield "forward", (training.forward, (params, lora, batch))
    for kind, spec in OPTIMIZERS.items():
        state = like(fresh_state(kind, lora), whole)
        yield kind, (training.optimize, (lora, lora, state, like(spec.vector(spec.example), whole)))
    stack = empty_stack(cfg, mesh, (32, 32), "bfloat16", False, False)
    cache = empty_cache(cfg, mesh, 4 * SLOTS, PAGE, "bfloat16", False)
    columns = np.zeros((SLOTS, 2), np.int32)
    rows = Rows(
        tokens_S=np.zeros(SLOTS, np.int32),
        positions_S=np.zeros(SLOTS, np.int32),
        tables_SW=np.zeros((SLOTS, LENGTH // PAGE), np.int32),
        columns_S2=columns,
        uniform_CS=np.zeros((CHUNK, SLOTS), np.float32),
        choice=greedy_choice(SLOTS),
    )
    host_decides, given = platforms.platform().host_decides, (params, stack, cache)
    started, count = (decided(rows, CHUNK), None) if host_decides else (rows, np.int32(CHUNK))
    yield "decode", (decode, (cfg, mesh, CHUNK, TOP, *given, started, count))
    widths = Widths(TOP, TOP, TOP)
    piece = Piece(
        tokens_BQ=np.zeros((SLOTS, 32), np.int32),
        start=np.int32(0),
        tables_BW=np.zeros((SLOTS, LENGTH // PAGE), np.int32),
        columns_B2=columns,
        score=np.bool_(True),
        queries=empty_queries(widths, SLOTS, 32),
    )
    if not host_decides:
        yield "prefill", (prefill, (cfg, mesh, widths, *given, piece))
        return
    yield "prefill", (fill, (cfg, mesh, *given, replace(piece, score=None, queries=None)))
    x_BQD = jax.ShapeDtypeStruct((SLOTS, 32, cfg.hidden), "bfloat16", sharding=whole)
    yield "score", (score, (mesh, widths, params, stack, x_BQD, columns, piece.queries))


def test_part_of_a_flag_name_is_no_known_flag() -> None:
    flags = ["--xla_cpu_max_isa=AVX2", "--xla_cpu_max", "--xla_cpu_no_such_flag"]
    assert platforms.known_flags(flags, ("jaxlib/libjax_common.so",)) == [True, False, False]


def test_installed_compiler_accepts_every_flag() -> None:
    """XLA ends a process that sets an unknown flag."""
    known = platforms.known_flags([*CUDA.flags, "--xla_gpu_no_such_flag=1"], CUDA.compilers)
    assert known == [True] * len(CUDA.flags) + [False]
    flags = " ".join(CUDA.flags)
    code = "import jax; print(jax.jit(lambda x: x + 1)(1))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2\n"


def test_platform_environment_keeps_variables_that_are_set() -> None:
    assert platforms.environment("cpu", {}, 1) == {}
    found = platforms.environment("cuda", {}, 2)
    assert found == {"XLA_FLAGS": " ".join(CUDA.flags), "XLA_CLIENT_MEM_FRACTION": "0.460"}
    ours = "--xla_gpu_shard_autotuning=true --xla_dump_to=/tmp/x"
    found = platforms.environment("cuda", {"XLA_FLAGS": ours, "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, 1)
    assert found == {"XLA_FLAGS": " ".join([*CUDA.flags[:-1], ours])}
    assert "XLA_CLIENT_MEM_FRACTION" not in platforms.environment("tpu", {}, 1)
    assert "XLA_FLAGS" not in platforms.environment("cuda", {"XLA_FLAGS": "/etc/flags"}, 1), "a file of flags"


def test_a_flag_is_left_out_where_no_compiler_is_found() -> None:
    assert platforms.known_flags(list(TPU.flags), ("no_such_package/libtpu.so",)) == [False] * len(TPU.flags)


@pytest.mark.parametrize(
    ("target", "dtype", "chosen", "precise"),
    [
        (CPU, "auto", "float32", False),
        (CUDA, "auto", "bfloat16", False),
        (TPU, "auto", "bfloat16", False),
        (CUDA, "float32", "float32", True),
        (TPU, "float32", "float32", True),
        (CPU, "bfloat16", "bfloat16", False),
    ],
)
def test_float32_is_float32(target: platforms.Platform, dtype: str, chosen: str, precise: bool) -> None:
    before = jax.config.jax_default_matmul_precision
    try:
        with compiling_for(target):
            assert platforms.settle_dtype(dtype) == chosen
            text = jax.jit(jnp.dot).lower(jnp.ones((8, 8), chosen), jnp.ones((8, 8), chosen)).as_text()
        assert ("precision = [HIGHEST, HIGHEST]" in text) == precise
    finally:
        jax.config.update("jax_default_matmul_precision", before)
