"""Benchmarks are run by hand, so the removal of a name that they import could go unnoticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORT = """
import importlib, sys
sys.modules.pop("torch", None)  # see tests/without_torch
for name in sys.argv[1:]:
    importlib.import_module(f"tests.benchmarks.{name}")
"""


def test_imports_of_benchmarks_exist() -> None:
    names = sorted(file.stem for file in (ROOT / "tests" / "benchmarks").glob("*.py"))
    assert "speed" in names
    done = subprocess.run([sys.executable, "-c", IMPORT, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
