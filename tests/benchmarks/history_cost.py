"""The cost of a history per step: a service that keeps all histories takes turns with one that keeps none.

    python -m tests.benchmarks.history_cost [--steps 1000]

Prints the wall p50 and p95 of a step 1x8 on each, and the CPU time per step of all its processes, which includes the
writing of the history. The services make steps alternately, so other work on the machine slows both. RESULTS.md keeps
the output.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import tinker
from tests.benchmarks.service import cpu_seconds, datum, server
from tinker import types

_WARM = 300  # steps, so that the first segment of the history is written


class _Measured:
    """A service and the steps made on it."""

    def __init__(self, history: str, url: str, pid: int) -> None:
        self.history, self._pid = history, pid
        service = tinker.ServiceClient(base_url=url, api_key="tml-bench")
        self._client = service.create_lora_training_client(base_model="tinkerflow/tiny", rank=32).result()
        self._made, self._before = 0, 0.0
        self.walls: list[float] = []
        for _ in range(_WARM):
            self.step()

    def begin(self) -> None:
        """Start the measurement."""
        self.walls.clear()
        self._before = self._cpu()

    def step(self) -> None:
        """Make a step on data that no earlier step used."""
        self._made += 1
        tokens = [self._made // 100 + 10, self._made % 100 + 10, *range(12, 19)]
        start = time.perf_counter()
        forward = self._client.forward_backward([datum(tokens)], "cross_entropy")
        self._client.optim_step(types.AdamParams(learning_rate=0.0)).result()
        forward.result()
        self.walls.append((time.perf_counter() - start) * 1e3)

    def _cpu(self) -> float:
        return sum(cpu_seconds(self._pid).values())

    def cpu(self) -> float:
        """CPU-milliseconds per step."""
        return (self._cpu() - self._before) * 1e3 / len(self.walls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as services:
        both = [
            _Measured(history, *services.enter_context(server(Path(scratch, history), {"HISTORY": history})))
            for history in ("off", "all")
        ]
        for one in both:
            one.begin()
        for turn in range(args.steps):
            for one in both if turn % 2 else reversed(both):
                one.step()
        for one in both:
            p50, p95 = statistics.median(one.walls), statistics.quantiles(one.walls, n=20)[-1]
            print(f"history {one.history}: p50 {p50:.2f} ms, p95 {p95:.2f} ms, CPU {one.cpu():.2f} ms a step")
        off, all_ = both
        walls = statistics.median(all_.walls) / statistics.median(off.walls) - 1
        print(f"with histories: p50 {walls:+.1%}, CPU {all_.cpu() / off.cpu() - 1:+.1%}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
