"""A wheel in a fresh environment, used from a new user's project whose folders have the same names as ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
OURS = ("api", "flows", "tasks", "backend", "deployments", "tests")


@dataclass(frozen=True)
class Project:
    """A user's folder, and the environment in which our wheel is installed. added: the new files in site-packages."""

    folder: Path
    environment: Path
    added: set[str]

    def run(self, *command: str) -> str:
        """Run a program of the environment with the folder first on the Python path, and return its output."""
        done = subprocess.run(
            [self.environment / "bin" / command[0], *command[1:]],
            cwd=self.folder,
            env=_without_test_variables(os.environ) | {"PYTHONPATH": str(self.folder), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def _without_test_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of this tree's tests."""
    return {name: value for name, value in environment.items() if not name.startswith(("TINKER", "PREFECT", "PYTEST"))}


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _documented_files() -> dict[str, str]:
    """The flow and the test of the documentation: path in the user's project -> content."""
    page = (ROOT / "docs" / "pipelines.md").read_text()
    return dict(re.findall(r"^```python\n# ([\w/]+\.py)\n(.*?)^```$", page, re.M | re.S))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, compiled_programs: Path) -> Project:
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")

    environment, mine = folder / "venv", folder / "project"
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    installed = [path for path in sys.path if path.endswith("site-packages")]  # their .pth files are not read
    (packages / "dependencies.pth").write_text("\n".join(installed))
    before = {path.name for path in packages.iterdir()}
    _pip("--python", str(environment / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))

    for name in OURS:
        (mine / name).mkdir(parents=True)
        (mine / name / "__init__.py").write_text("OWNER = 'the user'\n")
    for path, content in _documented_files().items():
        (mine / path).write_text(content)
    (mine / "tests" / "test_names.py").write_text(
        f"import {', '.join(OURS)}\nimport tinkerflow.flows\n\n\n"
        f"def test_names():\n    assert {{m.OWNER for m in ({', '.join(OURS)})}} == {{'the user'}}\n"
    )
    for cache in (mine / "data" / "jax-cache", mine / ".pytest_cache" / "d" / "jax"):
        cache.parent.mkdir(parents=True)
        cache.symlink_to(compiled_programs)
    return Project(mine, environment, {path.name for path in packages.iterdir()} - before)


def test_wheel_installs_only_tinkerflow(project: Project) -> None:
    assert {re.sub(r"-.*\.", ".", name) for name in project.added} == {"tinkerflow", "tinkerflow.dist-info"}
    found = project.run("python", "-c", "import tinkerflow.deployments.cli as m; print(m.__file__)")
    assert found.startswith(str(project.environment))
    draw = (
        "from tinkerflow.api.console.render import render, static_file; import tinkerflow.api as m; print(m.__file__); "
    )
    draw += (
        "print(render('error.html', {'base': '', 'status': 404, 'text': 'no'}), static_file('console.js')[0].decode())"
    )
    drawn = project.run("python", "-c", draw)
    assert drawn.startswith(str(project.environment)) and "Page not found" in drawn and '"use strict"' in drawn


def test_the_quickstart_learns(project: Project) -> None:
    said = project.run("tinkerflow", "quickstart", "--data-dir", "data")
    assert "all three answers learned" in said
    assert "tinkerflow up --data-dir data" in said


def test_the_documented_flow_is_tested_with_our_fixtures(project: Project) -> None:
    assert set(_documented_files()) >= {"flows/lesson.py", "tests/test_lesson.py"}
    said = project.run("python", "-m", "pytest", "-q", "tests")
    assert re.search(r"^3 passed", said, re.M), said
