"""Kills of every kind at random moments of a run of two clients: they see pauses, and get what they get without."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tinker import types

SEED = int(os.environ.get("CRASH_LOOP_SEED", "7"))
STEPS = 12
KILLS = ("worker", "engine", "worker", "api", "stop", "worker", "all", "worker", "api", "engine")


class Progress:
    """How many steps the clients have made together; whoever waits for a number is woken."""

    def __init__(self):
        self._steps, self._changed = 0, threading.Condition()

    def made(self):
        with self._changed:
            self._steps += 1
            self._changed.notify_all()

    def wait(self, steps):
        with self._changed:
            assert self._changed.wait_for(lambda: self._steps >= steps, 240), f"no step {steps}: stuck at {self._steps}"


def run(server, make_datum, seed, progress):
    """All that one client gets: numbers, tokens, and the hashes of its last checkpoint's files."""
    got = []
    params = types.SamplingParams(max_tokens=24, seed=seed, stop=[])
    with server.client() as service:
        client = service.create_lora_training_client(base_model=server.base_model, rank=8, seed=seed).result()
        for step in range(STEPS):
            data = [make_datum([1 + (i * (seed + step)) % 300 for i in range(40)])]
            parts = [client.forward_backward(data, "cross_entropy") for _ in range(2)]
            parts.append(client.optim_step(types.AdamParams(learning_rate=2e-3)))
            got += [part.result().metrics for part in parts]
            if step % 4 == 1:
                sampler = client.save_weights_and_get_sampling_client().result()
            if step % 4 == 2:  # a step after its weights were published, and perhaps a life later
                sampled = sampler.sample(types.ModelInput.from_ints([1, 2, 3]), 2, params).result()
                got.append([list(one.tokens) for one in sampled.sequences])
            progress.made()
        path = client.save_state(name="last").result().path
    folder = server.data_dir / "store" / "runs" / path.removeprefix("tinker://")
    files = json.loads((folder / "commit.json").read_text())["files"]
    return got, {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


def both(server, make_datum, progress):
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(run, server, make_datum, seed, progress) for seed in (3, 4)]
        return [one.result() for one in running]


def kill(server, what):
    """Kill what is named, once it runs."""
    until = time.monotonic() + 120
    names = {"engine": ["engine"], "api": ["api"], "all": ["engine", "api"]}.get(what, [])
    while time.monotonic() < until:
        pids = server.parts(*names) if names else server.workers()
        if len(pids) >= max(1, len(names)):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP if what == "stop" else signal.SIGKILL)
            return
        time.sleep(0.05)
    pytest.fail(f"{what}: nothing to kill within two minutes")


def test_ten_kills_change_nothing(tmp_path, start_server, make_datum, monkeypatch):
    print(f"CRASH_LOOP_SEED={SEED}")
    monkeypatch.setenv("TINKERFLOW_PREFECT", "off")
    monkeypatch.setenv("TINKERFLOW_HEARTBEAT_TIMEOUT", "3")
    monkeypatch.setenv("TINKERFLOW_SNAPSHOT_STEPS", "4")
    chance = random.Random(SEED)
    with start_server(tmp_path) as server:
        expected = both(server, make_datum, Progress())
        progress, killed = Progress(), []

        def killer():
            for number, what in enumerate(KILLS):
                progress.wait(2 * number)
                time.sleep(chance.random() * 0.3)
                kill(server, what)
                killed.append(what)

        with ThreadPoolExecutor(1) as thread:
            killing = thread.submit(killer)
            got = both(server, make_datum, progress)
            killing.result()
    assert killed == list(KILLS)
    for one, other in zip(got, expected, strict=True):
        assert one == other
