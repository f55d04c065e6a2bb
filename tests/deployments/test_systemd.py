"""The units of `deployments/systemd`, checked by systemd's own tool."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "deployments" / "systemd"
PROGRAM = "/opt/tinkerflow/.venv/bin/tinkerflow"


@pytest.mark.parametrize("unit", sorted(UNITS.iterdir()), ids=lambda unit: unit.name)
def test_files_of_a_unit_are_private_to_its_user(unit: Path) -> None:
    assert {"StateDirectoryMode=0700", "UMask=0077"} <= set(unit.read_text().splitlines())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("unit", sorted(UNITS.iterdir()), ids=lambda unit: unit.name)
def test_systemd_unit_is_valid(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    assert PROGRAM in text
    here = tmp_path / unit.name
    here.write_text(text.replace(PROGRAM, sys.executable))  # the program must exist
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
