"""Training gives equal results on one device and on meshes. More devices reduce the memory of adapters on each."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import build

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.core.errors import UserError

TRAINED = "adamw,dimuon,full"


@functools.cache
def train(folder: Path, runs: str, devices: int, *axes: int) -> dict[str, Any]:
    """The results of `mesh_worker.py`."""
    worker = Path(__file__).with_name("mesh_worker.py")
    command = [sys.executable, *map(str, (worker, folder, runs, devices, *axes))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_device_count_that_the_mesh_axes_do_not_divide_is_refused():
    assert dict(make_mesh(0, 1).shape) == {"fsdp": 1, "expert": 1, "tensor": 1}
    with pytest.raises(UserError, match=r"1 device.* in 1 process.*, which tensor_parallel 2 x expert_parallel 3 must"):
        make_mesh(0, 2, 3)


@pytest.mark.parametrize(
    ("model", "runs", "devices", "axes"),
    [
        pytest.param("qwen3", TRAINED, 4, (0, 1, 2), marks=pytest.mark.thorough),
        ("moe", f"{TRAINED},supports", 8, (2, 2, 2)),
        ("qwen3", "adamw,supports", 4, (4, 1, 1, 4)),
        pytest.param("moe", TRAINED, 8, (1, 8, 1), marks=pytest.mark.thorough),
        pytest.param("gemma4_text", "adamw,sampled", 4, (2, 1, 2), marks=pytest.mark.thorough),
        pytest.param("glm4_moe_lite", "adamw,sampled", 8, (2, 2, 2), marks=pytest.mark.thorough),
        pytest.param("qwen3_5", "adamw,sampled", 4, (2, 1, 2), marks=pytest.mark.thorough),
    ],
)
def test_mesh_equals_one_device(model, runs, devices, axes, request, tmp_path):
    """Includes windows with wide heads, latent attention, linear attention, and rows that are split over devices."""
    made = request.getfixturevalue(model) if model in ("qwen3", "moe") else build(tmp_path, model, tied=False)
    folder = made.folder
    alone, found = train(folder, runs, 1, 1, 1, 1), train(folder, runs, devices, *axes)
    assert found["weights"]["planned"] == found["weights"]["held"], "the plan has the mesh of the group"
    if "supports" in runs:
        assert np.isclose(found["supports loss"], -8, rtol=1e-4) and np.isclose(alone["supports loss"], -8, rtol=1e-4)
        assert np.isclose(found["supports norm"], alone["supports norm"], rtol=1e-3)
    for name in set(runs.split(",")) - {"sampled", "supports"}:
        assert alone[f"{name} loss 2"] < alone[f"{name} loss 0"]
        for step in range(3):
            assert np.isclose(found[f"{name} loss {step}"], alone[f"{name} loss {step}"], rtol=1e-4)
            assert np.isclose(found[f"{name} norm {step}"], alone[f"{name} norm {step}"], rtol=1e-3)
        for one, other in zip(found[f"{name} logprobs"], alone[f"{name} logprobs"], strict=True):
            close_logprobs(one, other, ulps=2048)
        assert found[f"{name} compiled for a restored state"] == 0
        if name == "full" and axes[1] > 1:
            continue  # along the expert axis only experts are split
        # Norms are replicated, as in the base model, and so are matrices with sizes that the devices do not divide.
        assert alone[f"{name} held"] <= found[f"{name} held"] * devices < 1.1 * alone[f"{name} held"]
    if "sampled" in runs:
        assert found["tokens"] == alone["tokens"]
        close_logprobs(found["logprobs of tokens"], alone["logprobs of tokens"], ulps=2048)


def test_two_runs_on_a_mesh_are_bitwise_equal(qwen3):
    first = train(qwen3.folder, TRAINED, 4, 0, 1, 2)
    assert train(qwen3.folder, TRAINED, 4, 2, 1, 2) == first
