"""The layout of examples of any lengths in micro-batches of few shapes: plain numbers, no arrays.

Several short examples share a row. The width of a row is a power of two, at least 32 tokens. The number of rows of a
micro-batch is a power of two (times `row_multiple`). So there are few shapes, and each is compiled once. Compilers for
GPUs and TPUs take much longer than those for CPUs, so GPUs and TPUs use even fewer shapes (`Grid.few`). The pool and
the workers use the same functions, so they count the same micro-batches.

The devices split the rows. With context parallelism, long rows are split over several devices, so a micro-batch of long
rows has fewer rows than there are devices (`Grid.fewest_rows`).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tinkerflow.backend.spec.prefix_trees import Branch, Tree

# The cost of attention: a token in a row of T tokens costs 1 + T / ATTENTION_TOKENS times a single token.
ATTENTION_TOKENS = 1024  # of CPUs, measured with 1024 hidden and 8x128 or 2x512 tokens; `Platform` defines others
SHORTEST_ROW = 32
_SHORTEST_OF_FEW = 256  # fewer tokens are not faster on GPUs and TPUs, which read all weights anyway
_MOST_OF_FEW = 4  # rows of a device in a full micro-batch; more and shorter rows would save 6 % of attention's cost

Shape = tuple[int, int]  # rows, and tokens of each


def bucket(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and `least`, which is a power of two."""
    return max(least, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class Grid:
    """The shapes of micro-batches.

    microbatch_tokens: the most padded tokens of a micro-batch, unless its fewest rows have more. row_multiple: the
    number of rows is a multiple of it, unless rows are split over devices. context_parallel: the most devices that a
    row is split over, a power of two that divides row_multiple. few: a micro-batch has either the fewest or the most
    rows, which are at most four times as many. Rows have at least 256 tokens. A micro-batch that is not full is
    computed in long rows.
    """

    microbatch_tokens: int
    row_multiple: int = 1
    context_parallel: int = 1
    few: bool = False

    @property
    def shortest_row(self) -> int:
        """The smallest width of a row, in tokens."""
        return _SHORTEST_OF_FEW if self.few else SHORTEST_ROW

    def fewest_rows(self, width: int) -> int:
        """The smallest number of rows of `width` tokens. Every number of rows is a multiple of it.

        It is `row_multiple`, unless that many rows exceed `microbatch_tokens`. Then each row is split over twice as
        many devices, until the rows fit or a row is on `context_parallel` devices.
        """
        rows, parts = self.row_multiple, self.context_parallel
        while parts > 1 and width * rows > self.microbatch_tokens:
            rows, parts = rows // 2, parts // 2
        return rows

    def most_rows(self, width: int) -> int:
        """The number of rows of `width` tokens in a full micro-batch."""
        fewest = self.fewest_rows(width)
        fit = max(1, self.microbatch_tokens // width // fewest)
        return fewest * (1 << (fit.bit_length() - 1))

    def shape(self, rows: int, longest: int) -> Shape:
        """The shape of a micro-batch of `rows` rows, the longest of `longest` tokens, with padding."""
        width = bucket(longest, self.shortest_row)
        fewest = self.fewest_rows(width)
        if not self.few or rows <= fewest:
            return fewest * bucket(-(-rows // fewest)), width
        while self.most_rows(width) > _MOST_OF_FEW * self.fewest_rows(width):
            width *= 2
        return self.most_rows(width), width

    def shapes(self, longest: int) -> list[Shape]:
        """Every shape of micro-batches for examples of at most `longest` tokens."""
        most, width, found = bucket(longest, self.shortest_row), self.shortest_row, set()
        while width <= most or self.fits(width):
            found |= {self.shape(rows, width) for rows in range(1, self.most_rows(width) + 1)}
            width *= 2
        return sorted(found, key=lambda shape: shape[::-1])

    def fits(self, width: int) -> bool:
        """Whether shorter examples may be packed into rows of `width` tokens."""
        return width * (self.fewest_rows(width) if self.few else 1) <= self.microbatch_tokens


def micro_batches(
    lengths: Sequence[int],
    *,
    microbatch_tokens: int,
    row_multiple: int = 1,
    attention_tokens: int = ATTENTION_TOKENS,
    branch_tokens: int = 0,
    context_parallel: int = 1,
    few_shapes: bool = False,
    trees: Callable[[], Sequence[Tree]] = tuple,
) -> int:
    """The number of micro-batches for examples of these lengths. For the arguments see `Grid` and `layout`.

    trees: called only if needed.
    """
    grid = Grid(microbatch_tokens, row_multiple, context_parallel, few_shapes)
    if len(lengths) * bucket(max(lengths), grid.shortest_row) * row_multiple <= microbatch_tokens:
        return 1  # a row for each example fits, and packing never takes more rows
    return len(layout(lengths, grid, attention_tokens, trees() if branch_tokens else (), branch_tokens))


@dataclass(frozen=True)
class Trees:
    """Trees of examples. lengths: the tokens of each example. branch_tokens: see `layout`."""

    trees: Sequence[Tree]
    lengths: Sequence[int]
    branch_tokens: int = 1

    def own_tokens(self, branch: Branch) -> int:
        """The tokens of a branch in its row, with padding but without shared tokens."""
        return -(-(self.lengths[branch.example] - branch.shared) // self.branch_tokens) * self.branch_tokens

    def tokens(self, tree: Tree) -> int:
        """The tokens of a tree in its row, with padding."""
        return sum(map(self.own_tokens, tree))

    def divided(self, width: int) -> Trees:
        """Divide the trees into trees of at most `width` tokens. Each new tree computes its own beginning."""
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
        """Pack by best fit, longest first: each tree goes into the fullest row with enough space."""
        rows: list[list[Tree]] = []
        rooms: list[tuple[int, int]] = []  # (free tokens, row), sorted
        sizes = list(map(self.tokens, self.trees))
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
    """The rows of each micro-batch. cost: estimated, in tokens."""

    cost: float
    batches: list[list[list[Tree]]]


def layout(
    lengths: Sequence[int],
    grid: Grid,
    attention_tokens: int = ATTENTION_TOKENS,
    trees: Sequence[Tree] = (),
    branch_tokens: int = 1,
) -> list[list[list[Tree]]]:
    """The rows of each micro-batch, and the trees of each row.

    lengths: the tokens of each example. grid: the shapes. attention_tokens: the row length at which attention costs as
    much as the rest. trees: all examples by shared beginnings (`prefix_trees`). They are used if
    this costs less, and divided if they do not fit into a row. Otherwise each example is a separate tree.
    branch_tokens: the own tokens of each branch of `trees` are padded to a multiple of it.
    """
    alone = Trees([(Branch(number, 0),) for number in range(len(lengths))], lengths)
    best = _cheapest(alone, grid, attention_tokens)
    if any(len(tree) > 1 for tree in trees):
        shared = _cheapest(Trees(trees, lengths, branch_tokens), grid, attention_tokens)
        best = min(best, shared, key=lambda layout: layout.cost)
    return best.batches


def _cheapest(trees: Trees, grid: Grid, attention_tokens: int) -> _Layout:
    """The layout with the lowest estimated cost, among the widths that fit the longest example. Arguments: `layout`."""
    longest = max(trees.own_tokens(Branch(number, 0)) for number in range(len(trees.lengths)))
    width = bucket(longest, grid.shortest_row)
    widths = [width := grid.shape(grid.most_rows(width), width)[1]]
    while grid.fits(width := width * 2) and widths[-1] < sum(trees.lengths):
        widths.append(width)

    def cost(shape: Shape) -> float:
        rows, width = shape
        return rows * width * (1 + width / attention_tokens)

    def in_fewest_rows(shape: Shape, batch: list[list[Tree]]) -> tuple[Shape, list[list[Tree]]]:
        """The last micro-batch in fewer and longer rows, or in shorter ones, if that costs less than `shape`."""
        some = replace(trees, trees=[tree for row in batch for tree in row])
        width = bucket(max(map(some.tokens, some.trees)), grid.shortest_row)
        while cost(smaller := (grid.fewest_rows(width), width)) < cost(shape):
            if len(rows := some.in_rows(width)) <= smaller[0]:
                return smaller, rows
            width *= 2
        return shape, batch

    def of_width(width: int) -> _Layout:
        rows, most = trees.divided(width).in_rows(width), grid.most_rows(width)
        parts = [rows[start : start + most] for start in range(0, len(rows), most)]
        batches = [(grid.shape(len(part), width), part) for part in parts]
        if grid.few:
            batches[-1] = in_fewest_rows(*batches[-1])
        return _Layout(sum(cost(shape) for shape, _ in batches), [part for _, part in batches])

    return min(map(of_width, widths), key=lambda layout: layout.cost)
