"""Environment variables that are set for a block are restored after it."""

from __future__ import annotations

import os

import pytest

from tinkerflow.backend.core.environment import variables


def test_environment_variables_hold_only_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERFLOWS_A", "before")
    monkeypatch.delenv("TINKERFLOWS_B", raising=False)
    with variables({"TINKERFLOWS_A": "1", "TINKERFLOWS_B": "2"}):
        assert (os.environ["TINKERFLOWS_A"], os.environ["TINKERFLOWS_B"]) == ("1", "2")
    assert os.environ["TINKERFLOWS_A"] == "before" and "TINKERFLOWS_B" not in os.environ
