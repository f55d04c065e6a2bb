"""A release for PyPI: its files, its metadata, and the workflow that publishes it."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata

from tinkerflow import __version__

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "publish.yml"
FOLDERS = ("api", "flows", "tasks", "backend", "deployments")


def build(target: str, source: Path, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = into.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `python -m build` makes: of the unpacked sdist, and not of the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    with tarfile.open(build("sdist", ROOT, folder)) as sdist:
        sdist.extractall(folder, filter="data")
    return build("wheel", folder / f"tinkerflow-{__version__}", folder)


def test_the_wheel_of_the_sdist_has_every_file_of_the_packages(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    tracked = {f"tinkerflow/{name}" for name in listed.split("\0") if name and (ROOT / name).is_file()}
    with zipfile.ZipFile(wheel) as opened:
        files = {name for name in opened.namelist() if ".dist-info/" not in name}
    own = {"tinkerflow/__init__.py", "tinkerflow/__main__.py", "tinkerflow/py.typed"}
    assert tracked - files == set()
    assert {name for name in files - tracked - own if not (ROOT / name.removeprefix("tinkerflow/")).is_file()} == set()


def test_its_metadata_is_valid_and_has_the_readme(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        found = Metadata.from_email(opened.read(name))  # which checks each field
    assert (found.name, str(found.version)) == ("tinkerflow", __version__)
    assert found.description_content_type == "text/markdown"
    assert found.description == (ROOT / "README.md").read_text()


def test_the_workflow_pins_its_actions_and_only_the_last_job_gets_a_token() -> None:
    text = WORKFLOW.read_text()
    workflow = yaml.safe_load(text)
    jobs = workflow["jobs"]
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"[\w./-]+@(release/)?v\d+", action) for action in used)
    assert workflow["permissions"] == {"contents": "read"}
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "publish": {"id-token": "write"}
    }
    assert jobs["publish"]["needs"] == "build" and "secrets." not in text and "://" not in text
