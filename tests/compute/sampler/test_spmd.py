"""Results are equal on one device and on meshes with axes within and across processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compute.closeness import close_logprobs
from tests.compute.sampler.tokenizer import END, save_tokenizer

from tinkerflow.backend.supervise.processes import free_port

REPOSITORY = Path(__file__).parents[3]


def group(
    folder: Path, *, processes: int, devices: int, fsdp: int, tensor: int, ahead: bool = False, kv_cache: str = "full"
) -> list[dict[str, Any]]:
    """Run a group of workers, and return the results that each process printed."""
    told = {"folder": str(folder), "processes": processes, "devices": devices, "fsdp": fsdp, "tensor": tensor}
    told |= {"ahead": ahead, "kv_cache": kv_cache}
    port = free_port()
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY / '.package'}:{REPOSITORY}", "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("spmd_worker.py")),
                json.dumps(told | {"rank": rank, "port": port}),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(running, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.fixture(scope="module")
def alone(qwen: Any) -> dict[str, Any]:
    """The results of one process with one device."""
    save_tokenizer(qwen.folder)
    (result,) = group(qwen.folder, processes=1, devices=1, fsdp=1, tensor=1)
    assert result["held"]["error"] is None and result["held"]["tokens"][0][-1] == END
    assert "'nope'" in result["bad"]["error"] and len(result["drawn"]["tokens"]) == 3
    assert {name: one["cached"] for name, one in result.items() if one["cached"]} == {"repeated": 249}
    assert result["repeated"]["logprobs"] == result["first"]["logprobs"]
    return result


@pytest.mark.parametrize(
    ("processes", "devices", "fsdp", "tensor", "ahead"),
    [
        (2, 2, 2, 2, True),
        *(pytest.param(*mesh, marks=pytest.mark.thorough) for mesh in ((2, 1, 1, 2, False), (1, 4, 4, 1, True))),
    ],
)
def test_mesh_does_not_change_samples(
    qwen: Any, alone: dict[str, Any], processes: int, devices: int, fsdp: int, tensor: int, ahead: bool
) -> None:
    results = group(qwen.folder, processes=processes, devices=devices, fsdp=fsdp, tensor=tensor, ahead=ahead)
    assert all(result == results[0] for result in results), "every process has the same results"
    for name, expected in alone.items():
        assert results[0][name]["tokens"] == expected["tokens"]
        assert results[0][name]["error"] == expected["error"]
        assert results[0][name]["cached"] == expected["cached"]
        for got, wanted in zip(results[0][name]["logprobs"], expected["logprobs"], strict=True):
            close_logprobs(got, wanted, ulps=128)
        if expected["prompt"] is not None:
            close_logprobs(results[0][name]["prompt"], expected["prompt"], ulps=128)


@pytest.mark.thorough
def test_a_cache_in_float8_is_copied_between_shards(qwen: Any, alone: dict[str, Any]) -> None:
    (result,) = group(qwen.folder, processes=1, devices=2, fsdp=2, tensor=1, kv_cache="float8")
    assert result["repeated"]["cached"] == 249
    assert result["repeated"]["logprobs"] == result["first"]["logprobs"]
    error = np.abs(np.subtract(result["scored"]["prompt"], alone["scored"]["prompt"]))
    assert 0 < error.mean() < 0.2
