from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.process_state import changes, snapshot

ROOT = Path(__file__).parent.parent


def test_changed_process_state_is_named_by_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = snapshot()
    level, mask, handler = logging.getLogger("tinker").level, os.umask(0o077), signal.getsignal(signal.SIGTERM)
    try:
        monkeypatch.setenv("LEFT_BEHIND", "1")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        logging.getLogger("tinker").setLevel(logging.CRITICAL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        found = [text.partition(":")[0] for text in changes(before, snapshot())]
    finally:
        os.umask(mask)
        logging.getLogger("tinker").setLevel(level)
        signal.signal(signal.SIGTERM, handler)
    assert found == [
        "os.environ['LEFT_BEHIND']",
        "sys.path",
        "the handler of SIGTERM",
        "the level of logger 'tinker'",
        *(["the umask"] if sys.platform == "linux" else []),
        "the working folder",
    ]
    assert changes({}, {"os.environ['SET_BY_AN_IMPORT']": "1", "the level of logger 'prefect'": 50}, {"prefect"}) == []
    monkeypatch.undo()
    assert changes(before, snapshot()) == []


LEAKS = """
import os
import pytest
from tests.conftest import unchanged_process  # noqa: F401

@pytest.fixture(scope="module")
def shared() -> None:
    os.environ["LEFT_BY_A_FIXTURE"] = "1"

def test_restores(monkeypatch: pytest.MonkeyPatch, shared: None) -> None:
    monkeypatch.setenv("RESTORED", "1")

def test_leaks() -> None:
    os.environ["LEFT_BEHIND"] = "1"
"""


def test_test_that_leaves_changed_state_fails_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    here = {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | here)
    assert "2 passed, 1 error" in done.stdout
    assert "test_leaks.py::test_leaks" in done.stdout and "the test leaves the process changed" in done.stdout
    assert "os.environ['LEFT_BEHIND']: None -> '1'" in done.stdout
