"""`tinkerflow.local` runs a service for a block, and leaves nothing behind however the block or its process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from descent import cmdline, descendants
from tests.waiting import wait_for
from tinker import types

import tinkerflow

pytestmark = pytest.mark.thorough


def learn(service, base_model: str) -> None:
    trainer = service.create_lora_training_client(base_model=base_model, rank=4).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
    )
    assert trainer.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"] > 0


async def test_local_server_runs_inside_an_event_loop_and_ends_with_an_exception(tmp_path, monkeypatch):
    """The block runs inside an event loop, off the main thread, as in a notebook's cell."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    said: list[str] = []

    async def cell() -> None:
        before = set(descendants(os.getpid()))  # other tests' browser and server, which may start more
        with tinkerflow.local(progress=said.append, processes=2) as service:
            (scratch,) = tmp_path.iterdir()
            (base_model,) = (scratch / "models" / "tinkerflow").iterdir()
            started = descendants(os.getpid(), beside=before)
            commands = [cmdline(pid) for pid in started]
            assert sum("tinkerflow.backend.pool.worker" in command for command in commands) == 2
            learn(service, str(base_model))
            below.update(started)
            urls.append(os.environ["TINKER_BASE_URL"])
            raise KeyError("mine")

    below, urls = set[int](), list[str]()
    with pytest.raises(KeyError, match="mine"):
        await asyncio.to_thread(asyncio.run, cell())
    left = {pid: cmdline(pid) for pid in below if cmdline(pid)}
    assert below and not left
    assert not list(tmp_path.iterdir())
    assert "TINKER_BASE_URL" not in os.environ
    assert f"ready: {urls[0]}  prefect: off" in said
    assert any(line.startswith("engine: starting worker group") for line in said)


OPEN = """
import contextlib, os, sys, tinkerflow
opened = contextlib.ExitStack()
service = opened.enter_context(tinkerflow.local(data_dir=sys.argv[1]))
print("entered", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "left open"])
def test_local_server_leaves_no_process_behind(tmp_path: Path, killed: bool) -> None:
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", OPEN, str(tmp_path / "data")], stdin=subprocess.PIPE, stdout=output, stderr=output
        )
    try:
        wait_for(lambda: "entered" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        below = descendants(process.pid)
        assert len(below) == 3  # engine, API, worker
        if killed:
            process.send_signal(signal.SIGKILL)
        else:
            assert process.stdin is not None
            process.stdin.close()
        assert process.wait(120) == (-signal.SIGKILL if killed else 0), log.read_text()
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not [pid for pid in below if cmdline(pid)])
