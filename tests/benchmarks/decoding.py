"""The samplers of this tree and of another one, without a server: CPU-milliseconds per generated token.

    python -m tests.benchmarks.decoding [--against TREE] [--cases burst,one,mixed,group,closed] [--repeat 3] [--profile]

Each tree has its own process. The processes take turns, case by case and round by round, on small-qwen3
(small_model.py). The first round of a case compiles and does not count; figures are medians of the others. Only the
CPU time of the computing process counts. TREE is a checkout whose `.package` folder names it `tinkerflow`.

    burst   64 concurrent prompts of 64 tokens, each with an answer of 64 tokens
    one     a prompt of 64 tokens with an answer of 64 tokens
    mixed   64 sequences of about 32 to 2,048 positions; only chunks in which all 64 decode count
    group   8 samples of 16 tokens from one prompt of 2,000 tokens
    closed  8 users who send their next prompt after their last answer, with mixed lengths; and 8 x (50 + 64) at once

With --profile, a further round shows the shares of XLA's operations, by their names without numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData
from tests.benchmarks.small_model import make_small

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.params import load_params
from tinkerflow.backend.compute.planning.memory_plan import plan_group
from tinkerflow.backend.compute.sampler import Sampler
from tinkerflow.backend.spec.commands import GroupConfig, SampleRequest, SampleStep

ROOT = Path(__file__).resolve().parent.parent.parent
SLOTS, CHUNK, LONGEST = 64, 8, 2048
User = list[tuple[int, int]]  # (prompt tokens, answer tokens) of consecutive requests


class Measured:
    """One sampler and its rounds. No two requests have the same prompt."""

    def __init__(self, folder: Path) -> None:
        cfg, mesh = load_config(folder), make_mesh(1, 1)
        config = GroupConfig(str(folder), "float32", 1, 1, LONGEST + CHUNK, 1024, SLOTS, CHUNK, "")
        plan = plan_group(cfg, config)
        params, pages = load_params(cfg, folder, mesh, "float32"), int(1.2 * plan.pages)  # no case waits for pages
        self.sampler = Sampler(cfg, params, mesh, config, pages=pages, states=plan.states)
        self.chance, self.asked = np.random.default_rng(0), 0

    def request(self, user: int, prompt: int, most: int, samples: int = 1) -> SampleRequest:
        self.asked += 1
        tokens_T = self.chance.integers(8, 8000, prompt).astype(np.int32)
        return SampleRequest(f"{user}.{self.asked}", "o", None, tokens_T, samples, most, 1.0, -1, 1.0, self.asked)

    def users(self, users: list[User], samples: int = 1) -> float:
        """CPU-milliseconds per token. Each user sends the next request as soon as the last one is answered."""
        left, made, began = [list(user) for user in users], 0, time.process_time()
        admit = tuple(self.request(number, *user.pop(0), samples) for number, user in enumerate(left))
        waiting = len(admit)
        while waiting:
            finished = self.sampler.step(SampleStep(admit)).finished
            made += sum(len(sequence.tokens_T) for result in finished for sequence in result.sequences)
            asking = [int(result.request_id.split(".")[0]) for result in finished]
            admit = tuple(self.request(number, *left[number].pop(0)) for number in asking if left[number])
            waiting += len(admit) - len(finished)
        return 1e3 * (time.process_time() - began) / made

    def burst(self) -> dict[str, float]:
        return {"made": self.users([[(64, 64)]] * 64)}

    def one(self) -> dict[str, float]:
        return {"made": self.users([[(64, 64)]])}

    def group(self) -> dict[str, float]:
        return {"made": self.users([[(2000, 16)]], samples=8)}

    def closed(self) -> dict[str, float]:
        sizes = random.Random(0)
        mixed = [[(sizes.randrange(5, 100), sizes.randrange(8, 64)) for _ in range(6)] for _ in range(8)]
        return {"made": self.users(mixed), "static": self.users([[(50, 64)]] * 8)}

    def mixed(self) -> dict[str, float]:
        # Early sequences decode, and grow, while the other prompts are still prefilled.
        prompts = np.linspace(LONGEST - 640, 32, SLOTS).astype(int).tolist()
        admit, chunks, active = tuple(self.request(0, length, 640) for length in prompts), list[float](), 1
        while active:
            before = [tokens for _, tokens in self.sampler.decoding]
            began = time.process_time()
            progress, admit = self.sampler.step(SampleStep(admit)), ()
            after = [tokens for _, tokens in self.sampler.decoding]
            if len(before) == len(after) == SLOTS and sum(after) > sum(before):
                chunks.append(1e3 * (time.process_time() - began) / (sum(after) - sum(before)))
            active = progress.active + progress.waiting
        return {"made": statistics.median(chunks)}


def profile(call: Callable[[], object]) -> dict[str, float]:
    """The share of each kind of XLA operation in their total time, without nested operations; at least 1 %."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (found,) = Path(folder).rglob("*.xplane.pb")
        lines = [line for plane in ProfileData.from_file(str(found)).planes for line in plane.lines]
    took = Counter[str]()
    for line in lines:
        outer: list[tuple[float, str]] = []
        for event in sorted(line.events, key=lambda event: (event.start_ns, -event.duration_ns)):
            while outer and outer[-1][0] <= event.start_ns:
                outer.pop()
            kind = re.sub(r"[.\d]+$", "", event.name)
            if outer:
                took[outer[-1][1]] -= event.duration_ns
            took[kind] += event.duration_ns
            outer.append((event.start_ns + event.duration_ns, kind))
    operations = {kind: ns for kind, ns in took.items() if re.fullmatch(r"[a-z][\w-]*", kind)}
    total = sum(operations.values())
    return {kind: ns / total for kind, ns in operations.items() if ns >= 0.01 * total}


def answer(folder: Path) -> None:
    """Run the process of one tree: read a case per line from standard input, and print its figures."""
    measured = Measured(folder)
    for line in sys.stdin:
        case, *profiled = line.split()
        call = getattr(measured, case)
        print(json.dumps(profile(call) if profiled else call()), flush=True)


@contextmanager
def tree(root: Path, folder: Path) -> Iterator[Any]:
    """Yield a function that measures a case with the code of a tree."""
    path = f"{root / '.package'}:{ROOT}"
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), "--model", str(folder), "--answer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None and process.stdout is not None

    def ask(case: str) -> dict[str, float]:
        assert process.stdin is not None and process.stdout is not None
        print(case, file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    try:
        yield ask
    finally:
        process.stdin.close()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    parser.add_argument("--cases", default="burst,one,mixed,group,closed")
    parser.add_argument("--repeat", type=int, default=3, help="measured rounds of each")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--profile", action="store_true", help="say which operations the time goes to")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        answer(args.model)
        return
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = args.model or make_small(scratch / "small-qwen3")
        roots = {"ours": ROOT, "other": args.against} if args.against else {"ours": ROOT}
        trees = {name: stack.enter_context(tree(root.resolve(), folder)) for name, root in roots.items()}
        for case in args.cases.split(","):
            rounds = [{name: ask(case) for name, ask in trees.items()} for _ in range(1 + args.repeat)][1:]
            for name, ask in trees.items():
                figures = {key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]}
                told = ", ".join(f"{key} {figure:.2f} CPU-ms a token" for key, figure in figures.items())
                if args.against:
                    faster = statistics.median(one["other"]["made"] / one[name]["made"] for one in rounds)
                    told += f"; {faster:.2f} x the other's speed"
                print(f"{case:7s} {name:6s} {told}; load {os.getloadavg()[0]:.1f}", flush=True)
                if args.profile:
                    shares = sorted(ask(f"{case} profiled").items(), key=lambda share: -share[1])
                    print(" " * 15 + ", ".join(f"{kind} {share:.0%}" for kind, share in shares), flush=True)


if __name__ == "__main__":
    main()
