"""The cost of twenty attacking projects for a bystander: `python -m tests.benchmarks.attacks [--seconds 60]`.

The service runs the tiny model and has a key for each project. Each attacker repeats one trick with several concurrent
requests; a few processes run all attackers. The bystander sends heartbeats and samples. Prints its latencies and
samples without and with the attackers, the attackers' answers, the API's peak memory, and the number of the service's
processes that ended. Fails if the 99th percentile of heartbeats reaches HEARTBEAT_SECONDS, if the API uses API_BYTES,
if a process restarted, or if the bystander gets less than its share of samples.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tests.benchmarks.attackers import MEBIBYTE, TRICKS
from tests.benchmarks.service import server, tree

from tinkerflow.backend.journal import Journal
from tinkerflow.backend.settings import Settings

PROJECTS = 20
PROCESSES = 4  # number of attackers
HEARTBEAT_SECONDS = 0.5
API_BYTES = 1500 * 2**20  # peak resident memory, with the default of max_body_bytes
SHARE = 0.5 / (PROJECTS + 1)  # of the rate without attackers: half of an equal share, as attackers use the cores, too


# ------------------------------------------------------------------ the bystander
class Bystander:
    """A project that sends heartbeats and samples as ordinary projects do."""

    def __init__(self, url: str, model: str, key: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120, headers={"X-API-Key": key})
        self._session = self._post("create_session", {"sdk_version": "0"})["session_id"]
        opened = {"session_id": self._session, "sampling_session_seq_id": 0, "base_model": model}
        self._sampler = self._post("create_sampling_session", opened)["sampling_session_id"]
        self._seq = 0

    def _post(self, path: str, body: Any) -> Any:
        return self._http.post(f"/api/v1/{path}", json=body).raise_for_status().json()

    def measure(self, seconds: float) -> tuple[list[float], list[float]]:
        """The seconds of each heartbeat and of each sample during this time. Both are sent concurrently."""
        beats, samples, end = list[float](), list[float](), time.perf_counter() + seconds

        def beat() -> None:
            while time.perf_counter() < end:
                began = time.perf_counter()
                self._post("session_heartbeat", {"session_id": self._session})
                beats.append(time.perf_counter() - began)
                time.sleep(0.1)

        thread = threading.Thread(target=beat)
        thread.start()
        while time.perf_counter() < end:
            began = time.perf_counter()
            self.sample()
            samples.append(time.perf_counter() - began)
        thread.join()
        return beats, samples

    def sample(self, constraint: Any = None) -> None:
        """Submit a sample, and wait for its result."""
        self._seq += 1
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        body = {"sampling_session_id": self._sampler, "seq_id": self._seq, "prompt": prompt}
        params = {"max_tokens": 32, "stop": [], "constraint": constraint}
        submitted = self._post("asample", {**body, "sampling_params": params})
        while True:
            answer = self._http.post("/api/v1/retrieve_future", json={"request_id": submitted["request_id"]})
            if b"try_again" not in answer.content:
                answer.raise_for_status()
                return


@contextmanager
def _attackers(url: str, model: str, keys: dict[int, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process of attackers until the block ends, at a lower priority than the service."""
    command = ["nice", sys.executable, "-m", "tests.benchmarks.attackers", url, model, json.dumps(keys)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def percentiles(times: list[float]) -> str:
    """The median, the 99th percentile and the longest of times in seconds, as text."""
    p50, p99, longest = (*np.percentile(times, (50, 99)), max(times))
    return f"p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms, longest {longest * 1000:.0f} ms"


def peak_of_api(pid: int) -> int:
    """The peak resident memory of the API process, in bytes."""
    for process in tree(pid):
        if b"tinkerflow\0api" in Path(f"/proc/{process}/cmdline").read_bytes():
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
            assert found is not None
            return int(found[1]) * 1024
    raise AssertionError("no API process")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of tricks; default: all")
    args = parser.parse_args()
    chosen = range(len(TRICKS)) if args.only is None else args.only
    with tempfile.TemporaryDirectory() as folder, server(Path(folder), {}) as (url, pid):
        journal = Journal.open(Settings(data_dir=Path(folder)).journal_url)
        keys = [journal.keys.create(f"key {n}", f"project {n}")[1] for n in range(PROJECTS + 1)]
        time.sleep(2)  # wait until the API requires keys
        models = httpx.get(f"{url}/v1/models", headers={"X-API-Key": keys[0]}).json()["data"]
        bystander = Bystander(url, models[0]["id"], keys[0])
        for _ in range(10):
            bystander.sample()
        bystander.sample({"type": "regex", "value": "[a-z]+"})  # compile the program that attackers need
        beats, alone = bystander.measure(args.seconds / 3)
        quiet = len(alone) / (args.seconds / 3)
        print(f"without attackers: heartbeats {percentiles(beats)}; samples {percentiles(alone)}, {quiet:.1f} a second")
        processes = set(tree(pid))
        shared = [{number: keys[1 + number] for number in chosen[first::PROCESSES]} for first in range(PROCESSES)]
        with ExitStack() as stack:
            attackers = [stack.enter_context(_attackers(url, models[0]["id"], theirs)) for theirs in shared]
            for attacker in attackers:
                assert attacker.stdout is not None and attacker.stdout.readline().strip() == "ready"
            for attacker in attackers:
                assert attacker.stdin is not None
                print(file=attacker.stdin, flush=True)
            beats, samples = bystander.measure(args.seconds)
            for attacker in attackers:
                attacker.terminate()
            for attacker in attackers:
                print(attacker.communicate(timeout=60)[0].rstrip())
        rate, peak, ended = len(samples) / args.seconds, peak_of_api(pid), processes - set(tree(pid))
        times = f"heartbeats {percentiles(beats)}; samples {percentiles(samples)}, {rate:.1f} a second"
        print(f"with {len(chosen)} attackers: {times}")
        load = os.getloadavg()[0]
        print(f"the API had at most {peak / MEBIBYTE:.0f} MiB; processes that ended: {len(ended)}; load {load:.1f}")
        journal.close()
    assert np.percentile(beats, 99) < HEARTBEAT_SECONDS, "heartbeats took too long"
    assert peak < API_BYTES, "the API took too much memory"
    assert not ended, "something restarted"
    assert rate > SHARE * quiet, "samples got less than their share"


if __name__ == "__main__":
    main()
