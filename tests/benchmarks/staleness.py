"""What sampling ahead saves with a slow environment: `python -m tests.benchmarks.staleness [--seconds 2]`.

The pipeline `rl` trains the tiny model with `max_staleness` 0, 1 and 2, in turns, on one service. Its environment
sleeps for each answer. Printed are the steps per hour after the first few, which compile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from tests.benchmarks.service import server

from tinkerflow.tasks.pipelines.environments import Facts, Reply
from tinkerflow.tasks.pipelines.rows import Message

ROOT = Path(__file__).parent.parent.parent
STEPS, ROWS, GROUP = 24, 2, 4
FIRST = 4  # steps that may compile
SECONDS, TIMES = "SLEEPY_SECONDS", "SLEEPY_TIMES"


class Sleepy:
    """Sleeps for each answer, rewards its vowels, and notes the time."""

    def __init__(self, facts: Facts) -> None:
        """facts: of the row."""
        self._facts = facts

    async def begin(self) -> Sequence[Message]:
        """Ask the row's prompt."""
        return tuple(self._facts["prompt"])

    async def answered(self, text: str) -> Reply:
        """Reward the answer after a while."""
        await asyncio.sleep(float(os.environ[SECONDS]))
        _note_time()
        return Reply(sum(letter in "aeiou" for letter in text) / max(1, len(text)))


def _note_time() -> None:
    with Path(os.environ[TIMES]).open("a", encoding="utf-8") as file:
        print(time.time(), file=file)


def steps_per_hour(url: str, folder: Path, staleness: int, seconds: float, name: str) -> float:
    """Train, and count. name: of the run."""
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "Say {n}"}}\n' for n in range(8)))
    config = {
        "name": name,
        "data": {"url": str(folder / "rows.jsonl")},
        "environment": "tests.benchmarks.staleness:Sleepy",
        "group_size": GROUP,
        "answer_tokens": 16,
        "max_staleness": staleness,
        "training": {"steps": STEPS, "batch_size": ROWS},
    }
    (folder / "rl.yaml").write_text(yaml.safe_dump(config))
    times = folder / f"{name}.times"
    environment = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tinkerflow", "run", "rl", "--config", str(folder / "rl.yaml")]
    subprocess.run(
        [*command, "--data-dir", str(folder / "data")],
        env=os.environ | environment | {SECONDS: str(seconds), TIMES: str(times)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    answered = sorted(float(line) for line in times.read_text().splitlines())[FIRST * ROWS * GROUP :]
    return 3600 * (len(answered) / (ROWS * GROUP) - 1) / (answered[-1] - answered[0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0, help="that the environment sleeps for each answer")
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server(Path(folder) / "data", {}) as (url, _):
        steps_per_hour(url, Path(folder), 1, 0.0, "warm-up")
        for turn in range(args.repeat):
            rates = {k: steps_per_hour(url, Path(folder), k, args.seconds, f"k{k}-{turn}") for k in (0, 1, 2)}
            compared = "; ".join(f"k = {k}: {rate:.0f}, {rate / rates[0]:.2f} x" for k, rate in rates.items())
            print(f"steps per hour: {compared}; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
