"""The layout of examples of any lengths in micro-batches of few shapes: plain numbers, no arrays.

Several short examples share a row. The width of a row is a power of two, at least 32 tokens. A micro-batch has a power
of two of rows (times `row_multiple`). So few shapes are possible, and each is compiled once. The pool and the workers
use the same functions, so they count the same micro-batches.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

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
) -> int:
    """The number of micro-batches for examples of these lengths. For the arguments see `layout`."""
    if len(lengths) * bucket(max(lengths), SHORTEST_ROW) * row_multiple <= microbatch_tokens:
        return 1  # a row for each example fits, and packing never takes more rows
    return len(layout(lengths, microbatch_tokens, row_multiple, attention_tokens))


def micro_batch_shapes(microbatch_tokens: int, longest: int, row_multiple: int = 1) -> list[tuple[int, int]]:
    """Every shape (rows, tokens) of micro-batches for examples of at most `longest` tokens."""
    widths = [SHORTEST_ROW]
    while widths[-1] < max(longest, microbatch_tokens):
        widths.append(2 * widths[-1])
    return [
        (row_multiple << doubled, width)
        for width in widths
        if width <= max(bucket(longest, SHORTEST_ROW), microbatch_tokens)
        for doubled in range((_most_rows(width, microbatch_tokens, row_multiple) // row_multiple).bit_length())
    ]


def layout(
    lengths: Sequence[int], microbatch_tokens: int, row_multiple: int, attention_tokens: int = ATTENTION_TOKENS
) -> list[list[list[int]]]:
    """The rows of each micro-batch, and the examples of each row.

    lengths: the tokens of each example. microbatch_tokens: the most padded tokens of a micro-batch, unless its fewest
    rows have more. row_multiple: the number of rows is a multiple of it. attention_tokens: the tokens of a row whose
    attention costs as much as everything else.
    """
    width = _row_width(lengths, microbatch_tokens, row_multiple, attention_tokens)
    rows = _fill_rows(lengths, width)
    most = _most_rows(width, microbatch_tokens, row_multiple)
    return [rows[start : start + most] for start in range(0, len(rows), most)]


def _most_rows(width: int, microbatch_tokens: int, row_multiple: int) -> int:
    fit = max(1, microbatch_tokens // width // row_multiple)
    return row_multiple * (1 << (fit.bit_length() - 1))


def _row_width(lengths: Sequence[int], microbatch_tokens: int, row_multiple: int, attention_tokens: int) -> int:
    """The width with the lowest estimated cost, among those that fit the longest example."""
    width = bucket(max(lengths), SHORTEST_ROW)
    widths = [width]
    while (width := width * 2) <= microbatch_tokens and widths[-1] < sum(lengths):
        widths.append(width)

    def cost(width: int) -> float:
        most = _most_rows(width, microbatch_tokens, row_multiple)
        full, rest = divmod(len(_fill_rows(lengths, width)), most)
        rows = full * most + (padded_rows(rest, row_multiple) if rest else 0)
        return rows * width * (1 + width / attention_tokens)

    return min(widths, key=cost)


def padded_rows(rows: int, row_multiple: int) -> int:
    """The number of rows of a micro-batch of `rows`, with padding."""
    return row_multiple * bucket(-(-rows // row_multiple))


def _fill_rows(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Best fit, longest first: each example goes into the fullest row with enough space."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for example in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[example]
        best = bisect.bisect_left(rooms, (length, -1))
        if best == len(rooms):
            rooms.append((width, len(rows)))
            rows.append([])
        room, row = rooms.pop(best)
        rows[row].append(example)
        bisect.insort(rooms, (room - length, row))
    return rows
