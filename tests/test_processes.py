"""The end of a process's log."""

from __future__ import annotations

from pathlib import Path

from tinkerflow.backend.processes import tail


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_bytes(b"one\ntwo \xff\nthree\n")
    assert tail(log, 2) == "two \ufffd\nthree"
