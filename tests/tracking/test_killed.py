"""A mirror that is killed and restarted: each tracker stores each step once, read back by the tracker's own library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.tracking.conftest import read

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import ModelState
from tinkerflow.backend.tracking.trackers import TRACKERS

MIRRORING = Path(__file__).with_name("mirroring.py")


class Mirroring:
    def __init__(self, tracker: str, folder: Path) -> None:
        words = [sys.executable, str(MIRRORING), tracker, str(folder)]
        with (folder / "stderr").open("a") as errors:
            self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)

    def turns(self, number: int) -> None:
        assert self._process.stdout is not None
        for _ in range(number):
            assert self._process.stdout.readline() == "turn\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_killed_mirror_writes_each_value_once(runs: Any, tracker: str) -> None:
    try:
        TRACKERS[tracker].check()
    except UserError as missing:
        pytest.skip(missing.message)
    run, other, metrics = runs.run(), runs.run(), runs.journal.run_metrics
    place, made, stored = runs.folder / "tracking", 0, 0
    for _ in range(2):
        process = Mirroring(tracker, runs.folder)
        runs.train(run, *range(made + 1, made + 11))
        runs.train(other, made + 1)  # both are open at the same time
        # wandb-core writes blocks of 32 KiB
        metrics.record(run, "local", {step: {"eval/reward": step / 4} for step in range(made * 100, made * 100 + 600)})
        process.turns(2)  # the second turn has seen these steps
        counts = (sum(map(len, read(tracker, place, run).values())) for _ in range(20))
        stored = next(count for count in counts if count > stored)  # some of the new values
        runs.train(run, *range(made + 11, made + 21))
        metrics.record(run, "local", {made * 100 + 700: {"eval/reward": 9.0}})
        process.kill()  # before, during or after a write
        metrics.record(run, "local", {made * 100 + 650: {"eval/reward": 9.0}})  # for an earlier step
        made += 20
    runs.journal.models.end(run, ModelState.UNLOADED, "the end")
    done = subprocess.run(
        [sys.executable, "-m", "tinkerflow", "track", "--once"],
        env={**os.environ, "TINKERFLOW_DATA_DIR": str(runs.folder), "TINKERFLOW_TRACKERS": f'["{tracker}"]'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(read(tracker, place, other)["loss"]) == [[1, 1.0], [21, 21.0]]
    points = read(tracker, place, run)
    rewards = {step: step / 4 for start in (0, 2000) for step in range(start, start + 600)}
    rewards |= {start + later: 9.0 for start in (0, 2000) for later in (650, 700)}
    wanted = {
        "loss": [[step, float(step)] for step in range(1, made + 1)],
        "eval/reward": [[step, value] for step, value in sorted(rewards.items())],
        "grad_norm": [[step, 0.5] for step in range(1, made + 1)],
        "learning_rate": [[step, 0.25] for step in range(1, made + 1)],
        "training_tokens": [[step, 10.0] for step in range(1, made + 1)],
    }
    drift = points.pop("kl_sample_train")
    assert [step for step, _ in sorted(drift)] == list(range(1, made + 1))
    assert {name: sorted(values) for name, values in points.items()} == wanted
