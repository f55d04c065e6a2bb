"""`tinkerflow up --launcher slurm` and the sbatch script, on a one-node Slurm cluster that this test starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from descent import cmdline
from slurm_cluster import jobs, missing, slurm
from tests.waiting import wait_for
from tinker import types

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(bool(missing()), reason=f"no Slurm: {missing()}")]
SCRIPT = Path(__file__).parents[2] / "deployments" / "slurm" / "tinkerflow.sbatch"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm(folder) as environment:
        for name in ("PATH", "SLURM_CONF"):
            monkeypatch.setenv(name, environment[name])
        yield
        wait_for(lambda: not [job for job in jobs(environment) if not job.endswith("COMPLETING")])


def workers(folder: Path) -> list[int]:
    """Pids of the worker agents that Slurm started for the service of a data dir."""
    found = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in found if re.search(f"^\\S+ -m tinkerflow worker .*{folder}", cmdline(pid))]


def trained(train, client, kill=lambda: None):
    """All numbers of five steps and of a sampler. kill: called after the second step."""
    metrics = train(client, range(5), kill, after=1)
    sampler = client.save_weights_and_get_sampling_client().result()
    return metrics, sampler.compute_logprobs(types.ModelInput.from_ints(list(range(1, 81)))).result()


def test_jobs_are_the_workers_and_one_that_is_killed_changes_nothing(cluster, tmp_path, start_server, train) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    with start_server(data_dir, "--launcher", "slurm", "--processes", "2", prefect="off") as server:
        assert [job.split()[1:] for job in jobs(os.environ)] == [["tinkerflow", "RUNNING"]] * 2
        started = workers(data_dir)
        assert len(started) == 2 and not server.workers()
        with server.client() as service:
            runs = [
                service.create_lora_training_client(base_model=server.base_model, rank=8, seed=3).result()
                for _ in range(2)
            ]
            expected = trained(train, runs[0])
            assert trained(train, runs[1], lambda: os.kill(started[-1], signal.SIGKILL)) == expected
        assert len(set(workers(data_dir)) - set(started)) == 1


def test_the_script_serves_in_steps_of_its_job_until_it_is_cancelled(cluster, tmp_path) -> None:
    log, data_dir = tmp_path / "job.log", tmp_path / "data"
    variables = {
        "TINKERFLOW": str(Path(sys.executable).with_name("tinkerflow")),
        "TINKERFLOW_DATA_DIR": str(data_dir),
        "TINKERFLOW_PREFECT": "off",
    }
    command = ("sbatch", f"--output={log}", "--parsable", str(SCRIPT), "--port", "0", "--host", "127.0.0.1")
    tried = subprocess.run(["sbatch", "--test-only", str(SCRIPT)], capture_output=True, text=True, check=True)
    assert "to start at" in tried.stderr
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    wait_for(lambda: log.exists() and ("\nready: " in log.read_text() or "ended with" in log.read_text()))
    assert "\nready: " in log.read_text(), log.read_text()
    assert [job.split()[:2] for job in jobs(os.environ)] == [[done.stdout.strip(), "tinkerflow"]]
    assert len(workers(data_dir)) == 1
    subprocess.run(["scancel", "--batch", "--signal=TERM", done.stdout.strip()], check=True)
    wait_for(lambda: log.read_text().endswith("stopped\n"))
    wait_for(lambda: not workers(data_dir))


def test_a_preempted_job_that_ends_in_time_is_requeued(cluster, tmp_path) -> None:
    """Slurm alone would regard the job as completed, because its program ended before it was killed."""
    program, log = tmp_path / "tinkerflow", tmp_path / "job.log"
    program.write_text("#!/bin/bash\ntrap 'echo stopped; kill %1; exit 0' TERM\necho up\nsleep 600 &\nwait\n")
    program.chmod(0o755)
    command = ("sbatch", f"--output={log}", "--parsable", str(SCRIPT))
    environment = os.environ | {"TINKERFLOW": str(program), "TINKERFLOW_DATA_DIR": str(tmp_path)}
    job = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    wait_for(lambda: log.exists() and log.read_text() == "up\n")
    subprocess.run(["sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"], check=True)
    requeued = f"{job} tinkerflow PENDING"
    wait_for(lambda: jobs(os.environ) in ([requeued], []))
    assert log.read_text().endswith("stopped\n")
    assert jobs(os.environ) == [requeued]  # Slurm starts it again after two minutes
    subprocess.run(["scancel", job], check=True)
