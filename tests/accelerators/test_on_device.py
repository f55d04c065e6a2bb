"""The suite for GPUs and TPUs, run on the CPU with small shapes and interpreted kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from tests.accelerators.on_device.kernels import _Kernels
from tests.accelerators.on_device.measure import Run
from tests.accelerators.on_device.page import page

from tinkerflow.backend.compute.platforms import CUDA


def run_suite(folder: Path, *stages: str) -> list[dict[str, Any]]:
    """Run these stages, and return their results. Asserts that all are right and on the page."""
    command = [sys.executable, "-m", "tests.accelerators.on_device", "--tiny", "--out", str(folder), *stages]
    environ = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compile faster
    done = subprocess.run([*command, "--seconds", "1000"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + "".join(log.read_text()[-2000:] for log in folder.glob("*.log"))
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    written = (folder / "page.html").read_text()
    assert all(result["name"] in written for result in results)
    return results


def test_speed_of_training_and_decoding(tmp_path: Path) -> None:
    results = run_suite(tmp_path, "speed")
    right = [result["name"] for result in results if result["ok"]]
    assert right == ["training of 4 x 64 tokens", "the same two steps twice"]
    assert {"decoding of 1 sequences", "decoding of 3 sequences"} <= {result["name"] for result in results}


@pytest.mark.thorough
def test_every_stage(tmp_path: Path) -> None:
    stages = {result["stage"] for result in run_suite(tmp_path)}
    assert stages == {"kernels", "reference", "parity_float32", "parity_bfloat16", "speed", "service"}


@pytest.mark.parametrize("value", [2.0, float("nan")])
def test_a_kernel_with_a_wrong_result_is_named(tmp_path: Path, value: float) -> None:
    run = Run("kernels", "cpu", True, "4B", tmp_path, time.monotonic() + 100)
    _Kernels(run, CUDA)._case("planted", lambda: jnp.full(3, value), lambda: jnp.ones(3))
    (result,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert (result["name"], result["ok"]) == ("cuda: planted", False)
    assert "<b>1 wrong</b>" in page({"device": "CPU"}, [result])


def test_error_ends_one_kernel_but_not_the_stage(tmp_path: Path) -> None:
    run = Run("kernels", "cpu", True, "4B", tmp_path, time.monotonic() + 100)
    _Kernels(run, CUDA)._case("broken", lambda: jnp.ones(3) + jnp.ones(2))
    (result,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert not result["ok"] and "TypeError" in result["error"]
