"""The README's first command, its last part: a fresh data dir, the real SDK, exact answers at the end."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from tinkerflow.deployments.quickstart import teach


def test_quickstart_teaches_pig_latin(tmp_path, compiled_programs):
    (tmp_path / "jax-cache").symlink_to(compiled_programs)  # the next test needs the same programs
    run = subprocess.run(
        [sys.executable, "-m", "tinkerflow", "quickstart", "--data-dir", str(tmp_path)],
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


def test_too_few_steps_teach_nothing(server):
    said = io.StringIO()
    assert teach(Console(file=said, width=200), server.api_url, "", steps=2) == (False, "")
    assert "not learnt" in said.getvalue() and "(Prefect is off)" in said.getvalue()


@pytest.mark.parametrize("learnt", [True, False])
def test_the_command_fails_unless_it_was_learnt(learnt):
    """In a process of its own: it ends that."""
    stand_in = f"import tinkerflow.deployments.quickstart as q; q.quickstart = lambda *_, **__: {learnt}; "
    command = "from tinkerflow.deployments.cli import app; app(['quickstart', '--steps', '2'])"
    assert subprocess.run([sys.executable, "-c", stand_in + command], timeout=300, check=False).returncode == 1 - learnt
