"""Examples of any lengths into micro-batches of few shapes. Pure NumPy.

Several short examples share a row, told apart by their segment number; positions restart with each. Rows are powers of
two of tokens, 32 at least, and a micro-batch has a power of two of rows (times `row_multiple`), so the shapes that can
ever occur are few, and each is compiled once. Letters: B rows, T tokens, K targets.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.commands import Example, Float32, Int32

SHORTEST_ROW = 32
# How much longer rows make attention dearer: a token in a row of T costs about 1 + T / _ATTENTION of one alone
# (measured on CPU, 1024 hidden: 8x128 against 2x512 tokens).
_ATTENTION = 1024


@dataclass(frozen=True)
class Place:
    """Where an example went: tokens [start, start + length) of `row`."""

    example: int
    row: int
    start: int
    length: int


@dataclass(frozen=True)
class MicroBatch:
    """Arrays of one training call. segments_BT is 0 where nothing is; weights are 0 there, and for unused targets."""

    tokens_BT: Int32
    positions_BT: Int32
    segments_BT: Int32
    targets_BTK: Int32
    weights_BTK: Float32
    old_logprobs_BTK: Float32
    advantages_BTK: Float32
    clip_low_BTK: Float32  # NaN where the config's threshold holds
    clip_high_BTK: Float32
    places: tuple[Place, ...]


def bucket(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and `least` (itself one)."""
    return max(least, 1 << (size - 1).bit_length())


def pack(examples: Sequence[Example], *, microbatch_tokens: int, row_multiple: int = 1) -> list[MicroBatch]:
    """The examples as micro-batches of at most `microbatch_tokens` padded tokens, or of the fewest rows possible.

    Deterministic. Every example is placed exactly once, in one piece. Rows are a multiple of `row_multiple`, the size
    of the mesh axis that they are split over.
    """
    targets = bucket(max(example.targets_TK.shape[1] for example in examples))
    lengths = [example.tokens_T.shape[0] for example in examples]
    batches = _batches(lengths, microbatch_tokens, row_multiple)
    return [_micro_batch(examples, batch, targets, row_multiple) for batch in batches]


def micro_batches(lengths: Sequence[int], *, microbatch_tokens: int, row_multiple: int = 1) -> int:
    """How many `pack` makes of examples of these lengths."""
    if len(lengths) * bucket(max(lengths), SHORTEST_ROW) * row_multiple <= microbatch_tokens:
        return 1  # with a row for each, and packed they take no more
    return len(_batches(lengths, microbatch_tokens, row_multiple))


def micro_batch_shapes(microbatch_tokens: int, longest: int, row_multiple: int = 1) -> list[tuple[int, int]]:
    """Every (rows, tokens) that `pack` may make of examples of at most `longest` tokens."""
    widths = [SHORTEST_ROW]
    while widths[-1] < max(longest, microbatch_tokens):
        widths.append(2 * widths[-1])
    return [
        (row_multiple << doubled, width)
        for width in widths
        if width <= max(bucket(longest, SHORTEST_ROW), microbatch_tokens)
        for doubled in range((_most_rows(width, microbatch_tokens, row_multiple) // row_multiple).bit_length())
    ]


def _batches(lengths: Sequence[int], microbatch_tokens: int, row_multiple: int) -> list[list[list[int]]]:
    """The rows of each micro-batch, and the examples of each row."""
    width = _row_width(lengths, microbatch_tokens, row_multiple)
    rows = _fill_rows(lengths, width)
    most = _most_rows(width, microbatch_tokens, row_multiple)
    return [rows[start : start + most] for start in range(0, len(rows), most)]


def _most_rows(width: int, microbatch_tokens: int, row_multiple: int) -> int:
    fit = max(1, microbatch_tokens // width // row_multiple)
    return row_multiple * (1 << (fit.bit_length() - 1))


def _row_width(lengths: Sequence[int], microbatch_tokens: int, row_multiple: int) -> int:
    """The width, of those that hold the longest example, at which computing should cost the least."""
    width = bucket(max(lengths), SHORTEST_ROW)
    widths = [width]
    while (width := width * 2) <= microbatch_tokens and widths[-1] < sum(lengths):
        widths.append(width)

    def cost(width: int) -> float:
        most = _most_rows(width, microbatch_tokens, row_multiple)
        full, rest = divmod(len(_fill_rows(lengths, width)), most)
        rows = full * most + (_padded_rows(rest, row_multiple) if rest else 0)
        return rows * width * (1 + width / _ATTENTION)

    return min(widths, key=cost)


def _padded_rows(rows: int, row_multiple: int) -> int:
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


def _micro_batch(examples: Sequence[Example], rows: list[list[int]], K: int, row_multiple: int) -> MicroBatch:
    B = _padded_rows(len(rows), row_multiple)
    T = bucket(max(sum(examples[i].tokens_T.shape[0] for i in row) for row in rows), SHORTEST_ROW)
    tokens, positions, segments = (np.zeros((B, T), np.int32) for _ in range(3))
    targets = np.zeros((B, T, K), np.int32)
    weights, old_logprobs, advantages = (np.zeros((B, T, K), np.float32) for _ in range(3))
    clip_low, clip_high = (np.full((B, T, K), np.nan, np.float32) for _ in range(2))
    places: list[Place] = []
    for row, members in enumerate(rows):
        start = 0
        for segment, number in enumerate(members, 1):
            example = examples[number]
            length, k = example.targets_TK.shape
            here = slice(start, start + length)
            tokens[row, here] = example.tokens_T
            positions[row, here] = np.arange(length)
            segments[row, here] = segment
            targets[row, here, :k] = example.targets_TK
            weights[row, here, :k] = example.weights_TK
            _fill(old_logprobs[row, here, :k], example.old_logprobs_TK)
            _fill(advantages[row, here, :k], example.advantages_TK)
            _fill(clip_low[row, here, :k], example.clip_low_TK)
            _fill(clip_high[row, here, :k], example.clip_high_TK)
            places.append(Place(number, row, start, length))
            start += length
    return MicroBatch(
        tokens, positions, segments, targets, weights, old_logprobs, advantages, clip_low, clip_high, tuple(places)
    )


def _fill(target: Float32, source: npt.NDArray[np.float32] | None) -> None:
    if source is not None:
        target[...] = source
