"""The task for SkyPilot: a stand-in records its commands, and SkyPilot itself, if installed, reads it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.commands import every_command

FILE = Path(__file__).parents[2] / "deployments" / "skypilot" / "tinkerflow.yaml"
TASK: dict[str, Any] = yaml.safe_load(FILE.read_text())
RECORDS = """#!/bin/bash
echo "$@" >> {calls}
env | grep ^TINKERFLOW_ | grep -v ^TINKERFLOW_GROUP_SECRET > {calls}.env
# The task kills the other program when this one ends.
[ "$1 $2" != "up --processes" ] || until grep -q ^worker {calls}; do sleep 0.05; done
"""


def commands(part: str, home: Path, **variables: str) -> list[list[str]]:
    """The arguments of every call of `tinkerflow` and of `uv` by a part of the task, sorted."""
    environment_bin, calls = home / "tinkerflow-venv" / "bin", home / "calls"
    for program in (environment_bin / "tinkerflow", environment_bin / "pip", home / ".local" / "bin" / "uv"):
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(RECORDS.format(calls=os.devnull if program.name == "pip" else calls))
        program.chmod(0o755)
    environment = {**os.environ, **TASK["envs"], "HOME": str(home), "GROUP_SECRET": "s3cret", **variables}
    subprocess.run(["bash", "-c", TASK[part]], env=environment, check=True, timeout=60)
    return sorted(line.split() for line in calls.read_text().splitlines())


def test_single_node_runs_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands("run", tmp_path, SKYPILOT_NUM_NODES="1", STORE="gs://bucket/prefix") == [["up"]]
    for line in (tmp_path / "calls.env").read_text().splitlines():
        monkeypatch.setenv(*line.split("=", 1))
    settings = Settings()
    assert settings.base_models == ("Qwen/Qwen3-8B",)
    assert settings.store == "gs://bucket/prefix"
    assert settings.data_dir == tmp_path / "tinkerflow-data"


@pytest.mark.parametrize(("rank", "parts"), [(0, ["up", "worker"]), (1, ["worker"])])
def test_several_nodes_are_one_group(tmp_path: Path, rank: int, parts: list[str]) -> None:
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6"}
    made = commands("run", tmp_path, **nodes)
    assert [part for part, *_ in made] == parts
    for part, *arguments in made:
        assert arguments[arguments.index("--group") + 1] == "10.0.0.5:7000"
        command = typer.main.get_command(every_command()).commands[part]  # type: ignore[attr-defined]
        assert command.make_context(part, list(arguments)).params
    secret = tmp_path / "tinkerflow-group.secret"
    assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("s3cret", 0o600)


def test_the_job_ends_when_the_service_does(tmp_path: Path) -> None:
    program = tmp_path / "tinkerflow-venv" / "bin" / "tinkerflow"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/bash\n[ "$1" = up ] && exit 3\nexec sleep 60\n')
    program.chmod(0o755)
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6"}
    environment = {**os.environ, **TASK["envs"], **nodes, "HOME": str(tmp_path), "GROUP_SECRET": "s3cret"}
    done = subprocess.run(["bash", "-c", TASK["run"]], env=environment, check=False, timeout=50)
    assert done.returncode == 3


def test_a_node_fetches_its_models_first(tmp_path: Path) -> None:
    fetch, (*_, version, folder) = commands("setup", tmp_path)
    assert fetch == ["models", "fetch"]
    assert (version, folder) == ("3.11", str(tmp_path / "tinkerflow-venv"))  # machines' own Python may be older


def test_skypilot_takes_the_task() -> None:
    sky = pytest.importorskip("sky", reason="no skypilot")
    task = sky.Task.from_yaml_config({**TASK, "workdir": None, "secrets": {"GROUP_SECRET": "s3cret"}})
    assert (task.num_nodes, task.run) == (1, TASK["run"])
