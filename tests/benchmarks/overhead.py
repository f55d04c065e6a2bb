"""What recovery costs a training step: a server with the default snapshots beside one that takes none, by turns.

    python -m tests.benchmarks.overhead [--model FOLDER] [--rounds 4] [--seconds 75] [--batch 8] [--tokens 128]
                                        [--snapshot-steps 50]

Each round runs one server's client for so many seconds, then the other's: longer than the time between two snapshots.
Counted are the CPU-seconds of a server's whole tree (engine, API, worker) while it is its turn, and the wall of each
step. The record of what was executed is the journal's own row of each request, which both write. Without --model the
small-qwen3 shape is made in a scratch folder (small_model.py). With --snapshot-steps 1 what one snapshot costs stands
out of the noise of a busy machine. RESULTS.md keeps the output.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import tinker
from tests.benchmarks.service import cpu_seconds, datum, server, step
from tests.benchmarks.small_model import make_small
from tinker import types

NEVER = "1000000000"


@dataclass
class Side:
    """One of the two servers, its client, and what was measured of it."""

    name: str
    pid: int
    data_dir: Path
    client: tinker.TrainingClient
    walls: list[float] = field(default_factory=list)
    cpu: float = 0.0
    snapshots: int = 0

    def turn(self, seconds: float, data: list[types.Datum]) -> None:
        """Make steps for so long."""
        cpu, taken, began = self.spent(), self.taken(), time.perf_counter()
        while time.perf_counter() - began < seconds:
            self.walls.append(step(self.client, data))
        self.cpu += self.spent() - cpu
        self.snapshots += self.taken() - taken

    def spent(self) -> float:
        """CPU-seconds of the server's processes so far."""
        return sum(cpu_seconds(self.pid).values())

    def taken(self) -> int:
        """Recovery snapshots so far: each has a name of its own, and its number of them is in the engine's log."""
        return len(re.findall(r"tasks\.recovery: snapshot of model", (self.data_dir / "logs/engine.log").read_text()))


def main() -> None:
    """Parse the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=75.0, help="of one turn")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--snapshot-steps", default="50")
    args = parser.parse_args()
    ways = {
        f"snapshots every {args.snapshot_steps} steps or 60 s": {"SNAPSHOT_STEPS": args.snapshot_steps},
        "no snapshots": {"SNAPSHOT_STEPS": NEVER, "SNAPSHOT_SECONDS": NEVER},
    }
    row = [1 + i * 7 % 1000 for i in range(args.tokens + 1)]
    data = [datum(row)] * args.batch
    print(
        f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, steps of {args.batch} x {args.tokens} tokens"
    )
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = args.model or str(make_small(scratch / "small-qwen3"))
        sides = []
        for number, (name, snapshots) in enumerate(ways.items()):
            data_dir = scratch / str(number)
            url, pid = stack.enter_context(server(data_dir, snapshots, model=model))
            service = stack.enter_context(tinker.ServiceClient(base_url=url, api_key="tml-bench"))
            client = service.create_lora_training_client(base_model=model, rank=32, seed=1).result()
            step(client, data), step(client, data)  # compiles
            sides.append(Side(name, pid, data_dir, client))
        for number in range(args.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                side.turn(args.seconds, data)
                print(f"round {number + 1}, {side.name}: {report(side)}; load {os.getloadavg()[0]:.1f}", flush=True)
        on, off = sides
        plain = off.cpu / len(off.walls)
        cpu, wall = on.cpu / len(on.walls) - plain, statistics.mean(on.walls) / statistics.mean(off.walls) - 1
        print(f"snapshots cost {cpu / plain:+.1%} of a step's CPU and {wall:+.1%} of its wall time")
        one = cpu * len(on.walls) / on.snapshots
        print(f"one of them costs {one:.2f} CPU-s, {one / plain:.1%} of a step; {sizes(on.data_dir)}")


def sizes(data_dir: Path) -> str:
    """What the log says of the last snapshot."""
    said = re.findall(r"snapshot of model \S+ at request \d+: (.*)", (data_dir / "logs/engine.log").read_text())
    return f"the last one: {said[-1]}"


def report(side: Side) -> str:
    """All that was measured of a side so far."""
    spent, mean, median = side.cpu / len(side.walls), statistics.mean(side.walls), statistics.median(side.walls)
    return (
        f"{len(side.walls)} steps so far, {spent:.2f} CPU-s each, wall mean {mean:.2f} s, median {median:.2f} s, "
        f"{side.snapshots} snapshots"
    )


if __name__ == "__main__":
    main()
