"""What twenty attacking projects cost a bystander: `python -m tests.benchmarks.attacks [--seconds 60]`.

A service on the tiny model, with a key for each project. Each attacker repeats one trick, with several requests at a
time, from a few processes. The bystander sends heartbeats and samples. Printed are its latencies and samples
without and with the attackers, the answers that the attackers get, the API's peak of memory, and which processes of the
service ended. It fails when heartbeats at the 99th percentile take HEARTBEAT_SECONDS, when the API has more than
API_BYTES, when something restarted, or when the bystander's samples get less than their share.
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
PROCESSES = 4  # of attackers
HEARTBEAT_SECONDS = 0.5
API_BYTES = 1500 * 2**20  # the memory that is resident at the same time, with the default of max_body_bytes
SHARE = 0.5 / (PROJECTS + 1)  # of the samples without attackers: half of an equal share, as the cores are shared, too


# ------------------------------------------------------------------ the bystander
class Bystander:
    """A project that does what projects do."""

    def __init__(self, url: str, model: str, key: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120, headers={"X-API-Key": key})
        self._session = self._post("create_session", {"sdk_version": "0"})["session_id"]
        opened = {"session_id": self._session, "sampling_session_seq_id": 0, "base_model": model}
        self._sampler = self._post("create_sampling_session", opened)["sampling_session_id"]
        self._seq = 0

    def _post(self, path: str, body: Any) -> Any:
        return self._http.post(f"/api/v1/{path}", json=body).raise_for_status().json()

    def measure(self, seconds: float) -> tuple[list[float], list[float]]:
        """Seconds of each heartbeat, and of each sample, in this time. Samples continue during heartbeats."""
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
        """One sample, from its submit to its result."""
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
    """A process of attackers, until the block ends. It leaves the cores to the service when that has work."""
    command = ["nice", sys.executable, "-m", "tests.benchmarks.attackers", url, model, json.dumps(keys)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def percentiles(times: list[float]) -> str:
    """The median, the 99th percentile and the longest, for people."""
    p50, p99, longest = (*np.percentile(times, (50, 99)), max(times))
    return f"p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms, longest {longest * 1000:.0f} ms"


def peak_of_api(pid: int) -> int:
    """Bytes that the API process had resident at most."""
    for process in tree(pid):
        if b"tinkerflow\0api" in Path(f"/proc/{process}/cmdline").read_bytes():
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
            assert found is not None
            return int(found[1]) * 1024
    raise AssertionError("no API process")


def main() -> None:
    """Measure, print, and fail when a bound is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of tricks; default: all")
    args = parser.parse_args()
    chosen = range(len(TRICKS)) if args.only is None else args.only
    with tempfile.TemporaryDirectory() as folder, server(Path(folder), {}) as (url, pid):
        journal = Journal.open(Settings(data_dir=Path(folder)).journal_url)
        keys = [journal.keys.create(f"key {n}", f"project {n}")[1] for n in range(PROJECTS + 1)]
        time.sleep(2)  # until the API needs keys
        models = httpx.get(f"{url}/v1/models", headers={"X-API-Key": keys[0]}).json()["data"]
        bystander = Bystander(url, models[0]["id"], keys[0])
        for _ in range(10):
            bystander.sample()
        bystander.sample({"type": "regex", "value": "[a-z]+"})  # so that no attacker is the first to need its program
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
