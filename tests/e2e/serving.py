"""`tinkerflow serve` in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(file: Path, log: Path) -> Iterator[None]:
    """`tinkerflow serve` until the block ends."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments.cli", "serve", "--file", str(file), "--limit", "2"],
            stdout=output,
            stderr=output,
            env=os.environ | {"PREFECT_RUNNER_POLL_FREQUENCY": "2"},
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
