"""The choice of a launcher, and its plan. Tests with processes are in tests/e2e and tests/deployments/test_up.py."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments import launching
from tinkerflow.deployments.launchers import LAUNCHERS, launcher_of, ray, slurm
from tinkerflow.deployments.launching import Plan, own_address
from tinkerflow.deployments.up import Stack

DOCS = Path(__file__).parents[2] / "docs"


def plan(folder: Path, **given: Any) -> Plan:
    return Plan.of(Settings(data_dir=folder, **given), {"PATH": "/bin"})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "local"),
        ({"group": "10.0.0.1:7000"}, None),
        ({"group": "10.0.0.1:7000", "launcher": "local"}, "local"),
        ({"launcher": "ray"}, "ray"),
    ],
)
def test_workers_are_started_by_hand_if_a_group_is_set_without_a_launcher(
    given: dict[str, str], name: str | None
) -> None:
    found = launcher_of(Settings(**given))
    assert (found and found.name) == name


async def test_slurm_without_srun_is_refused_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="launcher 'slurm': there is no program 'srun' on this host; run `tinkerflow"):
        await slurm.LAUNCHER.keep(replace(plan(tmp_path), environment={"PATH": str(tmp_path)}), print)


def test_unknown_launcher_is_refused_with_the_list_of_launchers() -> None:
    with pytest.raises(UserError, match=f"launcher 'nomad': must be one of {', '.join(LAUNCHERS)}"):
        launcher_of(Settings(launcher="nomad"))


def test_a_plan_has_a_process_for_each_rank_of_each_base_model(tmp_path: Path) -> None:
    found = plan(tmp_path, processes=3, base_models=("a", "b"), process_devices=4)
    assert (found.processes, found.devices, found.base_models) == (6, 4, ("a", "b"))
    assert found.environment["TINKERFLOW_PROCESSES"] == "3" and found.environment["PATH"] == "/bin"
    assert found.secret == found.secret_file.read_bytes().strip()


def test_plan_repr_contains_no_secret(tmp_path: Path) -> None:
    found = plan(tmp_path)
    assert found.secret.decode() not in repr(found)


def test_host_has_an_address() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address().count(".") == 3


def test_host_without_a_route_has_the_address_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a Slurm cluster often have no default route."""
    monkeypatch.setattr(launching, "_ANYWHERE", "255.255.255.255")  # the system refuses it
    monkeypatch.setattr("socket.gethostbyname", {socket.gethostname(): "10.1.2.3"}.__getitem__)
    assert own_address() == "10.1.2.3"

    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("socket.gethostbyname", unknown)
    assert own_address() == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "bundle"),
    [
        ({"platform": "cpu"}, {"CPU": 1}),
        ({}, {"CPU": 1}),
        ({"process_devices": 2}, {"CPU": 1, "GPU": 2}),
        ({"process_devices": 8, "platform": "cuda"}, {"CPU": 1, "GPU": 8}),
        ({"process_devices": 4, "platform": "tpu"}, {"CPU": 1, "TPU": 4}),
    ],
)
def test_ray_bundle_requests_the_planned_resources(
    tmp_path: Path, given: dict[str, Any], bundle: dict[str, int]
) -> None:
    assert ray.bundle_of(plan(tmp_path, **given)) == bundle


def test_cpus_take_no_process_devices(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="process_devices is 2: must be 0 where platform is 'cpu'"):
        plan(tmp_path, platform="cpu", process_devices=2)


def test_the_clients_of_clusters_are_loaded_when_they_are_needed_and_a_missing_one_is_named() -> None:
    code = """
import sys
import tinkerflow.deployments.up, tinkerflow.deployments.launchers.ray as launcher
assert not {"ray", "lightkube"} & set(sys.modules)
sys.modules["ray"] = None  # as if it were not installed
try:
    launcher._connect("")
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("UserError launcher 'ray': Ray cannot be imported")
    assert "install the extra `ray`" in done.stdout


def test_srun_command_requests_the_planned_resources(tmp_path: Path) -> None:
    found = plan(tmp_path, group="10.0.0.1:7000", process_devices=2, spread_hosts=True)
    command = slurm.srun(found, 3)
    assert command[0] == "srun" and {"--ntasks=1", "--gpus=2", "--exclusive"} <= set(command)
    assert command[-6:-2] == ("--group", "10.0.0.1:7000", "--secret-file", str(tmp_path / "group.secret"))
    step = slurm.srun(replace(found, environment={"SLURM_JOB_ID": "7"}), 3)
    assert {"--mem=0", "--nodes=1", "--relative=3"} <= set(step)
    assert not {"--exclusive", "--exact"} & set(step)  # with --exact, the step has one CPU of its node
    together = slurm.srun(replace(found, environment={"SLURM_JOB_ID": "7"}, spread=False), 3)
    assert "--exact" in together and "--relative=3" not in together


async def test_slurm_refuses_more_processes_than_the_job_has_nodes_to_spread_them_over(tmp_path: Path) -> None:
    (tmp_path / "srun").touch(0o700)
    found = plan(tmp_path, processes=2, base_models=("a", "b"), spread_hosts=True)
    inside = replace(found, environment={"PATH": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})
    with pytest.raises(UserError, match="processes of all groups is 4: must be at most 2, the nodes of the job"):
        await slurm.LAUNCHER.keep(inside, print)


def test_no_command_line_holds_a_secret(tmp_path: Path) -> None:
    """Every user of the machine can read the arguments of processes."""
    given = {"data_dir": tmp_path, "port": 1, "prefect": "off", "group": "127.0.0.1:7000"}
    settings = Settings(database_url="postgresql://me:pass-word@db/journal", **given)
    stack = Stack(settings, report=print)
    stack._loop.close()  # the stack does not start
    children = [part.command for part in stack._parts]
    children.append(slurm.srun(Plan.of(settings, {}), 0))
    secret = settings.group_secret_path.read_text().strip()
    assert not [word for command in children for word in command if "pass-word" in word or secret in word]


def test_command_ends_with_its_parent_process(tmp_path: Path) -> None:
    """When the parent ends, the command gets SIGTERM, which it confirms with a file."""
    said = tmp_path / "said"
    told = f"import signal, sys, time; signal.signal(15, lambda *_: (open({str(said)!r}, 'w').close(), sys.exit())); "
    code = f"""
import subprocess, os, signal, sys
from tinkerflow.deployments.launching import ending_with_us
child = subprocess.Popen(ending_with_us([sys.executable, "-c", {told!r} + "print(1, flush=True); time.sleep(600)"]))
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == b"1\n"
        process.kill()
        process.wait()
        assert process.stdout.read() == b""  # the command has ended, too
    assert said.exists()
