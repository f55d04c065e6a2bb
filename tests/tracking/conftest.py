"""A journal whose training runs grow by calls, and reads of trackers in separate processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.journal.conftest import Scene

from tinkerflow.backend.journal import Journal, LossMeasured, StepMeasured

Points = dict[str, list[list[float]]]


@dataclass
class GrowingRuns:
    """A journal in a folder, and steps of its training runs."""

    folder: Path
    journal: Journal
    _owners: dict[str, str] = field(default_factory=dict)
    _seqs: dict[str, int] = field(default_factory=dict)

    def run(self, owner: str = "local", **said: Any) -> str:
        scene = Scene(self.journal, owner)
        run = scene.model(scene.session(**said))
        self._owners[run] = owner
        return run

    def train(self, run: str, *steps: int) -> None:
        """Record steps with these numbers. The loss of a step is its number."""
        for step in steps:
            for effect in (LossMeasured(run, 10, 2.0, 2.0 * step, kl=0.5), None):
                seq = self._seqs[run] = self._seqs.get(run, 0) + 1
                Scene(self.journal, self._owners[run]).submit(run, seq)
                (pending,) = self.journal.requests.ready(run)
                made = effect or StepMeasured(run, seq, step, grad_norm=0.5, learning_rate=0.25)
                self.journal.results.finish([pending.done(b"", "proto", made)])


@pytest.fixture
def runs(tmp_path: Path, journal_template: Path) -> Iterator[GrowingRuns]:
    shutil.copy(journal_template, tmp_path / "journal.db")
    journal = Journal.open(f"sqlite:///{tmp_path / 'journal.db'}")
    yield GrowingRuns(tmp_path, journal)
    journal.close()


def read(tracker: str, folder: Path, run: str) -> Points:
    """The values that a tracker has stored for a run of the project `local`."""
    script = Path(__file__).with_name("reading.py")
    words = [sys.executable, str(script), tracker, str(folder), run.replace(":", "-"), "local"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    points: Points = json.loads(done.stdout.splitlines()[-1])
    return points
