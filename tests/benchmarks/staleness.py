"""The gain of sampling ahead with a slow environment: `python -m tests.benchmarks.staleness [--seconds 2] [--seeds 5]`.

The pipeline `rl` trains the tiny model with `max_staleness` 0, 1 and 2, in turns, on one service. Its environment
sleeps after each answer. Prints the steps per hour after the first few, which compile, and with --seeds the mean
rewards of the last steps of this many runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
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
    """Sleeps after each answer, rewards its vowels, and records the time and the reward."""

    def __init__(self, facts: Facts) -> None:
        """facts: the row's facts."""
        self._facts = facts

    async def begin(self) -> Sequence[Message]:
        """Ask the row's prompt."""
        return tuple(self._facts["prompt"])

    async def answered(self, text: str) -> Reply:
        """Reward the answer after the sleep."""
        await asyncio.sleep(float(os.environ[SECONDS]))
        reward = sum(letter in "aeiou" for letter in text) / max(1, len(text))
        _note(reward)
        return Reply(reward)


def _note(reward: float) -> None:
    with Path(os.environ[TIMES]).open("a", encoding="utf-8") as file:
        print(time.time(), reward, file=file)


def answers_of_run(
    url: str, folder: Path, staleness: int, seconds: float, name: str, seed: int = 0
) -> list[tuple[float, float]]:
    """Train, and return each answer's time and reward in order. name: of the run. seed: of its adapter and samples."""
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "Say {n}"}}\n' for n in range(8)))
    config = {
        "name": name,
        "data": {"url": str(folder / "rows.jsonl")},
        "environment": "tests.benchmarks.staleness:Sleepy",
        "group_size": GROUP,
        "answer_tokens": 16,
        "max_staleness": staleness,
        "model": {"seed": seed},
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
    lines = (line.split() for line in times.read_text().splitlines())
    return sorted((float(at), float(reward)) for at, reward in lines)


def steps_per_hour(answers: Sequence[tuple[float, float]]) -> float:
    """The steps of a run per hour, without the first few."""
    answered = [at for at, _ in answers[FIRST * ROWS * GROUP :]]
    return 3600 * (len(answered) / (ROWS * GROUP) - 1) / (answered[-1] - answered[0])


def last_reward(answers: Sequence[tuple[float, float]]) -> float:
    """The mean reward of the last quarter of a run."""
    return statistics.mean(reward for _, reward in answers[-len(answers) // 4 :])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0, help="that the environment sleeps for each answer")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=0, help="of the runs whose rewards are compared")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server(Path(folder) / "data", {}) as (url, _):
        run = partial(answers_of_run, url, Path(folder))
        run(1, 0.0, "warm-up")
        for turn in range(args.repeat):
            rates = {k: steps_per_hour(run(k, args.seconds, f"k{k}-{turn}")) for k in (0, 1, 2)}
            compared = "; ".join(f"k = {k}: {rate:.0f}, {rate / rates[0]:.2f} x" for k, rate in rates.items())
            print(f"steps per hour: {compared}; load {os.getloadavg()[0]:.1f}", flush=True)
        for k in (0, 1, 2) if args.seeds else ():
            found = [last_reward(run(k, args.seconds, f"k{k}-seed{seed}", seed)) for seed in range(args.seeds)]
            shown = " ".join(f"{reward:.3f}" for reward in found)
            print(
                f"last rewards: k = {k}: {shown}; {statistics.mean(found):.3f} +- {statistics.stdev(found):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
