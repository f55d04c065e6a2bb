"""The same training on one device and on meshes; what adapters take of a device falls by the number of devices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compute.closeness import close_logprobs

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.errors import UserError


def train(folder: Path, devices: int, *axes: int) -> dict[str, Any]:
    worker = Path(__file__).with_name("mesh_worker.py")
    command = [sys.executable, *map(str, (worker, folder, devices, *axes))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_devices_that_the_axes_do_not_divide_are_refused_by_name():
    assert dict(make_mesh(0, 1).shape) == {"fsdp": 1, "expert": 1, "tensor": 1}
    with pytest.raises(UserError, match=r"1 device.* in 1 process.*, which tensor_parallel 2 x expert_parallel 3 must"):
        make_mesh(0, 2, 3)


@pytest.mark.parametrize(
    ("model", "devices", "axes"), [("qwen3", 4, (0, 1, 2)), ("moe", 8, (2, 2, 2)), ("moe", 8, (1, 8, 1))]
)
def test_a_mesh_gives_the_numbers_of_one_device(model, devices, axes, request):
    folder = request.getfixturevalue(model).folder
    alone, found = train(folder, 1, 1, 1, 1), train(folder, devices, *axes)
    for name in ("adamw", "dimuon", *(("full",) if model == "qwen3" else ())):
        assert alone[f"{name} loss 2"] < alone[f"{name} loss 0"]
        for step in range(3):
            assert np.isclose(found[f"{name} loss {step}"], alone[f"{name} loss {step}"], rtol=1e-4)
            assert np.isclose(found[f"{name} norm {step}"], alone[f"{name} norm {step}"], rtol=1e-3)
        for one, other in zip(found[f"{name} logprobs"], alone[f"{name} logprobs"], strict=True):
            close_logprobs(one, other, ulps=2048)
        assert found[f"{name} compiled for a restored state"] == 0
        if name != "full":
            assert found[f"{name} held"] * devices == alone[f"{name} held"]
    if model == "qwen3":  # norms are whole on each device, as the base model's are
        assert alone["full held"] <= found["full held"] * devices < 1.1 * alone["full held"]


def test_two_runs_on_a_mesh_are_alike_bit_for_bit(qwen3):
    assert train(qwen3.folder, 4, 2, 1, 2) == train(qwen3.folder, 4, 2, 1, 2)
