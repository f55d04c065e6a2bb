"""Our training through the SDK, compared with Hugging Face + PEFT: tokens per CPU-second, and the share of the peak.

    python -m tests.benchmarks.speed [--model FOLDER] [--cases train,long,ragged] [--repeat 3] [--small]

A run starts `tinkerflow up` without Prefect, which takes turns with plain loops in this process (plain.py). Each case
runs a round on our server, a round of the plain loop, and float32 matmuls by torch and by JAX. The faster matmul is the
peak. Our CPU time is measured over the server's whole process tree, and the plain loop's CPU time in this process. Wall
times are not reliable on a shared machine, and two hyper-threads of a core slow each other, so compare only figures of
the same run. The server has no warm-up, and a round with a compilation is repeated. Utilisation is the rate of the
arithmetic that a step needs at least (`Bench.flops`) over the peak. Without --model, small-qwen3 is made in a scratch
folder (small_model.py); --small uses the tiny model. Without peft, there is no plain loop. RESULTS.md keeps the output.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads would burn CPU while they wait for a busy core

import tinker
from tests.benchmarks.peak import matmul_peak
from tests.benchmarks.service import at_once, cpu_seconds, datum, random_ids, server, step, warm
from tests.benchmarks.small_model import make_small
from tinker import types

from tinkerflow.backend.compute.models.families import load_config, projections
from tinkerflow.deployments.tiny_model import make_tiny

RANK = 32
RAGGED = [32 + round(i * 480 / 15) for i in range(16)]
PROMPT, NEW = 64, 64


@dataclass
class Side:
    """A measured program. call: makes a round. spent: reads its CPU clock.

    data_dir: the server's data dir, if there is a server. Rounds with a compilation do not count.
    """

    name: str
    call: Callable[[], object]
    spent: Callable[[], float]
    data_dir: Path | None = None
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def turn(self) -> None:
        """Measure a round."""
        cpu, wall = warm(self._round, self.data_dir) if self.data_dir else self._round()
        self.cpu.append(cpu)
        self.wall.append(wall)

    def _round(self) -> tuple[float, float]:
        spent, began = self.spent(), time.perf_counter()
        self.call()
        return self.spent() - spent, time.perf_counter() - began


@dataclass(frozen=True)
class Case:
    """A measured case: rounds of `tokens` useful tokens that need `flops` floating-point operations."""

    name: str
    tokens: int
    flops: float
    ours: Callable[[], object]
    plain: Callable[[], object] | None


def compare(case: Case, pid: int, data_dir: Path, repeat: int) -> None:
    """Warm up, take turns, and print a line for each side."""
    sides = [Side("ours", case.ours, lambda: sum(cpu_seconds(pid).values()), data_dir)]
    if case.plain is not None:
        sides.append(Side("HF + PEFT", case.plain, time.process_time))
    for side in sides:
        side.call()  # compiles
    peaks = [matmul_peak()]
    for _ in range(repeat):
        for side in sides:
            side.turn()
        peaks.append(matmul_peak())
    rates = [case.tokens / statistics.median(side.cpu) for side in sides]
    for side, rate in zip(sides, rates, strict=True):
        wall = case.tokens / statistics.median(side.wall)
        achieved = case.flops / case.tokens * rate / 1e9
        used = f"{achieved:.1f} of {max(peaks):.1f} GFLOP/CPU-s = {achieved / max(peaks):.0%}"
        print(
            f"{case.name:20s} {side.name:10s} {rate:7.1f} tokens/CPU-s ({wall:.1f} tokens/s), {used}; "
            f"ratio to ours {rate / rates[0]:.2f}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


@dataclass(frozen=True)
class Bench:
    """A server, its model, and the cases that run on it. plain: whether plain loops run, too."""

    service: tinker.ServiceClient
    model: str
    plain: bool

    def client(self) -> tinker.TrainingClient:
        return self.service.create_lora_training_client(base_model=self.model, rank=RANK, seed=1).result()

    def flops(self, lengths: list[int], *, train: bool) -> float:
        """The least number of floating-point operations for sequences of these lengths.

        A frozen matrix of n weights takes 2 n per token forward, and 2 n back to its input. An adapter's matrix takes
        2 n forward and 4 n back. Attention between two tokens takes 4 H d per layer forward and 8 H d back.
        """
        cfg = load_config(self.model)
        sizes = {name: (matrix.inputs, matrix.outputs) for name, matrix in projections(cfg).items()}
        times = {name: 1 if name == "unembed" else cfg.layers for name in sizes}
        frozen = sum(times[name] * rows * columns for name, (rows, columns) in sizes.items())
        adapter = sum(times[name] * RANK * (rows + columns) for name, (rows, columns) in sizes.items())
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        attention = 4 * cfg.heads * cfg.attentions[0].widths[0] * cfg.layers * pairs
        forward = 2 * (frozen + adapter) * sum(lengths) + attention
        return forward + (2 * (frozen + 2 * adapter) * sum(lengths) + 2 * attention if train else 0)

    def training(self, name: str, lengths: list[int]) -> Case:
        """A training step on sequences of these lengths."""
        client, data = self.client(), [datum(random_ids(length + 1)) for length in lengths]
        plain = plain_step(self.model, lengths) if self.plain else None
        return Case(name, sum(lengths), self.flops(lengths, train=True), lambda: step(client, data), plain)

    def clients(self, count: int, lengths: list[int]) -> Case:
        """The same step by `count` concurrent clients, each with its own adapter."""
        clients, data = [self.client() for _ in range(count)], [datum(random_ids(length + 1)) for length in lengths]
        flops = count * self.flops(lengths, train=True)

        def together() -> None:
            at_once(partial(step, client, data) for client in clients)

        return Case(f"{count} clients {shape(lengths)}", count * sum(lengths), flops, together, None)

    def sampling(self, count: int) -> Case:
        """A sample of each of `count` concurrent prompts."""
        sampler = self.client().save_weights_and_get_sampling_client().result()
        prompts = [random_ids(PROMPT) for _ in range(count)]
        params = types.SamplingParams(max_tokens=NEW, temperature=1.0)

        async def burst() -> None:
            made = await asyncio.gather(
                *(sampler.sample(types.ModelInput.from_ints(ids), 1, params) for ids in prompts)
            )
            ended = sum(len(answer.sequences[0].tokens) < NEW for answer in made)
            if ended:
                print(f"{ended} of {count} samples ended early: their missing tokens count as made", flush=True)

        lengths = [PROMPT + NEW] * count
        plain = plain_generate(self.model, prompts) if self.plain else None
        return Case(
            f"sample {count} x {PROMPT} + {NEW}",
            count * NEW,
            self.flops(lengths, train=False),
            lambda: asyncio.run(burst()),
            plain,
        )


def plain_step(model: str, lengths: list[int]) -> Callable[[], object]:
    """The same step by Hugging Face and PEFT. The import is late because peft is optional."""
    from tests.benchmarks import plain

    return plain.trainer(model, lengths, RANK)


def plain_generate(model: str, prompts: list[list[int]]) -> Callable[[], object]:
    """The same samples by Hugging Face's generate."""
    from tests.benchmarks import plain

    return plain.generator(model, prompts, NEW, RANK)


def shape(lengths: list[int]) -> str:
    """`8x128`, or `16 of 32..512`."""
    least, most = min(lengths), max(lengths)
    return f"{len(lengths)}x{most}" if least == most else f"{len(lengths)} of {least}..{most}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--small", action="store_true", help="the tiny model")
    parser.add_argument("--cases", default="train,long,ragged,clients,sample")
    parser.add_argument("--repeat", type=int, default=3, help="measured rounds of each")
    args = parser.parse_args()
    random.seed(0)
    plain = importlib.util.find_spec("peft") is not None
    if not plain:
        print("no plain loop: peft is not installed (pip install peft)")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = make_tiny(scratch / "tiny") if args.small else None
        model = args.model or str(made or make_small(scratch / "small-qwen3"))
        data_dir = scratch / "data"
        url, pid = stack.enter_context(server(data_dir, {}, model=model))
        bench = Bench(stack.enter_context(tinker.ServiceClient(base_url=url, api_key="tml-bench")), model, plain)
        cases: dict[str, list[Callable[[], Case]]] = {
            "train": [lambda: bench.training("train 8x128", [128] * 8)],
            "long": [lambda: bench.training("train 16x512", [512] * 16)],
            "ragged": [lambda: bench.training("train 16 of 32..512", RAGGED)],
            "clients": [lambda count=count: bench.clients(count, [128] * 8) for count in (1, 4)],
            "tiny-clients": [lambda count=count: bench.clients(count, [32] * 2) for count in (1, 16)],
            "sample": [lambda: bench.sampling(64), lambda: bench.sampling(1)],
        }
        for name in args.cases.split(","):
            for case in cases[name]:
                compare(case(), pid, data_dir, args.repeat)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
