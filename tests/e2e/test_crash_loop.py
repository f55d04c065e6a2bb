"""Processes are killed at random moments while two clients train; results must equal those of an undisturbed run.

CI kills five times, with the journal in SQLite. For more:
CRASH_LOOP_KILLS=100 CRASH_LOOP_PREFECT=embedded CRASH_LOOP_DATABASE=postgres pytest -s tests/e2e/test_crash_loop.py
CRASH_LOOP_FAMILY=qwen3_5 trains and samples a random model of that family, on images if it is a vision model.
"""

from __future__ import annotations

import json
import operator
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from family import make_family, png
from tests.compute.conftest import TOWER
from tests.waiting import wait_for
from tinker import types

SEED = int(os.environ.get("CRASH_LOOP_SEED", "7"))
KILLS = int(os.environ.get("CRASH_LOOP_KILLS", "5"))
PREFECT = os.environ.get("CRASH_LOOP_PREFECT", "off")
DATABASE = os.environ.get("CRASH_LOOP_DATABASE", "sqlite")
# First each in order, then at random. A bare name means SIGKILL. Killing `up` ends its children; "all" spares only
# `up`.
WAYS = ("worker", "stop api", "engine", "up", "all", "stop worker", "api", "stop engine", "worker", "worker")
FAMILY = os.environ.get("CRASH_LOOP_FAMILY", "")  # empty: the tiny model
PATIENCE = 900.0  # seconds until the loop counts as stuck; on a quiet machine a kill costs less than ten


def ways(chance: random.Random) -> list[str]:
    more = (*WAYS, "prefect", "stop prefect") if PREFECT == "embedded" else WAYS
    return [*more[:KILLS], *(chance.choice(more) for _ in range(KILLS - len(more)))]


class Progress:
    """Counts the steps of both clients, and records when they should stop."""

    def __init__(self):
        self._steps, self._changed, self._over = 0, threading.Condition(), False

    def made(self):
        with self._changed:
            self._steps += 1
            self._changed.notify_all()

    def end(self):
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def over(self):
        return self._over

    def wait_for_another(self):
        """Wait for another step; return False if the end comes first."""
        with self._changed:
            wanted = self._steps + 1
            done = self._changed.wait_for(lambda: self._over or self._steps >= wanted, PATIENCE)
            assert done, f"no step after {PATIENCE:.0f} s: stuck at {self._steps}"
            return not self._over


def run(server, make_datum, seed, go_on):
    """Train as one client; return its metrics and sampled tokens, and the hashes of its checkpoints' files."""
    got, saves, step = [], [], 0
    params = types.SamplingParams(max_tokens=24, seed=seed, stop=[])
    with server.client() as service:
        client = service.create_lora_training_client(base_model=server.base_model, rank=8, seed=seed).result()
        while go_on(step):
            # Each datum takes a micro-batch of its own.
            data = [make_datum([1 + (i * (seed + step)) % 300 for i in range(tokens)]) for tokens in (40, 60)]
            data += [seen(seed + step)] if FAMILY in TOWER else []
            parts = [client.forward_backward(data, "cross_entropy") for _ in range(2)]
            parts.append(client.optim_step(types.AdamParams(learning_rate=2e-3)))
            got.append([part.result().metrics for part in parts])
            if step % 4 == 3:  # training continues meanwhile, and a kill may come
                saves.append(client.save_state(name=f"after-{step}"))
            if step % 4 == 1:
                sampler = client.save_weights_and_get_sampling_client().result()
            if step % 4 == 2:  # a step after the weights were published, and perhaps a restart later
                prompt = seen(step).model_input if FAMILY in TOWER else types.ModelInput.from_ints([1, 2, 3])
                sampled = sampler.sample(prompt, 2, params).result()
                got[-1].append([list(one.tokens) for one in sampled.sequences])
            step += 1
        saves.append(client.save_state(name="last"))
        return got, [hashes(server, save.result().path) for save in saves]


def seen(seed):
    """A datum with an image."""
    image = types.ImageChunk(data=png(seed), format="png", expected_tokens=6)
    shown = types.ModelInput(chunks=[image, types.EncodedTextChunk(tokens=[7, 8, 9])])
    inputs = {"target_tokens": [3] * 6 + [7, 8, 9], "weights": [0.0] * 6 + [1.0] * 3}
    return types.Datum(model_input=shown, loss_fn_inputs=inputs)


def hashes(server, path):
    folder = server.data_dir / "store" / "runs" / path.removeprefix("tinker://")
    files = json.loads((folder / "commit.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


def both(server, make_datum, *go_on):
    """The results of one client per callback, which gets the number of steps and decides whether to continue."""
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(run, server, make_datum, 3 + i, one) for i, one in enumerate(go_on)]
        return [one.result() for one in running]


def kill(server, way):
    """Kill or stop the named processes, once they all run."""
    number = signal.SIGSTOP if way.startswith("stop ") else signal.SIGKILL
    what = way.removeprefix("stop ")
    if what == "up":
        below = server.descendants()
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not any(map(runs, below)), PATIENCE)  # its children end with `up`
        server.start()
        return
    names = {"all": ["engine", "api", "worker"]}.get(what, [what])

    def pids():
        found = [server.workers() if name == "worker" else server.parts(name) for name in names]
        return [pid for some in found for pid in some] if all(found) else []

    for pid in wait_for(pids, PATIENCE):
        os.kill(pid, number)


def runs(pid):
    """Whether the process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_kills_do_not_change_results(tmp_path, start_server, make_datum, monkeypatch, request):
    print(f"CRASH_LOOP_SEED={SEED}")
    if DATABASE == "postgres":
        monkeypatch.setenv("TINKERFLOW_DATABASE_URL", request.getfixturevalue("postgres_database")("crashes"))
    settings = {"PREFECT": PREFECT, "HEARTBEAT_TIMEOUT": "3", "SNAPSHOT_STEPS": "4", "MICROBATCH_TOKENS": "64"}
    for name, value in settings.items():
        monkeypatch.setenv(f"TINKERFLOW_{name}", value)
    chance, killed, progress = random.Random(SEED), [], Progress()
    planned = ways(chance)

    def go_on(step):
        if step:
            progress.made()
        return not progress.over

    def killer():
        try:
            while len(killed) < KILLS and progress.wait_for_another():
                time.sleep(chance.random() * 0.3)
                killed.append(planned[len(killed)])
                began = time.monotonic()
                kill(server, killed[-1])
                if progress.wait_for_another():
                    print(f"{len(killed)} {killed[-1]}: next step after {time.monotonic() - began:.1f} s", flush=True)
        finally:
            progress.end()

    served = ["--base-model", str(make_family(tmp_path / "model", FAMILY))] if FAMILY else []
    with start_server(tmp_path, *served) as server:
        with ThreadPoolExecutor(1) as thread:
            killing = thread.submit(killer)
            try:
                got = both(server, make_datum, go_on, go_on)
            finally:
                progress.end()
            killing.result()
        assert killed == planned
        steps = [len(numbers) for numbers, _ in got]
        print(f"steps of the two clients: {steps}")
        expected = both(server, make_datum, *(partial(operator.gt, made) for made in steps))
    assert got == expected
