"""`tinkerflow.local` before anything is started. With a service: tests/e2e/test_local.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tinkerflow
from tinkerflow.deployments.local import _variables


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="colour"), tinkerflow.local(data_dir=tmp_path, colour="red"):
        pass
    assert not list(tmp_path.iterdir())


def test_there_is_nothing_else() -> None:
    with pytest.raises(AttributeError, match="'tinkerflow' has no attribute 'remote'"):
        _ = tinkerflow.remote


def test_variables_are_those_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERFLOWS_A", "before")
    monkeypatch.delenv("TINKERFLOWS_B", raising=False)
    with _variables({"TINKERFLOWS_A": "1", "TINKERFLOWS_B": "2"}):
        assert (os.environ["TINKERFLOWS_A"], os.environ["TINKERFLOWS_B"]) == ("1", "2")
    assert os.environ["TINKERFLOWS_A"] == "before" and "TINKERFLOWS_B" not in os.environ
