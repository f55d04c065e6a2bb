"""A release for PyPI: its files, its metadata, and the workflow that publishes it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata
from tests.docs.pages import tracked

from tinkerflow import __version__

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "publish.yml"
PAGE = "api/console/website/index.html"
FOLDERS = ("api", "flows", "tasks", "backend", "deployments")


def build(target: str, source: Path, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = into.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made as in the workflow: from the unpacked sdist of a checkout that contains the built website."""
    folder = tmp_path_factory.mktemp("dist")
    checkout, page = folder / "checkout", folder / "checkout" / PAGE
    for name in (*tracked(), ".gitignore"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    page.parent.mkdir(exist_ok=True)
    page.write_text("the website")
    with tarfile.open(build("sdist", checkout, folder)) as sdist:
        sdist.extractall(folder, filter="data")
    return build("wheel", folder / f"tinkerflow-{__version__}", folder)


def test_wheel_from_the_sdist_has_every_package_file(wheel: Path) -> None:
    ours = {f"tinkerflow/{name}" for name in tracked() if name.split("/")[0] in FOLDERS}
    with zipfile.ZipFile(wheel) as opened:
        files = {name for name in opened.namelist() if ".dist-info/" not in name}
    own = {"tinkerflow/__init__.py", "tinkerflow/__main__.py", "tinkerflow/py.typed", f"tinkerflow/{PAGE}"}
    assert (ours | own) - files == set()
    assert {name for name in files - ours - own if not (ROOT / name.removeprefix("tinkerflow/")).is_file()} == set()


def test_wheel_metadata_is_valid_and_contains_the_readme(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        found = Metadata.from_email(opened.read(name))  # checks each field
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
