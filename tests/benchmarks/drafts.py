"""Sampling with and without drafts, without a server, in tokens per CPU-second.

    python -m tests.benchmarks.drafts [--repeat 3] [--rows]

Two samplers of small-qwen3 (small_model.py) with the default chunk take turns, with the same requests in each round.
The first round of each case compiles and does not count; the printed ratio is the median of the others.

    repetitive  greedy answers to 1, 2 and 8 prompts that repeat 8 tokens, so the answers loop
    random      the same prompts at temperature 1, so the next token is nearly uniform over the vocabulary

With --rows, only the cost of a step by its number of rows is printed, for the constants in `drafts.py`.

Answers may differ if the last bits of the probabilities decide on a token: a step with drafts has more rows and sums in
another order, as a larger batch does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.benchmarks.small_model import make_small

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.params import load_params
from tinkerflow.backend.compute.planning.memory_plan import plan_group
from tinkerflow.backend.compute.sampler import Sampler
from tinkerflow.backend.compute.sampler.model import SamplerModel
from tinkerflow.backend.spec.commands import GroupConfig, SampleRequest, SampleStep

TOKENS = 128


def requests(name: str, prompts: int, round_: int) -> tuple[SampleRequest, ...]:
    """The requests of a round. No two rounds share a prompt."""
    chance, temperature = np.random.default_rng([prompts, round_]), 0.0 if name == "repetitive" else 1.0
    periods = chance.integers(8, 8000, (prompts, 8)).astype(np.int32)
    return tuple(
        SampleRequest(f"{name}.{round_}.{i}", "o", None, np.tile(period, 8), 1, TOKENS, temperature, -1, 1.0, i)
        for i, period in enumerate(periods)
    )


def run(sampler: Sampler, asked: tuple[SampleRequest, ...]) -> tuple[float, list[list[int]]]:
    """Tokens per CPU-second, and the tokens of each request."""
    began, results = time.process_time(), dict[str, list[int]]()
    progress = sampler.step(SampleStep(asked))
    while True:
        results |= {result.request_id: result.sequences[0].tokens_T.tolist() for result in progress.finished}
        if not (progress.active or progress.waiting):
            break
        progress = sampler.step(SampleStep())
    tokens = [results[request.request_id] for request in asked]
    return sum(map(len, tokens)) / (time.process_time() - began), tokens


def step_costs(sampler: Sampler, repeat: int) -> None:
    """Print the CPU-milliseconds of a step for each number of rows: the median over the measured chunks."""
    costs: dict[int, list[float]] = {}
    real = SamplerModel.decode_chunk

    def timed(model: SamplerModel, rows: int, slots: Any, steps: int, before: Any) -> Any:
        began = time.process_time()
        chunk = real(model, rows, slots, steps, before)
        model.read_chunk(chunk)
        costs.setdefault(rows, []).append(1000 * (time.process_time() - began) / steps)
        return chunk

    for round_ in range(1 + repeat):
        SamplerModel.decode_chunk = timed if round_ else real  # type: ignore[method-assign]
        for rows in (1, 4, 8, 16, 32, 64):
            run(sampler, requests("random", rows, round_))
    SamplerModel.decode_chunk = real  # type: ignore[method-assign]
    medians = ", ".join(f"{rows}: {statistics.median(each):.0f}" for rows, each in costs.items())
    print(f"CPU-ms of a step by its rows: {medians}; load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="measured rounds of each case")
    parser.add_argument("--rows", action="store_true", help="only print the cost of a step by its rows")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_small(Path(scratch) / "small-qwen3")
        cfg, mesh = load_config(folder), make_mesh(1, 1)
        config = GroupConfig(str(folder), "float32", 1, 1, 512, 1024, 64, 8, "")
        plan, params = plan_group(cfg, config), load_params(cfg, folder, mesh, "float32")
        plain, drafting = (
            Sampler(cfg, params, mesh, replace(config, drafts=drafts), pages=plan.pages) for drafts in (False, True)
        )
        assert drafting.drafts is not None
        if args.rows:
            step_costs(plain, args.repeat)
            return
        for name in ("repetitive", "random"):
            for prompts in (1, 2, 8):
                rates, others = [], 0
                for round_ in range(1 + args.repeat):
                    before = drafting.drafts.drafted, drafting.drafts.accepted
                    asked = requests(name, prompts, round_)
                    (without, expected), (with_drafts, found) = run(plain, asked), run(drafting, asked)
                    others += sum(a != b for a, b in zip(found, expected, strict=True))
                    rates.append((without, with_drafts))
                ratio = statistics.median(with_drafts / without for without, with_drafts in rates[1:])
                without, with_drafts = map(statistics.median, zip(*rates[1:], strict=True))
                drafted = drafting.drafts.drafted - before[0]
                accepted = drafting.drafts.accepted - before[1]
                print(
                    f"{name:10s} x {prompts}: {without:6.1f} tokens a CPU-second, {with_drafts:6.1f} with drafts, "
                    f"{ratio:.2f} x; {accepted} of {drafted} accepted in the last round; "
                    f"{others} of {prompts * (1 + args.repeat)} answers differ; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
