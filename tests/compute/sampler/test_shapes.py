"""Buckets are few and large enough, and prompts are cut into pieces with little padding."""

from __future__ import annotations

from itertools import accumulate, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkerflow.backend.compute.platforms import CPU, CUDA
from tinkerflow.backend.compute.sampler.pages import PAGE
from tinkerflow.backend.compute.sampler.shapes import (
    at_least,
    make_shapes,
    prefill_piece,
    prefill_pieces,
    rank_columns,
)

SIZES = st.sampled_from([CPU.prefill_tokens, CUDA.prefill_tokens])


def pages_of(tokens: int) -> int:
    """The positions of the pages that contain this number of tokens."""
    return -(-tokens // PAGE) * PAGE


@given(
    max_slots=st.integers(1, 300),
    fsdp=st.sampled_from([1, 2, 3, 4]),
    dear=st.booleans(),
)
def test_batch_sizes_are_few_and_cover_all_requests(max_slots: int, fsdp: int, dear: bool) -> None:
    shapes = make_shapes(max_slots=max_slots, fsdp=fsdp, rows_are_dear=dear)
    few = shapes.slots_of_one_token
    assert set(few) <= set(shapes.slots) and few[-1] == shapes.slots[-1] and 2 * len(few) <= len(shapes.slots) + 1
    assert at_least(shapes.slots, max_slots) >= max_slots
    assert all(size % fsdp == 0 for size in (*shapes.slots, *shapes.rows))
    assert len(shapes.slots) <= (9 if dear else 6)
    if dear:
        assert all(at_least(shapes.slots, count) < 2 * max(count, 4 * fsdp) for count in range(1, max_slots + 1))


@given(length=st.integers(0, 20_000), rows=st.sampled_from([1, 4, 16]), sizes=SIZES)
def test_pieces_cover_a_prompt_within_its_pages(length: int, rows: int, sizes: tuple[int, ...]) -> None:
    room, start, pieces = pages_of(length), 0, 0
    while start < length:
        piece = prefill_piece(sizes, alone=rows == 1, start=start, remaining=length - start, capacity=room - start)
        assert piece in sizes and start + piece <= room
        start += piece
        pieces += 1
    assert start <= max(length + sizes[0] - 1, length * 4 / 3)
    if rows == 1:
        early = 4 * sizes[-1]  # the largest pieces come after this number of tokens
        assert pieces <= min(length, early) / sizes[-2] + max(length - early, 0) / sizes[-1] + 8


@pytest.mark.parametrize(
    ("dear", "expected"), [(True, [1, 1, 1, 4, 4, 4, 4, 4, 16]), (False, [1, 2, 3, 4, 5, 8, 11, 12, 16])]
)
def test_prefill_pads_few_rows_where_rows_are_dear(dear: bool, expected: list[int]) -> None:
    shapes = make_shapes(max_slots=64, fsdp=1, rows_are_dear=dear)
    assert [shapes.together(prompts) for prompts in (1, 2, 3, 4, 5, 8, 11, 12, 30)] == expected


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        (1, [32]),
        (33, [64]),
        (64, [64]),
        (65, [64, 32]),
        (96, [128]),
        (129, [128, 32]),
        (161, [128, 64]),
        (2560, [128] * 16 + [512]),
    ],
)
def test_prompt_is_cut_at_the_cheapest_place(tokens: int, pieces: list[int]) -> None:
    assert prefill_pieces(CPU.prefill_tokens, tokens, 8192) == pieces


def test_off_cpus_a_long_prompt_goes_in_pieces_that_keep_a_device_busy() -> None:
    assert prefill_pieces(CUDA.prefill_tokens, 1600, 1664) == [512, 512, 512, 128]
    assert prefill_pieces(CUDA.prefill_tokens, 10_240, 10_240) == [512] * 16 + [2048]


@given(length=st.integers(0, 20_000), more=st.integers(1, 5000), sizes=SIZES)
def test_a_prompt_and_its_continuation_are_cut_alike(length: int, more: int, sizes: tuple[int, ...]) -> None:
    whole, longer = (prefill_pieces(sizes, tokens, pages_of(tokens)) for tokens in (length, length + more))
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(accumulate(whole), accumulate(longer), strict=False))
    shared = max((end for end, _ in alike if end <= length), default=0)
    assert length - shared < max(sizes[-2], length / 4)


@given(ranks=st.integers(0, 5000))
def test_a_stack_is_wide_enough_and_its_widths_are_few(ranks: int) -> None:
    assert rank_columns(ranks) >= ranks
    assert len({rank_columns(rank) for rank in range(2049)}) == 4
