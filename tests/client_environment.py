"""A virtual environment that has only the packages of the client, without a network: links to installed packages."""

from __future__ import annotations

import os
import subprocess
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGES = Path(__file__).parents[1] / ".package"
NAMESPACES = ("google",)  # folders that several distributions share


def make_environment(folder: Path, *more: str) -> Path:
    """Create the environment in `folder`. more: further packages. Returns the path of its Python."""
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "tinkerflow.pth").write_text(f"{PACKAGES}\n")
    found: set[str] = set()
    for name in ("tinkerflow", *more):
        _add_requirements(Requirement(name), found)
    for name in found:
        installed = distribution(name)
        for file in installed.files or []:
            depth = 2 if file.parts[0] in NAMESPACES else 1
            link = site.joinpath(*file.parts[:depth])
            if ".." in file.parts or file.suffix == ".pth" or link.exists():
                continue
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(str(installed.locate_file(Path(*file.parts[:depth]))))
    return folder / "bin" / "python"


def _add_requirements(wanted: Requirement, found: set[str]) -> None:
    """Add a package and its requirements in this environment."""
    found.add(canonicalize_name(wanted.name))
    for need in map(Requirement, distribution(wanted.name).requires or []):
        extras = wanted.extras or {""}
        needed = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras)
        if needed and canonicalize_name(need.name) not in found:
            _add_requirements(need, found)


def tinkerflow(python: Path, *words: str, folder: Path) -> str:
    """The output of a command of `tinkerflow` in this environment, with `folder` as current folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "200"}
    command = [python, "-m", "tinkerflow", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stdout + done.stderr)
    return done.stdout
