"""The time from a kill to the next completed step, and its parts: `python -m tests.benchmarks.recovery`.

Starts `tinkerflow up` with the embedded tiny model and without Prefect, fills its compilation cache by a few steps, and
kills a worker and the engine in turn. The parts come from the time stamps in the engine's log.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from datetime import datetime
from pathlib import Path

import tinker
from tests.benchmarks.service import datum, server, step

ROUNDS = 3
STEPS = 12
_MARKS = {
    "noticed": re.compile(r"flows\.group_watch: .*a new one is being started"),
    "group serves": re.compile(r"flows\.group_watch: .*is ready; models are restored"),
    "model restored": re.compile(r"execution\.restore: model \S+ is restored"),
}


def main() -> None:
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        with server(data_dir, {"SNAPSHOT_STEPS": "5"}) as (url, pid):
            measure(url, data_dir, pid)


def measure(url: str, data_dir: Path, up: int) -> None:
    """Kill a worker and the engine in turn, and print the time until the next step."""
    with tinker.ServiceClient(base_url=url, api_key="tml-bench") as service:
        base = service.get_server_capabilities().supported_models[0].model_name
        client = service.create_lora_training_client(base_model=str(base), rank=8, seed=1).result()
        data = [datum(list(range(1, 41)))]
        steps = [step(client, data) for _ in range(STEPS)]
        print(f"step without a kill: median {statistics.median(steps[2:]) * 1000:.0f} ms (a snapshot every 5 steps)")
        for part in ("tinkerflow.backend.pool.worker", "-m tinkerflow engine") * ROUNDS:
            began = time.time()
            os.kill(find(up, part), signal.SIGKILL)
            step(client, data)
            total = time.time() - began
            parts = {name: stamp - began for name, stamp in stamps(data_dir / "logs" / "engine.log", began).items()}
            shown = ", ".join(f"{name} after {seconds:.2f} s" for name, seconds in parts.items())
            print(f"{part}: next step after {total:.2f} s ({shown})", flush=True)
            for _ in range(STEPS):
                step(client, data)


def find(up: int, words: str) -> int:
    """The pid of a descendant of `up` whose command line contains these words."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    below, size = {up}, 0
    while len(below) > size:
        size = len(below)
        below |= {int(pid) for pid, parent, _ in rows if int(parent) in below}
    return next(int(pid) for pid, _, args in rows if int(pid) in below and words in args)


def stamps(log: Path, since: float) -> dict[str, float]:
    """When each of _MARKS was first logged after `since`, in seconds since the epoch."""
    found: dict[str, float] = {}
    for line in log.read_text().splitlines():
        try:
            at = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        except ValueError:
            continue
        for name, mark in _MARKS.items():
            if at >= since and mark.search(line):
                found.setdefault(name, at)
    return found


if __name__ == "__main__":
    main()
