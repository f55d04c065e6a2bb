"""The same training on one device and on meshes of four: fsdp, tensor, and both."""

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


def train(folder: Path, fsdp: int, tensor: int) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("mesh_worker.py")), str(folder), str(fsdp), str(tensor)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_devices_that_the_axes_do_not_divide_are_refused_by_name():
    assert dict(make_mesh(0, 1).shape) == {"fsdp": 1, "expert": 1, "tensor": 1}
    with pytest.raises(UserError, match=r"1 device.* in 1 process.*, which tensor_parallel 2 x expert_parallel 3 must"):
        make_mesh(0, 2, 3)


@pytest.fixture(scope="module")
def alone(qwen3) -> dict[str, Any]:
    return train(qwen3.folder, 1, 1)


@pytest.mark.parametrize(("fsdp", "tensor"), [(0, 2)])  # fsdp 0: what four devices leave
def test_a_mesh_gives_the_numbers_of_one_device(qwen3, alone, fsdp, tensor):
    found = train(qwen3.folder, fsdp, tensor)
    assert alone["losses"][-1] < alone["losses"][0]
    assert np.allclose(found["losses"], alone["losses"], rtol=1e-4)
    assert np.allclose(found["norms"], alone["norms"], rtol=1e-3)
    for one, other in zip(found["logprobs"], alone["logprobs"], strict=True):
        close_logprobs(one, other, ulps=2048)
