"""The cost of 1,000 histories for start and recovery: two services with 1,000 ended runs, with and without histories.

    python -m tests.benchmarks.history_start [--runs 1000] [--rounds 5] [--folder FOLDER]

The services take turns to be killed with `kill -9` and restarted. Prints the least wall and CPU time until the service
is ready, and the least wall time from a `kill -9` of its engine until a live run has made its next step.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import tinker
from tests.benchmarks.recovery import find
from tests.benchmarks.service import cpu_seconds, datum, server, step, tree

_RUNS_OF_A_SESSION = 25
_DATA = [datum(list(range(10, 19)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keeps the runs, so that they can be measured again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {history: Path(args.folder or scratch, history) for history in ("off", "all")}
        for history, folder in folders.items():
            if not folder.exists():
                _make_runs(folder, history, args.runs)
        figures: dict[str, dict[str, list[float]]] = {history: defaultdict(list) for history in folders}
        for turn in range(args.rounds):
            for history, folder in list(folders.items())[:: 1 if turn % 2 else -1]:
                for name, value in _start_and_recover(folder, history).items():
                    figures[history][name].append(value)
        for name in figures["off"]:
            off, kept = (min(figures[history][name]) for history in ("off", "all"))  # other work only adds time
            print(
                f"{name}: without histories {off:.2f} s, with {args.runs} histories {kept:.2f} s, {kept / off - 1:+.1%}"
            )
    print(f"load {os.getloadavg()[0]:.1f}")


def _make_runs(folder: Path, history: str, runs: int) -> None:
    """Train runs of one step, end them, and wait until their histories are in the store."""
    with server(folder, {"HISTORY": history, "SESSION_TIMEOUT": "10"}) as (url, _):
        for first in range(0, runs, _RUNS_OF_A_SESSION):
            with tinker.ServiceClient(base_url=url, api_key="tml-bench") as service:
                for _ in range(first, min(first + _RUNS_OF_A_SESSION, runs)):
                    step(service.create_lora_training_client("tinkerflow/tiny", rank=8).result(), _DATA)
            print(f"history {history}: {first + _RUNS_OF_A_SESSION} runs", end="\r", flush=True)
        wanted = runs if history == "all" else 0
        while _segments(folder) < wanted:
            time.sleep(1)
    print()


def _segments(folder: Path) -> int:
    with closing(sqlite3.connect(f"file:{folder / 'journal.db'}?mode=ro", uri=True)) as database:
        return int(database.execute("select count(*) from history_segment").fetchone()[0])


def _start_and_recover(folder: Path, history: str) -> dict[str, float]:
    """Start the service, kill its engine during a live run, and then the whole service; return the times."""
    began = time.perf_counter()
    with server(folder, {"HISTORY": history}) as (url, pid):
        start, spent = time.perf_counter() - began, sum(cpu_seconds(pid).values())
        with tinker.ServiceClient(base_url=url, api_key="tml-bench") as service:
            client = service.create_lora_training_client("tinkerflow/tiny", rank=8).result()
            step(client, _DATA)
            os.kill(find(pid, "-m tinkerflow engine"), signal.SIGKILL)
            next_step = step(client, _DATA)
        for process in tree(pid):
            os.kill(process, signal.SIGKILL)
    return {"start": start, "CPU time of a start": spent, "next step after a kill": next_step}


if __name__ == "__main__":
    main()
