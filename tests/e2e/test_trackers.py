"""`tinkerflow up` with trackers: runs of the SDK are tracked, each step once, even after a kill of the mirror."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.waiting import wait_for
from tinker import types

from tinkerflow.backend.tracking.trackers.tensorboard import _summaries

pytestmark = pytest.mark.thorough


def test_runs_of_the_sdk_are_shown(start_server, tmp_path, make_datum, monkeypatch):
    monkeypatch.setenv("TINKERFLOW_TRACKERS", '["tensorboard"]')
    with start_server(tmp_path, prefect="off") as server, server.client() as service:
        client = service.create_lora_training_client(base_model=server.base_model, rank=8).result()
        folder = tmp_path / "tracking/tensorboard/local" / client.model_id.replace(":", "-")

        def steps() -> list[int]:
            events = (event for file in sorted(folder.glob("*.tfevents.*")) for event in _summaries(file))
            return sorted(event.step for event in events for value in event.summary.value if value.tag == "loss")

        for step in range(1, 7):
            client.forward_backward([make_datum(list(range(1, 20)))], "cross_entropy").result()
            client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            if step == 3:
                wait_for(lambda: steps() == [1, 2, 3])
                os.kill(mirror_of(tmp_path), signal.SIGKILL)
        wait_for(lambda: steps() == [1, 2, 3, 4, 5, 6])


def mirror_of(data_dir: Path) -> int:
    """The pid of the mirror of this data dir."""
    for process in Path("/proc").glob("[0-9]*"):
        words = (process / "cmdline").read_bytes().split(b"\0") if process.exists() else []
        if b"track" in words and f"TINKERFLOW_DATA_DIR={data_dir}\0".encode() in (process / "environ").read_bytes():
            return int(process.name)
    raise AssertionError("no mirror runs")
