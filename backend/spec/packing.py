"""How examples of any lengths are laid out in micro-batches of few shapes: plain numbers, no arrays.

Several short examples share a row. Rows are powers of two of tokens, 32 at least, and a micro-batch has a power of two
of rows (times `row_multiple`), so the shapes that can ever occur are few, and each is compiled once. The pool counts
micro-batches with the same functions with which workers make them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

SHORTEST_ROW = 32
# How much longer rows make attention dearer: a token in a row of T costs about 1 + T / attention_tokens of one alone.
ATTENTION_TOKENS = 1024  # of CPUs (measured, 1024 hidden: 8x128 against 2x512 tokens); `Platform` has those of others


def bucket(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and `least` (itself one)."""
    return max(least, 1 << (size - 1).bit_length())


def micro_batches(
    lengths: Sequence[int],
    *,
    microbatch_tokens: int,
    row_multiple: int = 1,
    attention_tokens: int = ATTENTION_TOKENS,
) -> int:
    """How many micro-batches examples of these lengths make; the arguments are those of `layout`."""
    if len(lengths) * bucket(max(lengths), SHORTEST_ROW) * row_multiple <= microbatch_tokens:
        return 1  # with a row for each, and packed they take no more
    return len(layout(lengths, microbatch_tokens, row_multiple, attention_tokens))


def micro_batch_shapes(microbatch_tokens: int, longest: int, row_multiple: int = 1) -> list[tuple[int, int]]:
    """Every (rows, tokens) that a micro-batch may have, of examples of at most `longest` tokens."""
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

    lengths: tokens of each example. microbatch_tokens: the most padded tokens of a micro-batch, unless its fewest rows
    have more. row_multiple: what the number of rows is a multiple of. attention_tokens: of a row in which attention
    costs as much as everything else.
    """
    width = _row_width(lengths, microbatch_tokens, row_multiple, attention_tokens)
    rows = _fill_rows(lengths, width)
    most = _most_rows(width, microbatch_tokens, row_multiple)
    return [rows[start : start + most] for start in range(0, len(rows), most)]


def _most_rows(width: int, microbatch_tokens: int, row_multiple: int) -> int:
    fit = max(1, microbatch_tokens // width // row_multiple)
    return row_multiple * (1 << (fit.bit_length() - 1))


def _row_width(lengths: Sequence[int], microbatch_tokens: int, row_multiple: int, attention_tokens: int) -> int:
    """The width, of those that hold the longest example, at which computing should cost the least."""
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
    """How many rows a micro-batch of `rows` has with its padding."""
    return row_multiple * bucket(-(-rows // row_multiple))


def _fill_rows(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Best fit, longest first: each example goes into the fullest row that it still fits."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, row), sorted
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
