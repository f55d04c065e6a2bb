"""What models, snapshots, programs and steps leave in the memory of a worker process on a CPU.

    python -m tests.benchmarks.worker_memory [--models 50]

Drives an executor in this process, on the tiny model. After each part: resident memory when freed memory was given
back, the bytes of all arrays, compiled programs, and memory maps. RESULTS.md keeps the output.
"""

from __future__ import annotations

import argparse
import gc
import resource
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tinkerflow.backend.compute.executor import Executor
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.commands import (
    Command,
    CreateAdapter,
    DropAdapter,
    DropSnapshot,
    Example,
    Forward,
    LoraSpec,
    OptimStep,
    PublishSnapshot,
    SampleRequest,
    SampleStep,
)
from tinkerflow.backend.spec.optimizers.adamw import AdamParams
from tinkerflow.backend.supervise.processes import give_back_memory
from tinkerflow.deployments.tiny_model import make_tiny
from tinkerflow.flows.groups import group_config

_DATA = np.random.default_rng(1)


class Driven:
    """An executor, and what a client would have it do."""

    def __init__(self, folder: Path) -> None:
        """It is loaded when this returns, and has compiled nothing. folder: for the model and the compile cache."""
        model = make_tiny(folder / "tiny")
        settings = Settings(data_dir=folder, base_models=(str(model),), warm_up=False)
        self._executor = Executor(group_config(settings, str(model), 8192), lambda line: None, 1, 0)

    def do(self, command: Command) -> Any:
        reply = self._executor.execute(command)
        return reply() if callable(reply) else reply

    def train(self, model: str) -> None:
        tokens = _DATA.integers(8, 1000, 24).astype(np.int32)
        example = Example(tokens[:-1], tokens[1:, None], np.ones((23, 1), np.float32))
        self.do(Forward(model, (example,), "cross_entropy"))
        self.do(OptimStep(model, AdamParams(learning_rate=1e-4)))

    def sample(self, model: str, snapshot: str) -> None:
        self.do(PublishSnapshot(model, snapshot))
        prompt = _DATA.integers(8, 1000, 8).astype(np.int32)
        asked = SampleRequest(snapshot, "owner", snapshot, prompt, 1, 8, 1.0, -1, 1.0, seed=1)
        progress = self.do(SampleStep(admit=(asked,)))
        while progress.active or progress.waiting:
            progress = self.do(SampleStep())

    def tell(self, what: str) -> None:
        gc.collect()
        give_back_memory()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        arrays, maps = jax.live_arrays(), Path("/proc/self/maps").read_text().count("\n")
        print(
            f"{what:32s} {pages * resource.getpagesize() / 2**20:7.1f} MiB resident, "
            f"arrays {sum(array.nbytes for array in arrays) / 2**20:6.1f} MiB, "
            f"{self._executor.compiles:3d} programs, {maps:5d} maps",
            flush=True,
        )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=50)
    models = [f"m{number}" for number in range(parser.parse_args().models)]
    with tempfile.TemporaryDirectory() as folder:
        driven = Driven(Path(folder))
        driven.tell("loaded")
        driven.do(CreateAdapter("a", LoraSpec(4), 7))
        driven.train("a")
        driven.tell("a model of rank 4, a step")
        driven.sample("a", "first")
        driven.tell("a sample")
        for _ in range(300):
            driven.train("a")
        driven.tell("300 steps")
        for number in range(150):
            driven.sample("a", f"dropped {number}")
            driven.do(DropSnapshot(f"dropped {number}"))
        driven.tell("150 samples, snapshots dropped")
        for number in range(50):
            driven.do(PublishSnapshot("a", f"kept {number}"))
        driven.tell("50 snapshots kept")
        for model in models:
            driven.do(CreateAdapter(model, LoraSpec(4), 7))
            driven.train(model)
        driven.tell(f"{len(models)} models, a step each")
        for model in models:
            driven.do(DropAdapter(model))
        driven.tell("these models dropped")
        for rank in range(5, 13):
            driven.do(CreateAdapter("b", LoraSpec(rank), 7))
            driven.train("b")
            driven.do(DropAdapter("b"))
        driven.tell("8 other ranks, each dropped")


if __name__ == "__main__":
    main()
