"""Packs examples into the arrays of micro-batches. Pure NumPy.

Several short examples share a row, and examples with a common prefix share the tokens of the prefix (`prefix_trees`). A
row stores a tree depth first: every token follows all earlier tokens of its example. A token sees the tokens at or
before its own place whose subtrees are not yet complete. `backend/spec/packing.py` computes the layout. Letters: B
rows, T tokens, K targets, s tokens of a support.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinkerflow.backend.spec.commands import Example, Float32, Int16, Int32
from tinkerflow.backend.spec.losses import LOSSES, LossSpec, packed_inputs
from tinkerflow.backend.spec.packing import (
    ATTENTION_TOKENS,
    Grid,
    Trees,
    bucket,
    layout,
)
from tinkerflow.backend.spec.prefix_trees import Tree, prefix_trees, trained_cells
from tinkerflow.backend.spec.supports import MOST_SUPPORTED, restricted_inputs


@dataclass(frozen=True)
class Place:
    """The place of an example: its tokens are the `columns` of `row`, int32 [T], ascending.

    shared: how many of the first tokens an earlier example has placed.
    """

    example: int
    row: int
    columns: Int32
    shared: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """Arrays of one training call.

    parents_BT: the column of the token before each token in its example; -1 = none.
    ends_BT: the column where the subtree of each token ends. If no tokens are shared, this is the end of the token's
    example, so it also identifies the example in its row. T in padding.
    inputs_BTK: the inputs of losses per token, in the order of `packed_inputs`. Weights are 0 in padding and for unused
    targets. routes_BTn: the given experts (`Example.routes_Tn`), -1 = none; None = no example has any. supports_BTs:
    `Example.supports` as rows of ids, padded with -1; None = no example has any.
    """

    tokens_BT: Int32
    positions_BT: Int32
    parents_BT: Int32
    ends_BT: Int32
    targets_BTK: Int32
    inputs_BTK: Mapping[str, Float32]
    places: tuple[Place, ...]
    routes_BTn: Int16 | None = None
    supports_BTs: Int32 | None = None

    @property
    def shares(self) -> bool:
        """Whether examples share tokens."""
        return any(place.shared for place in self.places)

    def in_rows(self, x: Any) -> Any:
        """An array [B, T, ...] of this shape, from an array of the same tokens in pieces (`train.DeviceBatch`)."""
        return x.reshape(*self.tokens_BT.shape, *x.shape[2:])


def pack(
    examples: Sequence[Example],
    *,
    microbatch_tokens: int,
    row_multiple: int = 1,
    attention_tokens: int = ATTENTION_TOKENS,
    loss: LossSpec = LOSSES["cross_entropy"],
    branch_tokens: int = 0,
    context_parallel: int = 1,
    few_shapes: bool = False,
) -> list[MicroBatch]:
    """Pack examples into micro-batches of at most `microbatch_tokens` padded tokens, or of the fewest rows possible.

    The result is deterministic. Every example is placed exactly once, in one row. The number of rows is a multiple of
    `row_multiple`, the size of the mesh axis that splits them, unless rows are split over up to `context_parallel`
    devices. few_shapes: see `spec.packing.Grid`. attention_tokens: see `layout`. loss: a loss per token.
    The inputs of a masked token (`LossSpec.masks`) are replaced by those of padding, so a placeholder in them (a log
    probability of -9999, say) cannot reach a formula. branch_tokens: shared prefixes are placed once, if that makes the
    micro-batches cheaper. Their lengths are multiples of this number, and so are the columns where branches begin. 0 =
    nothing is shared.
    """
    K = bucket(max(example.targets_TK.shape[1] for example in examples))
    lengths = [example.tokens_T.shape[0] for example in examples]
    trees = prefix_trees(examples, loss, branch_tokens) if branch_tokens else ()
    grid = Grid(microbatch_tokens, row_multiple, context_parallel, few_shapes)
    batches = layout(lengths, grid, attention_tokens, trees, branch_tokens)
    return [_micro_batch(examples, batch, K, grid, loss, branch_tokens) for batch in batches]


def _micro_batch(
    examples: Sequence[Example],
    rows: list[list[Tree]],
    K: int,
    grid: Grid,
    loss: LossSpec,
    branch_tokens: int,
) -> MicroBatch:
    lengths = [example.tokens_T.shape[0] for example in examples]
    shares = any(branch.shared for trees in rows for tree in trees for branch in tree)
    sizes = Trees((), lengths, branch_tokens if shares else 1)
    B, T = grid.shape(len(rows), max(sum(map(sizes.tokens, row)) for row in rows))
    tokens, positions = (np.zeros((B, T), np.int32) for _ in range(2))
    parents = np.full((B, T), -1, np.int32)
    ends, targets = np.full((B, T), T, np.int32), np.zeros((B, T, K), np.int32)
    fills = packed_inputs()
    inputs = {name: np.full((B, T, K), fill, np.float32) for name, fill in fills.items()}
    here = [examples[branch.example] for trees in rows for tree in trees for branch in tree]
    given = next((example.routes_Tn for example in here if example.routes_Tn is not None), None)
    routes = None if given is None else np.full((B, T, given.shape[1]), -1, np.int16)
    restricted = any(example.supports is not None for example in here)
    supports = np.full((B, T, MOST_SUPPORTED), -1, np.int32) if restricted else None
    places: list[Place] = []
    for row, trees in enumerate(rows):
        start = 0  # the next token's place
        for tree in trees:
            path = np.empty(0, np.int32)
            for branch in tree:
                example, shared = examples[branch.example], branch.shared
                length, k = example.targets_TK.shape
                ends[row, path[shared:]] = start
                own = slice(start, start + length - shared)
                path = np.concatenate([path[:shared], np.arange(own.start, own.stop, dtype=np.int32)])
                tokens[row, own], positions[row, own] = example.tokens_T[shared:], np.arange(shared, length)
                parents[row, path[1:]] = path[:-1]
                targets[row, own, :k] = example.targets_TK[shared:]
                if routes is not None and example.routes_Tn is not None:
                    routes[row, own] = example.routes_Tn[shared:]
                if supports is not None and example.supports is not None:
                    supports[row, own] = example.supports.part(shared, length).rows()
                _add_loss({name: cells[row] for name, cells in inputs.items()}, path, example, loss)
                places.append(Place(branch.example, row, path, shared))
                start += sizes.own_tokens(branch)
                ends[row, own.stop : start] = np.arange(own.stop, start) + 1  # no token sees padding
            ends[row, path] = start
    return MicroBatch(tokens, positions, parents, ends, targets, inputs, tuple(places), routes, supports)


def _add_loss(inputs: Mapping[str, Float32], path: Int32, example: Example, loss: LossSpec) -> None:
    """Add the loss of an example to the inputs [T, K] of its row. Masked cells stay as they are.

    A cell that several examples train has equal inputs in all of them, and gets the sum of their weights.
    """
    steps, targets = np.nonzero(trained_cells(example, loss))
    own = restricted_inputs(example.inputs, example.supports)
    cells = path[steps], targets
    inputs["weights"][cells] += example.weights_TK[steps, targets]
    for name in loss.names:
        if name != "weights" and name in inputs and name in own:  # a traced loss may use these names
            inputs[name][cells] = own[name][steps, targets]
