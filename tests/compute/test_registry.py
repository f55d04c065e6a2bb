"""A loss or an optimizer needs only one file in its package to be validated, sent, trained with and saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.compute import toy_entries
from tests.compute.conftest import Reference

from tinkerflow.backend.spec import losses
from tinkerflow.backend.spec.registry import registered


def test_loss_and_optimizer_are_added_by_one_file(qwen3: Reference, tmp_path: Path) -> None:
    command = [sys.executable, toy_entries.__file__, str(tmp_path), str(qwen3.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["parts"] > 1
    assert said["loss"] == pytest.approx(said["expected"], rel=1e-4)
    assert said["norm"] > 0
    assert said["moved"] > 0
    assert (said["optimizer"], said["ends"]) == ("sgd", ["velocity"])
    assert said["refused"] == [
        "loss_fn_config['gain'] is -1.0: must be a finite number >= 0",
        "loss_fn_config has the key 'loss': must be one of gain",
        "optimizer_params.momentum is 1.0: must be a finite number >= 0 and < 1",
    ]


def test_a_file_without_its_entry_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nothing_here.py").write_text("")
    monkeypatch.setattr(losses, "__path__", [*losses.__path__, str(tmp_path)])
    with pytest.raises(TypeError, match=r"losses\.nothing_here must hold LOSS, a LossSpec named 'nothing_here'"):
        registered(losses.__name__, "LOSS", losses.LossSpec)
