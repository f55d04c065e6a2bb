"""Pauses grow in a row of failures, and a steady life ends the row."""

from __future__ import annotations

from tinkerflow.backend.supervise import Restarts


def test_pauses_grow_until_something_was_steady() -> None:
    restarts = Restarts()
    assert [restarts.pause(steady=False) for _ in range(3)] == [0.1, 0.2, 0.4]
    assert restarts.pause(steady=True) == 0.1
    assert restarts.pause(steady=False) == 0.2
