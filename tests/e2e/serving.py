"""Run `tinkerflow serve` in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinkerflow.deployments.data_dir import open_to_others

HERE = Path(__file__).parent


@contextmanager
def serving(file: Path, log: Path) -> Iterator[None]:
    """Run `tinkerflow serve` until the block ends; fail unless SIGTERM stops it cleanly."""
    path = os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))  # for the tests' own flows
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tinkerflow",
                "serve",
                "--file",
                str(file),
                "--data-dir",
                str(log.parent),
            ],
            stdout=output,
            stderr=output,
            env=os.environ | {"PREFECT_RUNNER_POLL_FREQUENCY": "2", "PYTHONPATH": path},
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(180)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if (work := log.parent / "pipelines").is_dir():
        assert open_to_others(work) == [], "results of flows are for the owner only"
    said = log.read_text()
    assert process.returncode == 0 and "SystemExit" not in said and said.endswith("stopped\n"), said
