"""A row that is split over devices gives the logprobs and gradients of one device."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.compute.closeness import close, close_logprobs
from tests.compute.conftest import FAMILY_SHAPE, SHAPE, random_model
from tests.compute.shapes import QWEN3_0_6B, config_like, config_of

from tinkerflow.backend.compute.planning.training_memory import check_context_parallel, step_sizes
from tinkerflow.backend.compute.training.budget import Budget
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import GroupConfig

ALONE = "1x1x1"


def train(folder: Path, *meshes: str) -> dict[str, np.ndarray]:
    """The arrays that `context_worker.py` writes."""
    file = folder / "found.npz"
    worker = Path(__file__).with_name("context_worker.py")
    done = subprocess.run(
        [sys.executable, worker, folder, file, ALONE, *meshes], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    with np.load(file) as found:
        return dict(found)


@pytest.mark.parametrize(
    ("model", "meshes"),
    [
        ("qwen3", ("2x1x1", "8x1x1")),
        pytest.param("qwen3", ("4x1x1",), marks=pytest.mark.thorough),
        pytest.param("qwen3", ("4x1x2",), marks=pytest.mark.thorough),
        pytest.param("gpt_oss", ("4x2x1",), marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", ("2x4x1", "1x8x1"), marks=pytest.mark.thorough),
        pytest.param("gemma3_text", ("8x1x1",), marks=pytest.mark.thorough),
        pytest.param("gemma4_text", ("4x1x1",), marks=pytest.mark.thorough),
        pytest.param("glm4_moe_lite", ("8x1x1",), marks=pytest.mark.thorough),
    ],
)
def test_row_pieces_equal_one_device(model, meshes, tmp_path):
    """Includes two key-value heads, trees, all parameters, windows, sinks, an expert axis and latent attention."""
    shape = {**SHAPE, **FAMILY_SHAPE.get(model, {}), "num_attention_heads": 8, "tie_word_embeddings": False}
    shape |= {"num_key_value_heads": 8} if model == "glm4_moe_lite" else {}
    random_model(model, shape).eval().save_pretrained(tmp_path)
    found = train(tmp_path, *meshes)
    for mesh in meshes:
        fsdp, expert, tensor = (int(size) for size in mesh.split("x"))
        if expert == 1:  # otherwise a device has rows for any routing, most of which are padding
            assert found[f"{mesh} flops"] * fsdp * tensor == pytest.approx(found[f"{ALONE} flops"], rel=0.25)
        for name in [name for name in found if name.startswith(mesh) and not name.endswith("flops")]:
            is_close = close_logprobs if name.endswith(" 0") and "attention" not in name else close
            # Gemma 4's gradients cancel most: on one device they are up to 6,500 ulps from those in float64.
            is_close(found[name], found[name.replace(mesh, ALONE)], ulps=8192 if model == "gemma4_text" else 4096)


@pytest.mark.parametrize(
    ("size", "axes", "rule"),
    [
        (3, (3, 1, 1), "must be a power of two"),
        (4, (2, 1, 1), "must divide the 2 device(s) that rows of training are split over"),
        (4, (2, 6, 1), "must divide expert_parallel 6, or be a multiple of it"),
        (8, (8, 1, 2), "its product with tensor_parallel 2 must divide the 8 attention heads"),
    ],
)
def test_unsplittable_devices_or_heads_are_refused(size, axes, rule):
    cfg, (fsdp, expert, tensor) = config_like(QWEN3_0_6B, num_attention_heads=8), axes
    plain = GroupConfig("m", "float32", fsdp, tensor, 512, 0, 4, 4, "", expert=expert)
    check_context_parallel(cfg, plain, fsdp * expert)
    with pytest.raises(UserError) as caught:
        check_context_parallel(cfg, replace(plain, context_parallel=size), fsdp * expert)
    assert caught.value.message == f"base model 'm': context_parallel {size}; {rule}"


def test_context_parallel_refuses_linear_attention():
    plain = GroupConfig("m", "float32", 2, 1, 512, 0, 4, 4, "")
    with pytest.raises(UserError, match="context_parallel 2; must be 1 for models with linear attention"):
        check_context_parallel(config_of("fd"), replace(plain, context_parallel=2), 2)


def test_steps_of_long_rows_have_the_tokens_of_their_part():
    config = GroupConfig("m", "bfloat16", 8, 1, 131072, 0, 4, 4, "")
    sizes = {
        most: step_sizes(replace(config, context_parallel=most), Budget(32768, 2**30), 131072) for most in (1, 2, 8)
    }
    assert sizes == {1: [4096 << n for n in range(6)], 2: [4096 << n for n in range(5)], 8: [4096, 8192, 16384]}
