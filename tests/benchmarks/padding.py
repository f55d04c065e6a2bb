"""The padding of micro-batches in many shapes and in few (`spec.packing.Grid`), by kinds of data. No model runs.

    python -m tests.benchmarks.padding

Prints for each kind the ratio of computed to sent tokens, and the same with the estimated cost of attention on GPUs and
TPUs. A prefix that branches share counts once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from tinkerflow.backend.compute.platforms import CUDA
from tinkerflow.backend.spec.packing import Grid, Trees, layout
from tinkerflow.backend.spec.prefix_trees import Branch, Tree

MICROBATCH = 4096
REQUESTS = 200  # requests of each kind, with different lengths

Request = tuple[Sequence[int], Sequence[Tree]]  # lengths of examples; trees of shared prefixes, if there are any


def of_lengths(count: int, least: int, most: int) -> Iterator[Request]:
    """Requests of `count` examples, with lengths between `least` and `most`."""
    numbers = random.Random(f"{count} {least} {most}")
    for _ in range(REQUESTS):
        yield [numbers.randint(least, most) for _ in range(count)], ()


def of_chats() -> Iterator[Request]:
    """Requests of 64 chats: half of them shorter than 400 tokens, a few with thousands."""
    numbers = random.Random("chats")
    for _ in range(REQUESTS):
        yield [min(4000, max(20, int(numbers.lognormvariate(6, 0.8)))) for _ in range(64)], ()


def of_groups(groups: int, answers: int, prompt: int, longest: int) -> Iterator[Request]:
    """Requests of `groups` prompts with `answers` answers each, which share the tokens of their prompt."""
    numbers = random.Random(f"{groups} {answers}")
    for _ in range(REQUESTS):
        lengths = [prompt + numbers.randint(longest // 8, longest) for _ in range(groups * answers)]
        firsts = range(0, len(lengths), answers)
        yield lengths, [tuple(Branch(first + i, prompt if i else 0) for i in range(answers)) for first in firsts]


KINDS: Mapping[str, Sequence[Request]] = {
    "SFT, 128 x 100-2,000": list(of_lengths(128, 100, 2000)),
    "SFT, 8 x 100-2,000": list(of_lengths(8, 100, 2000)),
    "SFT, 64 chats": list(of_chats()),
    "SFT, 128 x 20-250": list(of_lengths(128, 20, 250)),
    "preferences, 32 x 300-1,500": list(of_lengths(32, 300, 1500)),
    "RL, 16 groups of 8, 300 + 100-800": list(of_groups(16, 8, 300, 800)),
    "RL, 4 groups of 16, 1,000 + 32-256": list(of_groups(4, 16, 1000, 256)),
    "a document of 5,000-30,000": list(of_lengths(1, 5000, 30000)),
    "16 documents of 3,000-9,000": list(of_lengths(16, 3000, 9000)),
    "tiny, 4 x 20-200": list(of_lengths(4, 20, 200)),
    "tiny, 1 x 20-200": list(of_lengths(1, 20, 200)),
}


def padding(requests: Sequence[Request], grid: Grid) -> tuple[float, float]:
    """The ratio of computed to sent tokens, without and with the cost of attention."""
    sent = computed = 0
    cost = 0.0
    for lengths, trees in requests:
        placed = Trees(trees or [(Branch(number, 0),) for number in range(len(lengths))], lengths)
        sent += sum(map(placed.tokens, placed.trees))
        for rows in layout(lengths, grid, CUDA.attention_tokens, trees):
            B, T = grid.shape(len(rows), max(sum(map(placed.tokens, row)) for row in rows))
            computed += B * T
            cost += B * T * (1 + T / CUDA.attention_tokens)
    return computed / sent, cost / sent


def main() -> None:
    """Print a line for each kind, for one device and for eight."""
    for devices in (1, 8):
        many, few = (Grid(devices * MICROBATCH, devices, few=few) for few in (False, True))
        shapes = (len(grid.shapes(32768)) for grid in (many, few))
        print(f"{devices} device(s), {MICROBATCH} tokens of each: {next(shapes)} shapes, and {next(shapes)}")
        for kind, requests in KINDS.items():
            (tokens, cost), (tokens_of_few, cost_of_few) = padding(requests, many), padding(requests, few)
            print(
                f"{kind:<36} tokens {tokens:.3f} {tokens_of_few:.3f} ({tokens_of_few / tokens - 1:+.1%}), "
                f"with attention {cost:.3f} {cost_of_few:.3f} ({cost_of_few / cost - 1:+.1%})"
            )


if __name__ == "__main__":
    main()
