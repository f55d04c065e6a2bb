"""The programs that the warm-up compiles: the programs of usual requests.

Programs of rare requests are left out: lists of top tokens, prompt scores besides logprobs, and stacks of more than
`_WIDTHS` columns (four adapters of rank 32 in one batch). They are compiled when they are first needed.

Letters: S slots, W pages of a sequence, C tokens of a chunk, B rows, Q tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import WEIGHTS, replicated, sharding
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.models.vision_tower import VisionTower
from tinkerflow.backend.compute.platforms import RANK_COLUMNS
from tinkerflow.backend.compute.sampler.adjustments import warm_rows
from tinkerflow.backend.compute.sampler.decode import decided, decode, empty_rows, recording
from tinkerflow.backend.compute.sampler.kv_cache import COPIES, cache_shape, copied, copied_states, empty_cache
from tinkerflow.backend.compute.sampler.pages import PagePool
from tinkerflow.backend.compute.sampler.prefill import empty_piece, fill, prefill, score
from tinkerflow.backend.compute.sampler.prompt_scores import PLAIN, empty_queries
from tinkerflow.backend.compute.sampler.shapes import INVARIANT_COLUMNS, LARGE_AFTER, Shapes, rank_columns
from tinkerflow.backend.compute.sampler.snapshot_cache import divisor_of, empty_stack, frozen, placed, widths_of
from tinkerflow.backend.compute.warming import Program, like, result_of
from tinkerflow.backend.spec.commands import CacheFormat, LoraSpec

_PLAIN = 0  # columns for the base model alone
_WIDTHS = (RANK_COLUMNS, rank_columns(RANK_COLUMNS + 1))
_WIDE = 4  # how far programs for several adapters in one batch are from the most common programs


@dataclass(frozen=True)
class SamplerPrograms:
    """The programs of one sampler.

    shapes: its sizes. params: the weights. pool: its pages. chunk: tokens per decode dispatch. max_context: positions
    of a sequence. usual: the shape of most adapters. accelerated: whether a chunk is dispatched before the last one is
    read, and the base model alone has programs without adapters. host_decides: as in `Platform`. kv_cache: the format
    of the pages. routes, supports: whether the experts and the supports of tokens are recorded. tower: for models with
    images.
    """

    cfg: ModelConfig
    mesh: Mesh
    shapes: Shapes
    params: Params
    pool: PagePool
    chunk: int
    max_context: int
    usual: LoraSpec
    accelerated: bool
    host_decides: bool
    kv_cache: CacheFormat
    routes: bool
    supports: bool
    tower: VisionTower | None = None

    def all(self) -> Iterator[Program]:
        """All programs that do not depend on an adapter's shape.

        The most common come first: a prompt alone, and decode of one sequence and of all, with an adapter's columns.
        """
        alone, *more = self.shapes.rows
        least, *larger, largest = self.shapes.pieces
        pieces = [(alone, size) for size in (least, *larger)]
        pieces += [(alone, largest)] if self.max_context > LARGE_AFTER * largest else []
        pieces += [(rows, least) for rows in more]
        widths = (_PLAIN, *self._widths) if self.accelerated and not self.shapes.invariant else self._widths
        for width in widths:
            for rows, size in pieces:
                name = f"prefill of {rows}x{size} tokens, {width} columns"
                rare = rows > alone or size == largest
                yield Program(name, self._distance(rare, width), partial(self._prefill, rows, size, width))
                if self.tower is not None and rows == alone:
                    run = partial(self._prefill, rows, size, width, self.tower)
                    yield Program(f"{name}, images", self._distance(1, width), run)
                if self.host_decides:
                    of = f"{rows}x{size} tokens, {width} columns"
                    yield Program(f"scores of {of}", self._distance(1, width), partial(self._score, rows, size, width))
            for further, (kind, variant) in enumerate(self._variants.items()):
                sizes = self._slots(**variant)
                for slots in sizes:
                    run = partial(self._decode, slots, width, **variant)
                    name = f"{kind}, {slots} slots, {width} columns"
                    distance = further + (slots not in (sizes[0], sizes[-1]))
                    yield Program(name, self._distance(distance, width), run)
                    for what, recorded in self._recordings(**variant):
                        recorder = partial(run, **recorded)
                        yield Program(f"{name}, with {what}", self._distance(distance + 1, width), recorder)
        yield Program("copies of pages", 0, partial(self._copies, copied))
        if self.pool.states:
            yield Program("copies of states", 0, partial(self._copies, copied_states))
        for width in widths[:-1] or widths:
            for chunk in sorted({1, self.chunk}) if self.host_decides else (self.chunk,):
                for distance, slots in enumerate(self._slots(chunk)):
                    name = f"decode of {chunk} with adjusted logits, {slots} slots, {width} columns"
                    run = partial(self._decode, slots, width, chunk=chunk, adjusted=True)
                    yield Program(name, self._distance(distance, self._widths[-1]), run)

    def _recordings(
        self, filters: bool | None = None, chunk: int | None = None
    ) -> Iterator[tuple[str, dict[str, bool]]]:
        """The recordings that a variant of decode may make. Supports are recorded only if the program filters."""
        if self.routes:
            yield "experts", {"routes": True}
        if self.supports and (filters or chunk == 1 or not self.host_decides):
            yield "supports", {"supports": True}
            if self.routes:
                yield "experts and supports", {"routes": True, "supports": True}

    def _slots(self, chunk: int | None = None, **_: Any) -> tuple[int, ...]:
        return self.shapes.slots if chunk in (None, self.chunk) else self.shapes.slots_of_one_token

    @property
    def _variants(self) -> dict[str, dict[str, Any]]:
        """The usual programs of decode by their names, most common first."""
        if not self.host_decides:
            return {"decode": {}}
        one = {"decode of one token": {"chunk": 1}} if self.chunk > 1 else {}
        return {"decode": {}, "decode with filters": {"filters": True}, **one}

    def publishing(self, spec: LoraSpec, adapter: Lora) -> Iterator[Program]:
        """The programs that publish and sample an adapter of this shape. `adapter` needs no values."""
        widths, of = widths_of(self.cfg, spec), f"rank {spec.rank}"
        publish = partial(result_of, frozen, self.mesh, widths, self._dtype, adapter)
        yield Program(f"publish, {of}", 0, publish)
        for width in self._widths:
            make = partial(self._place, width, spec, publish)
            yield Program(f"publish into {width} columns, {of}", self._distance(0, width), make)

    # ------------------------------------------------------------------ one program of each kind, called as in model.py
    def _prefill(self, rows: int, size: int, width: int, tower: VisionTower | None = None) -> None:
        piece = empty_piece(PLAIN, rows, size, self._table, states=self.pool.states is not None)
        if tower is not None:
            piece = replace(piece, images=tower.no_images(rows, size))
        args = self.params, self._stack(width), self._cache()
        if self.host_decides:
            fill.lower(self.cfg, self.mesh, *args, replace(piece, score=None, queries=None)).compile()
        else:
            prefill.lower(self.cfg, self.mesh, PLAIN, *args, piece).compile()

    def _score(self, rows: int, size: int, width: int) -> None:
        shape = (rows, size, self.cfg.hidden)
        x_BQD = jax.ShapeDtypeStruct(shape, self._dtype, sharding=sharding(self.mesh, shape, WEIGHTS))
        columns_B2, queries = np.zeros((rows, 2), np.int32), empty_queries(PLAIN, rows, size)
        score.lower(self.mesh, PLAIN, self.params, self._stack(width), x_BQD, columns_B2, queries).compile()

    def _decode(
        self,
        S: int,
        width: int,
        *,
        chunk: int | None = None,
        filters: bool = False,
        adjusted: bool = False,
        routes: bool = False,
        supports: bool = False,
    ) -> None:
        most, chunk = self.shapes.slots[-1], chunk or self.chunk
        rows = replace(
            empty_rows(S, self._table, chunk, states=self.pool.states is not None),
            adjusted=warm_rows(self.mesh, S, self.cfg.vocab) if adjusted else None,
            before_M=like(np.zeros(most, np.int32), replicated(self.mesh)) if self.accelerated else None,
            from_S=np.zeros(S, np.int32) if self.accelerated else None,
            shift_S=None if self.cfg.vision is None else np.zeros(S, np.int32),
        )
        stack, cache = self._stack(width), self._cache()
        steps = None if self.host_decides else np.int32(1)
        if self.host_decides:
            rows.choice.top_k_S[:] = 1 if filters else -1
            rows = decided(rows, self.chunk)
        recorded = recording(routes=routes, supports=supports)
        decode.lower(self.cfg, self.mesh, chunk, 0, self.params, stack, cache, rows, steps, **recorded).compile()

    def _copies(self, program: Any) -> None:
        places = np.zeros(COPIES, np.int32)
        program.lower(self.cfg, self.mesh, self._cache(), places, places, np.int32(1)).compile()

    def _place(self, width: int, spec: LoraSpec, publish: Callable[[], Any]) -> None:
        snapshot, _ = publish()
        columns, _ = widths_of(self.cfg, spec)
        placed.lower(self.mesh, self._stack(width, spec), snapshot, columns, np.int32(0)).compile()

    # ------------------------------------------------------------------ shared arguments
    # JAX has already compiled the programs for these, and compiles none again.
    def _cache(self) -> Any:
        return result_of(empty_cache, self.cfg, self.mesh, *cache_shape(self.pool, self.params, self.kv_cache))

    @property
    def _widths(self) -> tuple[int, ...]:
        return (INVARIANT_COLUMNS,) if self.shapes.invariant else _WIDTHS

    def _distance(self, least: int, width: int) -> int:
        usual = self._widths[0]
        return least + (_WIDE if width > usual else width < usual)

    @property
    def _table(self) -> int:
        return self.pool.pages_for(self.max_context)

    def _stack(self, width: int, *others: LoraSpec) -> Any:
        if width == _PLAIN:
            return Lora(layers={}, unembed=None)
        widths = width, width // min(divisor_of(self.cfg, spec) for spec in (self.usual, *others))
        stack = self.cfg, self.mesh, widths, self._dtype, self.params.unstacked, self.shapes.invariant
        return result_of(empty_stack, *stack)

    @property
    def _dtype(self) -> str:
        return str(self.params.embed_VD.dtype.name)
