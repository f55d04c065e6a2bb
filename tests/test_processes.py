"""Pauses before a process starts again, and the end of its log."""

from __future__ import annotations

from pathlib import Path

from tinkerflow.backend.processes import backoff, tail


def test_back_off_doubles_up_to_a_limit() -> None:
    assert [backoff(n) for n in (1, 2, 3, 4)] == [0.1, 0.2, 0.4, 0.8]
    assert backoff(50) == backoff(5000) == 30.0


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_bytes(b"one\ntwo \xff\nthree\n")
    assert tail(log, 2) == "two \ufffd\nthree"
