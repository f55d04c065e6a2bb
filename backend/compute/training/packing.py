"""Examples as the arrays of micro-batches. Pure NumPy.

Several short examples share a row. They differ by their segment number, and positions restart with each. The layout is
that of `backend/spec/packing.py`. Letters: B rows, T tokens, K targets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tinkerflow.backend.spec.commands import Example, Float32, Int32
from tinkerflow.backend.spec.losses import packed_inputs
from tinkerflow.backend.spec.packing import ATTENTION_TOKENS, SHORTEST_ROW, bucket, layout, padded_rows


@dataclass(frozen=True)
class Place:
    """The place of an example: tokens [start, start + length) of `row`."""

    example: int
    row: int
    start: int
    length: int


@dataclass(frozen=True)
class MicroBatch:
    """Arrays of one training call. segments_BT is 0 in padding.

    inputs_BTK: the inputs of losses per token, in the order of `packed_inputs`. Weights are 0 in padding and for unused
    targets.
    """

    tokens_BT: Int32
    positions_BT: Int32
    segments_BT: Int32
    targets_BTK: Int32
    inputs_BTK: Mapping[str, Float32]
    places: tuple[Place, ...]


def pack(
    examples: Sequence[Example],
    *,
    microbatch_tokens: int,
    row_multiple: int = 1,
    attention_tokens: int = ATTENTION_TOKENS,
    inputs: Collection[str] = (),
    masks: Collection[str] = (),
) -> list[MicroBatch]:
    """The examples as micro-batches of at most `microbatch_tokens` padded tokens, or of the fewest rows possible.

    The result is deterministic. Every example is placed exactly once, in one row. The number of rows is a multiple of
    `row_multiple`, the size of the mesh axis that splits them. attention_tokens: see `layout`. inputs: the inputs of
    the loss besides weights. masks: see `LossSpec.masks`. The inputs of a masked token become those of padding,
    so a placeholder in them (a log probability of -9999, say) cannot reach a formula.
    """
    K = bucket(max(example.targets_TK.shape[1] for example in examples))
    lengths = [example.tokens_T.shape[0] for example in examples]
    batches = layout(lengths, microbatch_tokens, row_multiple, attention_tokens)
    return [_micro_batch(examples, batch, K, row_multiple, inputs, masks) for batch in batches]


def _micro_batch(
    examples: Sequence[Example],
    rows: list[list[int]],
    K: int,
    row_multiple: int,
    read: Collection[str],
    masks: Collection[str],
) -> MicroBatch:
    B = padded_rows(len(rows), row_multiple)
    T = bucket(max(sum(examples[i].tokens_T.shape[0] for i in row) for row in rows), SHORTEST_ROW)
    tokens, positions, segments = (np.zeros((B, T), np.int32) for _ in range(3))
    targets = np.zeros((B, T, K), np.int32)
    fills = packed_inputs()
    inputs = {name: np.full((B, T, K), fill, np.float32) for name, fill in fills.items()}
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
            inputs["weights"][row, here, :k] = example.weights_TK
            for name in read:
                if name != "weights" and name in inputs and name in example.inputs:  # a traced loss may name one so
                    inputs[name][row, here, :k] = example.inputs[name]
            places.append(Place(number, row, start, length))
            start += length
    masked = np.zeros((B, T, K), bool)
    for name in masks:
        masked |= inputs[name] == 0
    for name in inputs if masked.any() else ():
        inputs[name][masked] = fills[name]
    return MicroBatch(tokens, positions, segments, targets, inputs, tuple(places))
