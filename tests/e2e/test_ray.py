"""`tinkerflow up --launcher ray` on a Ray cluster of three nodes, which are processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from descent import cmdline, descendants
from tests.waiting import wait_for
from tinker import types

pytestmark = pytest.mark.thorough

WORKER = "tinkerflow.backend.pool.worker"


@dataclass(frozen=True)
class Nodes:
    """A Ray cluster. raylets: pids, the head's first. logs: the folder that Ray's dashboard shows."""

    address: str
    raylets: tuple[int, ...]
    logs: Path

    def workers(self, raylet: int) -> list[int]:
        """Pids of our worker processes on a node."""
        return [pid for pid in descendants(raylet) if WORKER in cmdline(pid)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    with (tmp_path / "nodes.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdin is not None and process.stdout is not None
    below: set[int] = set()
    try:
        said = process.stdout.readline()
        assert said, (tmp_path / "nodes.log").read_text()
        below.update(descendants(process.pid))
        found = json.loads(said)
        yield Nodes(found["address"], tuple(found["raylets"]), Path(found["logs"]))
        below.update(descendants(process.pid))
        process.stdin.close()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
        for pid in below:
            if cmdline(pid):
                os.kill(pid, signal.SIGKILL)


def train(client, make_datum, kill: Callable[[], None] = lambda: None):
    """Train and sample; return all numbers of the answers, and the seconds from `kill` to the next answer."""
    tokens = [1 + i % 200 for i in range(80)]
    futures, waited = [], 0.0
    for step in range(6):
        futures.append(client.forward_backward([make_datum(tokens[step:])] * 4, "cross_entropy"))
        futures.append(client.optim_step(types.AdamParams(learning_rate=1e-3)))
        if step == 2:
            futures[-1].result()
            began = time.monotonic()
            kill()
        if step == 3:
            futures[-1].result()
            waited = time.monotonic() - began
    metrics = [future.result().metrics for future in futures]
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokens[:20])
    greedy = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    sampled = sampler.sample(prompt, 1, greedy).result().sequences[0]
    return (metrics, sampler.compute_logprobs(prompt).result(), sampled.tokens, sampled.logprobs), waited


def test_killed_node_and_worker_change_no_result(nodes, tmp_path, start_server, make_datum) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    options = ("--launcher", "ray", "--ray-address", nodes.address, "--processes", "2")
    with start_server(data_dir, *options, prefect="off") as server:
        agents = {raylet: nodes.workers(raylet) for raylet in nodes.raylets}
        assert sorted(map(len, agents.values())) == [0, 1, 1]  # a node has one CPU, and each process requests one
        assert not server.workers()
        with server.client() as service:
            runs = [
                service.create_lora_training_client(base_model=server.base_model, rank=8, seed=3).result()
                for _ in range(3)
            ]
            expected, _ = train(runs[0], make_datum)

            node = next(raylet for raylet in nodes.raylets[1:] if agents[raylet])

            def kill_node() -> None:
                os.kill(node, signal.SIGKILL)
                wait_for(lambda: not cmdline(agents[node][0]))  # Ray ends the node's processes

            found, waited = train(runs[1], make_datum, kill_node)
            print(f"after the kill of a raylet: {waited:.1f} s")
            assert found == expected
            left = [raylet for raylet in nodes.raylets if raylet != node]
            assert [len(nodes.workers(raylet)) for raylet in left] == [1, 1]

            (worker,) = nodes.workers(left[-1])
            found, waited = train(runs[2], make_datum, lambda: os.kill(worker, signal.SIGKILL))
            print(f"after the kill of a worker: {waited:.1f} s")
            assert found == expected
            assert nodes.workers(left[-1]) not in ([], [worker])
        assert not (data_dir / "logs" / "worker-0.log").exists()
        logs = "".join(file.read_text(errors="replace") for file in nodes.logs.glob("worker-*"))
        assert "joined the group at" in logs and (data_dir / "group.secret").read_text().strip() not in logs
    wait_for(lambda: not [pid for raylet in nodes.raylets for pid in nodes.workers(raylet)])
