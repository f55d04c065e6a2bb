"""The README's first command, its last part: a fresh data dir, the real SDK, exact answers at the end."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest
from browser import wait_for
from rich.console import Console

from tinkerflow.deployments.quickstart import teach


def test_quickstart_teaches_pig_latin_and_its_run_can_be_seen_until_it_ends_and_again(
    tmp_path, compiled_programs, start_server
):
    data_dir, log = tmp_path / "data", tmp_path / "quickstart.log"
    data_dir.mkdir()
    (data_dir / "jax-cache").symlink_to(compiled_programs)  # the next test needs the same programs
    with log.open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "tinkerflow", "quickstart", "--data-dir", str(data_dir), "--stay"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
        )
    try:
        wait_for(lambda: "serving until Ctrl-C" in log.read_text() or run.poll() is not None)
        said = log.read_text()
        assert run.poll() is None, said
        losses = [float(x) for x in re.findall(r"step +\d+/\d+ +loss +([\d.]+)", said)]
        assert len(losses) >= 10
        assert losses[-1] < 0.1 * losses[0]
        assert "all three answers learnt" in said
        shown_at = re.search(r"the run in the console: (http://127\.0\.0\.1:\d+)/training_runs/(\S+:train:0)\n", said)
        assert shown_at is not None
        shown = httpx.get(f"{shown_at[1]}/training_runs/{shown_at[2]}", timeout=60)
        assert shown.status_code == 200 and "steps measured" in shown.text and "sampler_weights/pig-latin" in shown.text
        page = re.search(r"(http://127\.0\.0\.1:\d+)/runs/flow-run/([0-9a-f-]{36})", said)
        assert page is not None
        assert httpx.get(f"{page[1]}/api/flow_runs/{page[2]}", timeout=60).is_success
    finally:
        run.send_signal(signal.SIGINT)
        try:
            assert run.wait(180) == 0
        finally:
            run.kill()
    said = log.read_text()
    assert f"tinkerflow up --data-dir {data_dir}\nand open http://127.0.0.1:4200/runs/flow-run/{page[2]}\n" in said
    with start_server(data_dir) as server:
        assert server.ask_prefect(f"/flow_runs/{page[2]}")["id"] == page[2]


def test_too_few_steps_teach_nothing(server):
    said = io.StringIO()
    assert teach(Console(file=said, width=200), server.api_url, "", steps=2) == (False, "")
    assert "not learnt" in said.getvalue() and "(Prefect is off)" in said.getvalue()


@pytest.mark.parametrize("learnt", [True, False])
def test_the_command_fails_unless_it_was_learnt(learnt):
    """In a process of its own: it ends that."""
    stand_in = f"import tinkerflow.deployments.quickstart as q; q.quickstart = lambda *_, **__: {learnt}; "
    command = "from tinkerflow.deployments.cli import app; app(['quickstart', '--steps', '2'])"
    assert subprocess.run([sys.executable, "-c", stand_in + command], timeout=300, check=False).returncode == 1 - learnt
