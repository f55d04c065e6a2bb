"""The layout of examples of any lengths in micro-batches of few shapes: plain numbers, no arrays.

Several short examples share a row. The width of a row is a power of two, at least 32 tokens. A micro-batch has a power
of two of rows (times `row_multiple`). So few shapes are possible, and each is compiled once. The pool and the workers
use the same functions, so they count the same micro-batches.

The devices split the rows. With context parallelism, long rows are split over several devices, so a micro-batch of them
has fewer rows than there are devices (`rows_together`).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tinkerflow.backend.spec.prefix_trees import Branch, Tree

SHORTEST_ROW = 32
# The cost of attention: a token in a row of T tokens costs 1 + T / ATTENTION_TOKENS times a token alone.
ATTENTION_TOKENS = 1024  # of CPUs, measured with 1024 hidden and 8x128 or 2x512 tokens; `Platform` has others


def bucket(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and `least`, which is a power of two."""
    return max(least, 1 << (size - 1).bit_length())


def micro_batches(
    lengths: Sequence[int],
    *,
    microbatch_tokens: int,
    row_multiple: int = 1,
    attention_tokens: int = ATTENTION_TOKENS,
    branch_tokens: int = 0,
    context_parallel: int = 1,
    trees: Callable[[], Sequence[Tree]] = tuple,
) -> int:
    """The number of micro-batches for examples of these lengths. For the arguments see `layout`.

    trees: called where they matter.
    """
    if len(lengths) * bucket(max(lengths), SHORTEST_ROW) * row_multiple <= microbatch_tokens:
        return 1  # a row for each example fits, and packing never takes more rows
    shared = trees() if branch_tokens else ()
    sized = microbatch_tokens, row_multiple, attention_tokens
    return len(layout(lengths, *sized, shared, branch_tokens, context_parallel))


def micro_batch_shapes(
    microbatch_tokens: int, longest: int, row_multiple: int = 1, context_parallel: int = 1
) -> list[tuple[int, int]]:
    """Every shape (rows, tokens) of micro-batches for examples of at most `longest` tokens."""
    widths = [SHORTEST_ROW]
    while widths[-1] < max(longest, microbatch_tokens):
        widths.append(2 * widths[-1])
    return [
        (fewest << doubled, width)
        for width in widths
        if width <= max(bucket(longest, SHORTEST_ROW), microbatch_tokens)
        for fewest in [rows_together(width, microbatch_tokens, row_multiple, context_parallel)]
        for doubled in range((_most_rows(width, microbatch_tokens, fewest) // fewest).bit_length())
    ]


def rows_together(width: int, microbatch_tokens: int, row_multiple: int, context_parallel: int = 1) -> int:
    """The number of rows of `width` tokens is a multiple of this.

    It is `row_multiple`, unless so many rows have more than `microbatch_tokens`. Then each row is split over twice as
    many devices, until the rows fit or a row is on `context_parallel` devices.
    """
    while context_parallel > 1 and width * row_multiple > microbatch_tokens:
        row_multiple, context_parallel = row_multiple // 2, context_parallel // 2
    return row_multiple


@dataclass(frozen=True)
class Trees:
    """Trees of examples. lengths: the tokens of each example. branch_tokens: see `layout`."""

    trees: Sequence[Tree]
    lengths: Sequence[int]
    branch_tokens: int = 1

    def own_tokens(self, branch: Branch) -> int:
        """The tokens of a branch in its row, with padding, without those that it shares."""
        return -(-(self.lengths[branch.example] - branch.shared) // self.branch_tokens) * self.branch_tokens

    def divided(self, width: int) -> Trees:
        """The trees, divided into trees of at most `width` tokens. Each of them computes its own beginning."""
        return replace(self, trees=[part for tree in self.trees for part in self._parts(tree, width)])

    def _parts(self, tree: Tree, width: int) -> Iterator[Tree]:
        part: list[Branch] = []
        tokens = 0
        for branch in tree:
            tokens += self.own_tokens(branch)
            if part and tokens > width:
                yield tuple(part)
                part, tokens = [], self.own_tokens(Branch(branch.example, 0))
            part.append(branch if part else Branch(branch.example, 0))
        yield tuple(part)

    def in_rows(self, width: int) -> list[list[Tree]]:
        """Best fit, longest first: each tree goes into the fullest row with enough space."""
        rows: list[list[Tree]] = []
        rooms: list[tuple[int, int]] = []  # (free tokens, row), sorted
        sizes = [sum(map(self.own_tokens, tree)) for tree in self.trees]
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            best = bisect.bisect_left(rooms, (sizes[number], -1))
            if best == len(rooms):
                rooms.append((width, len(rows)))
                rows.append([])
            room, row = rooms.pop(best)
            rows[row].append(self.trees[number])
            bisect.insort(rooms, (room - sizes[number], row))
        return rows


class _Layout(NamedTuple):
    """The trees of each row of at most `width` tokens. cost: estimated, in tokens. fewest: `rows_together`."""

    cost: float
    width: int
    rows: list[list[Tree]]
    fewest: int


def layout(
    lengths: Sequence[int],
    microbatch_tokens: int,
    row_multiple: int,
    attention_tokens: int = ATTENTION_TOKENS,
    trees: Sequence[Tree] = (),
    branch_tokens: int = 1,
    context_parallel: int = 1,
) -> list[list[list[Tree]]]:
    """The rows of each micro-batch, and the trees of each row.

    lengths: the tokens of each example. microbatch_tokens: the most padded tokens of a micro-batch, unless its fewest
    rows have more. row_multiple: the number of rows is a multiple of it. attention_tokens: the tokens of a row whose
    attention costs as much as everything else. trees: all examples by shared beginnings (`prefix_trees`). They are used
    where this costs less, and divided where they do not fit into a row. Otherwise each example is a tree of its own.
    branch_tokens: the own tokens of each branch of `trees` are padded to a multiple of it. context_parallel: the most
    devices that a row is split over, a power of two that divides row_multiple (`rows_together`).
    """
    sized = microbatch_tokens, row_multiple, attention_tokens, context_parallel
    best = _cheapest(Trees([(Branch(number, 0),) for number in range(len(lengths))], lengths), *sized)
    if any(len(tree) > 1 for tree in trees):
        best = min(best, _cheapest(Trees(trees, lengths, branch_tokens), *sized), key=lambda layout: layout.cost)
    most = _most_rows(best.width, microbatch_tokens, best.fewest)
    return [best.rows[start : start + most] for start in range(0, len(best.rows), most)]


def _most_rows(width: int, microbatch_tokens: int, row_multiple: int) -> int:
    fit = max(1, microbatch_tokens // width // row_multiple)
    return row_multiple * (1 << (fit.bit_length() - 1))


def _cheapest(
    trees: Trees, microbatch_tokens: int, row_multiple: int, attention_tokens: int, context_parallel: int
) -> _Layout:
    """The layout with the lowest estimated cost, among the widths that fit the longest example. Arguments: `layout`."""
    longest = max(trees.own_tokens(Branch(number, 0)) for number in range(len(trees.lengths)))
    width = bucket(longest, SHORTEST_ROW)
    widths = [width]
    while (width := width * 2) <= microbatch_tokens and widths[-1] < sum(trees.lengths):
        widths.append(width)

    def of_width(width: int) -> _Layout:
        rows = trees.divided(width).in_rows(width)
        fewest = rows_together(width, microbatch_tokens, row_multiple, context_parallel)
        full, rest = divmod(len(rows), most := _most_rows(width, microbatch_tokens, fewest))
        padded = full * most + (padded_rows(rest, fewest) if rest else 0)
        return _Layout(padded * width * (1 + width / attention_tokens), width, rows, fewest)

    return min(map(of_width, widths), key=lambda layout: layout.cost)


def padded_rows(rows: int, row_multiple: int) -> int:
    """The number of rows of a micro-batch of `rows`, with padding."""
    return row_multiple * bucket(-(-rows // row_multiple))
