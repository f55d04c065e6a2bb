"""The README's first command, its last part: a fresh data dir, the real SDK, exact answers at the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys


def test_quickstart_teaches_pig_latin(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "deployments.cli", "quickstart", "--data-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    losses = [float(x) for x in re.findall(r"step +\d+/\d+ +loss +([\d.]+)", run.stdout)]
    assert len(losses) >= 10
    assert losses[-1] < 0.1 * losses[0]
    assert "all three answers learnt" in run.stdout
    assert re.search(r"http://127\.0\.0\.1:\d+/runs/flow-run/[0-9a-f-]{36}", run.stdout)


def test_too_few_steps_fail(tmp_path, compiled_programs):
    (tmp_path / "jax-cache").symlink_to(compiled_programs)
    run = subprocess.run(
        [sys.executable, "-m", "deployments.cli", "quickstart", "--data-dir", str(tmp_path), "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=os.environ | {"TINKERFLOW_PREFECT": "off"},
    )
    assert "(Prefect is off)" in run.stdout, run.stdout + run.stderr
    assert run.returncode == 1, run.stdout + run.stderr
    assert "not learnt" in run.stdout
