"""Conversations with and without answers in the prefix cache: `python -m tests.benchmarks.answers [--repeat 3]`.

Two samplers of small-qwen3 take turns, without a server. Each holds conversations of TURNS turns, one after the other.
One of them prefills answers in idle steps between the turns. Prints medians over all turns but the first: the computed
prompt tokens, the milliseconds until the first token, and the CPU-milliseconds for the prompt and for the whole turn,
including idle steps. The first round compiles and does not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tests.benchmarks.small_model import make_small

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.params import load_params
from tinkerflow.backend.compute.sampler import Sampler
from tinkerflow.backend.spec.commands import GroupConfig, SampleRequest, SampleResult, SampleStep

PAGES = 40  # enough for a conversation
TURNS, PROMPT, NEW, ANSWER = 5, 100, 40, 100


@dataclass
class Side:
    """One sampler. keeps: whether it prefills answers. turns: the printed figures of each turn."""

    sampler: Sampler
    keeps: bool
    turns: list[tuple[float, float, float, float]] = field(default_factory=list)

    def run(self, tokens_T: np.ndarray, most: int, seed: int) -> SampleResult:
        """Sample at most `most` tokens after the prompt, and return the result."""
        command = SampleStep((SampleRequest("a", "o", None, tokens_T, 1, most, 1.0, -1, 1.0, seed),))
        while True:
            progress, command = self.sampler.step(command), SampleStep()
            if progress.finished:
                return progress.finished[0]

    def talk(self, seed: int) -> list[list[int]]:
        """Hold a conversation, store its figures in `turns`, and return its answers."""
        chance, answers = np.random.default_rng(seed), []
        tokens_T = chance.integers(8, 8000, PROMPT).astype(np.int32)
        for turn in range(TURNS):
            began, cpu = time.perf_counter(), time.process_time()
            first = self.run(tokens_T, 1, seed)
            took, prefill = time.perf_counter() - began, time.process_time() - cpu
            answer_T = self.run(tokens_T, ANSWER, seed).sequences[0].tokens_T
            while self.keeps and self.sampler.step(SampleStep(idle=True)).answers:
                pass
            computed = float(len(tokens_T) - 1 - first.prompt_cache_hit_tokens)
            if turn:
                self.turns.append((computed, 1e3 * took, 1e3 * prefill, 1e3 * (time.process_time() - cpu)))
            answers.append(answer_T.tolist())
            new_T = chance.integers(8, 8000, NEW).astype(np.int32)
            tokens_T = np.concatenate([tokens_T, answer_T, new_T])
        return answers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_small(Path(scratch) / "small-qwen3")
        cfg, mesh = load_config(folder), make_mesh(1, 1)
        config = GroupConfig(str(folder), "float32", 1, 1, 2048, 1024, 64, 8, "")
        params = load_params(cfg, folder, mesh, "float32")
    sides = [Side(Sampler(cfg, params, mesh, config, pages=PAGES), keeps) for keeps in (True, False)]
    for seed in range(args.repeat + 1):
        one, other = (side.talk(seed) for side in sides)
        assert one == other, "the cache must not change a token"
        if not seed:
            for side in sides:
                side.turns.clear()
    for side in sides:
        computed, took, prefill, whole = map(statistics.median, zip(*side.turns, strict=True))
        print(
            f"{'with' if side.keeps else 'without'} answers: {computed:.0f} tokens, first token after {took:.0f} ms, "
            f"{prefill:.0f} CPU-ms for the prompt, {whole:.0f} CPU-ms for the turn; load {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    main()
