"""Ten base models on a pool for three: what the client of a cold one waits for, and what those of warm ones notice.

    python -m tests.benchmarks.turns [--models 10] [--groups 3] [--seconds 60]

Tiny models in real worker processes. One client trains on the first base model all the time, step after step. Beside
it, a client samples once from each other base model in turn: a group must start for it, and the one that was unused
longest ends. Each cold wait is printed with what the client was told. The steps of the first client must have the
losses of a run without any of this; their times are printed for the quiet time before, and for the time of the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tests.benchmarks.service import datum, server, tree
from tests.benchmarks.waiters import shown
from tinker import types

from tinkerflow.deployments.tiny_model import make_tiny

KEY = "tml-bench"
TOKENS = [1 + i % 200 for i in range(24)]


@dataclass
class Steps:
    """A client that makes steps until it is told to end: when each ended, how long it took, its loss."""

    trainer: tinker.TrainingClient
    ended: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    enough: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Make them."""
        while not self.enough.is_set():
            self.step()

    def step(self) -> None:
        """Make one."""
        began = time.monotonic()
        forward = self.trainer.forward_backward([datum(TOKENS)], "cross_entropy")
        self.trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        self.losses.append(forward.result().metrics["loss:sum"])
        self.ended.append(time.monotonic())
        self.seconds.append(self.ended[-1] - began)


def cold(url: str, base_model: str) -> tuple[float, list[str]]:
    """Sample 8 tokens from a base model: the seconds until they are there, and what the client was told meanwhile."""
    began, told = time.monotonic(), []
    session = _post(url, "create_session", {"sdk_version": "0.38.0"})["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base_model}
    sampler = _post(url, "create_sampling_session", asked)["sampling_session_id"]
    request = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:5]}]},
        "sampling_params": {"max_tokens": 8, "seed": 1, "temperature": 1.0},
    }
    number = _post(url, "asample", request)["request_id"]
    while (answer := _post(url, "retrieve_future", {"request_id": number})).get("type") == "try_again":
        if (reason := answer.get("queue_state_reason")) and reason not in told[-1:]:
            told.append(reason)
    if "error" in answer:
        raise RuntimeError(f"{base_model}: {answer}")
    return time.monotonic() - began, told


def _post(url: str, path: str, body: dict[str, object]) -> dict[str, str]:
    headers = {"X-API-Key": KEY, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/api/v1/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        content = answer.read()
    return dict(json.loads(content)) if content.startswith(b"{") else {}  # a sample is protobuf


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the quiet time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        first = make_tiny(place / "0")
        names = [str(first), *(str(shutil.copytree(first, place / str(one))) for one in range(1, args.models))]
        settings = {"BASE_MODELS": json.dumps(names), "MAX_GROUPS": str(args.groups), "POLL_HOLD": "2"}
        with server(place / "data", settings) as (url, pid):
            client = tinker.ServiceClient(base_url=url, api_key=KEY)
            alone, steps = (
                Steps(client.create_lora_training_client(base_model=names[0], rank=8, seed=3).result()) for _ in "ab"
            )
            cold(url, names[1])  # compiles what samples need
            steps.step()  # and what steps need
            thread = threading.Thread(target=steps.run, daemon=True)
            thread.start()
            time.sleep(args.seconds)
            began, most, waits = time.monotonic(), 0, []
            for name in names[1:]:
                took, told = cold(url, name)
                waits.append(took)
                most = max(most, workers(pid))
                print(f"base model {Path(name).name}: {took:.1f} s, told {told}", flush=True)
            steps.enough.set()
            thread.join()
            for _ in steps.losses:
                alone.step()
    quiet = [took * 1e3 for took, end in zip(steps.seconds, steps.ended, strict=True) if end < began]
    among = [took * 1e3 for took, end in zip(steps.seconds, steps.ended, strict=True) if end >= began]
    print(f"cold waits: median {statistics.median(waits):.1f} s, longest {max(waits):.1f} s")
    print(f"worker processes at a time: {most} at most, load {os.getloadavg()[0]:.1f}")
    print(f"steps of the warm one in the quiet time: {len(quiet)}, {shown(quiet)}")
    print(f"steps of the warm one during the turns:  {len(among)}, {shown(among)}")
    print(f"its losses are those of a run alone: {steps.losses == alone.losses}", flush=True)
    os._exit(steps.losses != alone.losses or most > args.groups)  # the SDK's threads would hold this process


def workers(pid: int) -> int:
    """How many worker processes the service has."""
    lines = (Path(f"/proc/{one}/cmdline") for one in tree(pid))
    return sum(b"tinkerflow.backend.pool.worker" in line.read_bytes() for line in lines if line.exists())


if __name__ == "__main__":
    main()
