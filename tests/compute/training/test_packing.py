"""Packing places every token once, in few shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkerflow.backend.compute.training.packing import pack
from tinkerflow.backend.spec.commands import Example
from tinkerflow.backend.spec.packing import SHORTEST_ROW, Grid, bucket, layout, micro_batches

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40)


def example(number: int, length: int, targets: int) -> Example:
    tokens = np.arange(length, dtype=np.int32) + 1000 * number
    return Example(tokens, np.repeat(tokens[:, None] + 1, targets, 1), np.ones((length, targets), np.float32))


@given(lengths, st.integers(1, 3), st.sampled_from([64, 256, 1024]), st.sampled_from([1, 2, 4]), st.booleans())
def test_every_token_is_placed_once(sizes, targets, budget, multiple, few):
    data = [example(i, n, targets) for i, n in enumerate(sizes)]
    batches = pack(data, microbatch_tokens=budget, row_multiple=multiple, few_shapes=few)
    assert sorted(place.example for batch in batches for place in batch.places) == list(range(len(sizes)))
    assert sum(len(place.columns) for batch in batches for place in batch.places) == sum(sizes)
    for batch in batches:
        for place in batch.places:
            here = (place.row, place.columns)
            assert (batch.tokens_BT[here] == data[place.example].tokens_T).all()
            assert (batch.positions_BT[here] == np.arange(len(place.columns))).all()
            assert (batch.ends_BT[here] == place.columns[-1] + 1).all()
            assert (batch.targets_BTK[here][:, :targets] == data[place.example].targets_TK).all()
        placed = np.zeros(batch.tokens_BT.shape, bool)
        for place in batch.places:
            placed[place.row, place.columns] = True
        assert (batch.inputs_BTK["weights"][~placed] == 0).all()


@given(lengths, st.sampled_from([64, 256, 1024]), st.sampled_from([1, 2, 4]))
def test_shapes_are_powers_of_two_within_the_budget(sizes, budget, multiple):
    data = [example(i, n, 1) for i, n in enumerate(sizes)]
    for batch in pack(data, microbatch_tokens=budget, row_multiple=multiple):
        rows, width = batch.tokens_BT.shape
        assert rows % multiple == 0
        assert bucket(rows // multiple) == rows // multiple
        assert bucket(width) == width >= SHORTEST_ROW
        assert rows * width <= budget or rows == multiple


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.sampled_from([600, 1024, 4096]))
def test_few_shapes_have_no_more_than_twice_the_tokens(sizes, budget):
    tokens = []
    for grid in (Grid(budget), Grid(budget, few=True)):
        shapes = []
        for rows in layout(sizes, grid):
            longest = max(sum(sizes[branch.example] for tree in row for branch in tree) for row in rows)
            shapes.append(grid.shape(len(rows), longest))
        assert set(shapes) <= set(grid.shapes(3000))
        assert all(rows * width <= budget or rows == 1 for rows, width in shapes)
        tokens.append(sum(rows * max(256, width) for rows, width in shapes))
    assert tokens[1] <= 2 * tokens[0]


@given(lengths, st.sampled_from([32, 128, 1024]), st.sampled_from([(4, 2), (8, 8), (6, 2)]))
def test_long_rows_are_split_over_no_more_devices_than_they_need(sizes, budget, devices):
    parts, most = devices
    how = {"microbatch_tokens": budget, "row_multiple": parts, "context_parallel": most}
    batches = pack([example(i, n, 1) for i, n in enumerate(sizes)], **how)
    assert micro_batches(sizes, **how) == len(batches)
    assert sorted(place.example for batch in batches for place in batch.places) == list(range(len(sizes)))
    for batch in batches:
        rows, width = batch.tokens_BT.shape
        assert (rows, width) in Grid(budget, parts, most).shapes(300)
        assert rows % parts == 0 or (parts % rows == 0 and parts // rows <= most)
        assert rows * width <= budget or rows == parts // most
        assert rows >= parts or 2 * rows * width > budget  # half as many devices would exceed their tokens


@given(lengths)
def test_packing_is_deterministic(sizes):
    data = [example(i, n, 1) for i, n in enumerate(sizes)]
    first, second = (pack(data, microbatch_tokens=256) for _ in range(2))
    assert [(place.example, place.row, place.columns.tolist()) for b in first for place in b.places] == [
        (place.example, place.row, place.columns.tolist()) for b in second for place in b.places
    ]


@given(lengths, st.sampled_from([64, 256, 1024]), st.sampled_from([(1, 1), (2, 1), (4, 4)]), st.booleans())
def test_micro_batches_can_be_counted_before(sizes, budget, devices, few):
    how = {"microbatch_tokens": budget, "row_multiple": devices[0], "context_parallel": devices[1], "few_shapes": few}
    batches = pack([example(i, n, 1) for i, n in enumerate(sizes)], **how)
    assert micro_batches(sizes, **how) == len(batches)
    assert {batch.tokens_BT.shape for batch in batches} <= set(Grid(budget, *devices, few).shapes(300))


def test_partial_micro_batch_is_one_long_row_where_shapes_are_few():
    grid = Grid(4096, few=True)
    assert grid.shapes(8192) == [
        (1, 256), (1, 512), (1, 1024), (4, 1024), (1, 2048), (2, 2048), (1, 4096), (1, 8192)
    ]  # fmt: skip
    data = [example(i, 700, 1) for i in range(6)]
    batches = pack(data, microbatch_tokens=4096, attention_tokens=8192, few_shapes=True)
    assert [batch.tokens_BT.shape for batch in batches] == [(4, 1024), (1, 2048)]
    assert [batch.tokens_BT.shape for batch in pack(data[:1], microbatch_tokens=4096, few_shapes=True)] == [(1, 1024)]


def test_traced_loss_input_named_weights_is_not_the_token_weights():
    named = replace(example(0, 6, 1), inputs={"weights": np.full(6, 5.0, np.float32)})
    (batch,) = pack([named], microbatch_tokens=64)
    assert batch.inputs_BTK["weights"][0, :6].ravel().tolist() == [1.0] * 6


def test_rows_are_longer_where_attention_costs_less():
    lengths = [600] * 12
    short, long = (layout(lengths, Grid(8192), attention_tokens)[0][0] for attention_tokens in (1024, 8192))
    assert len(short) < len(long)
