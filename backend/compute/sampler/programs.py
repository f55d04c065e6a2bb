"""The programs that the warm-up compiles: those that usual requests need, in caches of every size.

Programs that few requests need are left out: lists of top tokens, more of a prompt than its logprobs, and stacks of
more than `_WIDTHS` columns (four adapters of rank 32 in one batch). They are compiled when they are first needed.

Letters: S slots, C tokens of a chunk, B rows, Q tokens of a piece, N pages that are copied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.commands import LoraSpec
from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.lora import Lora
from tinkerflow.backend.compute.sampler.decode import Rows, decode
from tinkerflow.backend.compute.sampler.kv_cache import (
    PAGES,
    empty_cache,
    page_of,
    pages_of,
    pages_put,
    with_page,
    zero_slots,
)
from tinkerflow.backend.compute.sampler.prefill import Piece, prefill
from tinkerflow.backend.compute.sampler.prompt_scores import PLAIN, empty_queries
from tinkerflow.backend.compute.sampler.sampling import greedy_choice
from tinkerflow.backend.compute.sampler.shapes import (
    BLOCK,
    LARGE_AFTER,
    PREFILL_TOKENS,
    RANK_COLUMNS,
    SHORT_PROMPT,
    Shapes,
    rank_columns,
)
from tinkerflow.backend.compute.sampler.snapshot_cache import divisor_of, empty_stack, frozen, placed, widths_of
from tinkerflow.backend.compute.transformer import Params
from tinkerflow.backend.compute.warming import Program, result_of

_WIDTHS = (RANK_COLUMNS, rank_columns(RANK_COLUMNS + 1))
_RARE = 8  # how far from what is common the programs are that only trouble needs
_WIDE = 4  # and those of several adapters in one batch


@dataclass(frozen=True)
class SamplerPrograms:
    """The programs of one sampler.

    shapes: its sizes. params: the weights. chunk: tokens of a decode dispatch. usual: the shape of most adapters.
    """

    cfg: ModelConfig
    mesh: Mesh
    shapes: Shapes
    params: Params
    chunk: int
    usual: LoraSpec

    def all(self) -> Iterator[Program]:
        """All programs but those that depend on an adapter's shape; shorter caches with fewer slots first."""
        for number, length in enumerate(self.shapes.lengths):
            pieces = self._pieces(length)
            yield from self._of_prompts(2 * number, length, pieces)
            batches = [slots for slots in self.shapes.slots if slots <= self.shapes.most_slots(length)]
            for size, slots in enumerate(batches):
                yield from self._of_batch(2 * number + size, slots, length)
            for rows in sorted({*batches, *(rows for rows, _ in pieces)}):
                yield Program(f"pages of {rows} rows of {length}", 2 * number, partial(self._pages_of, (rows, length)))

    def publishing(self, spec: LoraSpec, adapter: Lora) -> Iterator[Program]:
        """The programs that publish and sample an adapter of that shape; `adapter` needs no values."""
        widths, of = widths_of(self.cfg, spec), f"rank {spec.rank}"
        publish = partial(result_of, frozen, self.mesh, widths, self._dtype, adapter)
        yield Program(f"publish, {of}", 1, publish)
        for width in _WIDTHS:
            make = partial(self._place, width, spec, publish)
            yield Program(f"publish into {width} columns, {of}", _distance(1, width), make)

    def _pieces(self, length: int) -> list[tuple[int, int]]:
        """How many prompts of up to `length` tokens go together, and how many tokens of each at once."""
        alone, *more = self.shapes.rows
        pieces = [(alone, size) for size in PREFILL_TOKENS if size <= BLOCK or length > LARGE_AFTER * size]
        if length == self.shapes.length_for(SHORT_PROMPT):
            pieces += [(rows, PREFILL_TOKENS[0]) for rows in more]
        return pieces

    def _of_prompts(self, distance: int, length: int, pieces: list[tuple[int, int]]) -> Iterator[Program]:
        for rows, size in pieces:
            for width in _WIDTHS:
                make = partial(self._prefill, rows, length, size, width)
                name = f"prefill of {rows}x{size} tokens in {length}, {width} columns"
                yield Program(name, _distance(distance, width), make)
        yield Program(f"prefixes of {length}", distance + 1, partial(self._prefix_cache, (self.shapes.rows[0], length)))

    def _of_batch(self, distance: int, slots: int, length: int) -> Iterator[Program]:
        shape, of = (slots, length), f"{slots} slots of {length}"
        for width in _WIDTHS:
            make = partial(self._decode, shape, width)
            yield Program(f"decode, {of}, {width} columns", _distance(distance, width), make)
        yield Program(f"pages into {of}", distance, partial(self._pages_put, shape))
        yield Program(f"scrub {of}", distance + _RARE, partial(self._scrub, shape))

    # ------------------------------------------------------------------ one of each, as sampler.py calls them
    def _prefill(self, rows: int, length: int, size: int, width: int) -> None:
        piece = Piece(
            tokens_BQ=np.zeros((rows, size), np.int32),
            start=np.int32(0),
            columns_B2=np.zeros((rows, 2), np.int32),
            score=np.bool_(False),
            wanted=empty_queries(PLAIN, rows, size),
        )
        stack, staged = self._stack(width), self._cache(rows, length)
        prefill.lower(self.cfg, self.mesh, PLAIN, self.params, stack, staged, piece).compile()

    def _decode(self, shape: tuple[int, int], width: int) -> None:
        S = shape[0]
        rows = Rows(
            tokens_S=np.zeros(S, np.int32),
            positions_S=np.zeros(S, np.int32),
            columns_S2=np.zeros((S, 2), np.int32),
            uniform_CS=np.zeros((self.chunk, S), np.float32),
            choice=greedy_choice(S),
        )
        stack, cache = self._stack(width), self._cache(*shape)
        decode.lower(self.cfg, self.mesh, self.chunk, 0, self.params, stack, cache, rows, np.int32(1)).compile()

    def _pages_of(self, shape: tuple[int, int]) -> Any:
        places = np.zeros(PAGES, np.int32)
        return result_of(pages_of, self.cfg, self.mesh, self._cache(*shape), places, places, np.int32(1))

    def _pages_put(self, shape: tuple[int, int]) -> None:
        pages, places = self._pages_of((self.shapes.rows[0], self.shapes.lengths[0])), np.zeros(PAGES, np.int32)
        pages_put.lower(self.cfg, self.mesh, self._cache(*shape), pages, places, places, np.int32(1)).compile()

    def _prefix_cache(self, shape: tuple[int, int]) -> None:
        staged = self._cache(*shape)
        page = result_of(page_of, self.cfg, self.mesh, staged, np.int32(0))
        with_page.lower(self.cfg, self.mesh, staged, page, np.int32(0)).compile()

    def _scrub(self, shape: tuple[int, int]) -> None:
        zero_slots.lower(self.cfg, self.mesh, self._cache(*shape), np.zeros(shape[0], np.bool_)).compile()

    def _place(self, width: int, spec: LoraSpec, publish: Callable[[], Any]) -> None:
        snapshot, _ = publish()
        columns, _ = widths_of(self.cfg, spec)
        placed.lower(self.mesh, self._stack(width, spec), snapshot, columns, np.int32(0)).compile()

    # ------------------------------------------------------------------ what several of them are given
    # JAX has what was compiled for these before, and makes no second one.
    def _cache(self, slots: int, length: int) -> Any:
        return result_of(empty_cache, self.cfg, self.mesh, slots, length, self._dtype, self.params.apart)

    def _stack(self, width: int, *others: LoraSpec) -> Any:
        widths = width, width // min(divisor_of(self.cfg, spec) for spec in (self.usual, *others))
        return result_of(empty_stack, self.cfg, self.mesh, widths, self._dtype, self.params.apart)

    @property
    def _dtype(self) -> str:
        return str(self.params.embed_VD.dtype.name)


def _distance(least: int, width: int) -> int:
    return least + (_WIDE if width > RANK_COLUMNS else 0)
