"""The sampler's work on the devices. Each method makes one dispatch or a few.

Letters: B rows, Q tokens of a piece, S slots, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import put, replicated, to_host
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.models.vision_tower import VisionTower
from tinkerflow.backend.compute.sampler.adjustments import adjusted_rows
from tinkerflow.backend.compute.sampler.decode import Decoded, Rows, decided, decode, empty_rows, recording
from tinkerflow.backend.compute.sampler.image_features import ImageFeatureCache
from tinkerflow.backend.compute.sampler.kv_cache import KVCache, cache_shape, copy_pages, empty_cache
from tinkerflow.backend.compute.sampler.pages import PagePool, PageTable
from tinkerflow.backend.compute.sampler.prefill import Piece, empty_piece, fill, prefill, score
from tinkerflow.backend.compute.sampler.prefill_jobs import PrefillGroup
from tinkerflow.backend.compute.sampler.prompt_scores import PieceScores, Widths
from tinkerflow.backend.compute.sampler.requests import ActiveSequence, DecodeRow, RowAssignment
from tinkerflow.backend.compute.sampler.sampling import width_for
from tinkerflow.backend.compute.sampler.snapshot_cache import SnapshotCache
from tinkerflow.backend.spec.commands import CacheFormat

Row = TypeVar("Row", bound=DecodeRow)


@dataclass(frozen=True)
class Chunk(Generic[Row]):
    """A decode dispatch: `steps` tokens of each row in `slots`. decoded: on the devices."""

    slots: Sequence[tuple[int, Row]]
    steps: int
    decoded: Decoded


class SamplerModel:
    """The base model, the snapshots and the KV cache on the devices."""

    def __init__(
        self,
        cfg: ModelConfig,
        mesh: Mesh,
        params: Params,
        snapshots: SnapshotCache,
        pool: PagePool,
        *,
        chunk: int,
        max_context: int,
        kv_cache: CacheFormat,
        host_decides: bool,
        most_ahead: int | None = None,
        tower: VisionTower | None = None,
    ) -> None:
        """Create an empty cache.

        cfg, mesh: the base model's shape, and the devices. params: the weights, by layer if `snapshots` are. pool: the
        pages. chunk: the most tokens of one decode dispatch. max_context: the most tokens of a sequence. kv_cache: the
        format of the pages. host_decides: as in `Platform`. most_ahead: the most slots of a chunk, if a chunk is
        dispatched before the previous chunk is read; None: each chunk is read first. tower: for models with images.
        """
        self.cfg, self.mesh, self.snapshots, self.chunk = cfg, mesh, snapshots, chunk
        self.params, self._pool, self._width = params, pool, pool.pages_for(max_context)
        self._no_tokens_M = None if most_ahead is None else put(np.zeros(most_ahead, np.int32), replicated(mesh))
        self._images = None if tower is None else ImageFeatureCache(tower)
        self._kv_cache, self._host_decides = kv_cache, host_decides
        self.reset_cache()

    def reset_cache(self) -> None:
        """Start again with a cache of zeros."""
        if self._images is not None:
            self._images.clear()
        self.cache: KVCache | None = None  # free its memory before the next cache is made
        self.last_piece: PieceScores | jax.Array | None = None  # ready when the last prefill dispatch is computed
        self.cache = empty_cache(self.cfg, self.mesh, *cache_shape(self._pool, self.params, self._kv_cache))

    def replace_params(self, load: Callable[[], Params]) -> None:
        """Start again with the weights that `load` returns. The old weights are freed before the call."""
        del self.params
        self.params = load()
        self.reset_cache()

    def prefill_piece(self, group: PrefillGroup) -> int:
        """Compute the next piece of every prompt of `group`, and advance the group by it.

        Returns the number of tokens, including padding, and including those of images that the tower encoded.
        """
        size, start = group.piece, group.start
        images, encoded = None, 0
        if self._images is not None and len(group.jobs) == 1:
            images, encoded = self._images.piece(group.jobs[0], group.rows, size, start)
        for job in group.jobs:
            if job.sequences:  # otherwise the request was removed, and its row writes nothing
                owned = self._pool.own_state(job.table)
                assert owned, "there are fewer states than prompts"
        piece = replace(
            empty_piece(group.widths, group.rows, size, self._width, states=self._pool.states is not None),
            start=np.int32(start),
            tables_BW=self._tables(group.rows, [(job.row, job.table) for job in group.jobs]),
            score=np.bool_(any(job.wants_scores(start, start + size) for job in group.jobs)),
            states_B=self._states(group.rows, [(job.row, job.table) for job in group.jobs]),
            images=images,
        )
        for job in group.jobs:
            row = job.row
            here_T = job.tokens_T[start : min(start + size, job.length)]
            piece.tokens_BQ[row, : len(here_T)] = here_T
            if piece.valid_B is not None:
                piece.valid_B[row] = len(here_T)
            assert piece.queries is not None
            piece.queries.next_BQ[row, : len(here_T)] = job.tokens_T[start + 1 : start + 1 + len(here_T)]
            if job.wants_scores(start, start + size) and job.parent.scores is not None:
                job.parent.scores.fill(start, start + len(here_T), row, piece.queries)
            columns = self.snapshots.columns(job.parent.snapshot)
            piece.columns_B2[row] = columns.start, columns.end
        scored = self._computed(group.widths, piece)
        group.advance(size, to_host(scored) if piece.score else None)
        return group.rows * size + encoded

    def _computed(self, widths: Widths, piece: Piece) -> PieceScores | None:
        """Dispatch a piece. Returns its scores on the devices; None if the host decided that no scores are wanted."""
        params, lora, cache = self.params, self.snapshots.lora, self._copied_cache()
        if not self._host_decides:
            self.cache, scored = prefill(self.cfg, self.mesh, widths, params, lora, cache, piece)
            self.last_piece = scored
            return scored
        unscored = replace(piece, score=None, queries=None)
        self.cache, x_BQD = fill(self.cfg, self.mesh, params, lora, cache, unscored)
        self.last_piece = x_BQD
        if not piece.score or piece.queries is None:
            return None
        return score(self.mesh, widths, params, lora, x_BQD, piece.columns_B2, piece.queries)

    def decode_chunk(
        self, S: int, slots: Sequence[tuple[int, Row]], steps: int, before: Chunk[ActiveSequence] | None
    ) -> Chunk[Row]:
        """Dispatch `steps` more tokens of every sequence.

        S: slots of the dispatch; the tokens of unused slots are never read. steps: at most `chunk`; 1 or `chunk` if the
        host decides. before: the unread chunk, which has the last tokens of all sequences in flight.
        """
        most_listed = max(sequence.parent.request.topk_sample for _, sequence in slots)
        requests = [row.parent.request for _, row in slots]
        recorded = recording(
            routes=bool(self.cfg.experts) and any(request.routes for request in requests),
            supports=any(request.supports for request in requests),
        )
        chunk = steps if self._host_decides else self.chunk
        rows = self._rows(slots, S, chunk, steps, before)
        self.cache, on_devices = decode(
            self.cfg,
            self.mesh,
            chunk,
            min(width_for(most_listed), self.cfg.vocab),
            self.params,
            self.snapshots.lora,
            self._copied_cache(),
            decided(rows, self.chunk) if self._host_decides else rows,
            None if self._host_decides else np.int32(steps),
            **recorded,
        )
        return Chunk(slots, steps, on_devices)

    def read_chunk(self, chunk: Chunk[Row]) -> Decoded:
        """The decoded tokens on the host, as soon as the devices have computed them."""
        return to_host(replace(chunk.decoded, last_M=None))

    def _copied_cache(self) -> KVCache:
        """Make the pool's copies, and return the cache."""
        assert self.cache is not None
        cache = copy_pages(self.cfg, self.mesh, self.cache, self._pool.pop_copies())
        if self._pool.states:
            cache = copy_pages(self.cfg, self.mesh, cache, self._pool.states.pop_copies(), states=True)
        return cache

    def _tables(self, rows: int, tables: Iterable[tuple[int, PageTable]]) -> npt.NDArray[np.int32]:
        tables_BW = np.zeros((rows, self._width), np.int32)
        for row, table in tables:
            tables_BW[row, : len(table.pages)] = table.pages
        return tables_BW % self._pool.pages

    def _states(self, rows: int, tables: Iterable[tuple[int, PageTable]]) -> npt.NDArray[np.int32] | None:
        if not self._pool.states:
            return None
        states_B = np.zeros(rows, np.int32)
        for row, table in tables:
            if table.state:
                states_B[row] = table.state.pages[0] % self._pool.states.pages
        return states_B

    def _rows(
        self, assigned: RowAssignment, S: int, chunk: int, steps: int, before: Chunk[ActiveSequence] | None
    ) -> Rows:
        rows = replace(
            empty_rows(S, self._width, chunk, states=self._pool.states is not None),
            tables_SW=self._tables(S, ((slot, sequence.table) for slot, sequence in assigned)),
            adjusted=adjusted_rows(self.mesh, self.cfg.vocab, S, assigned),
            states_S=self._states(S, ((slot, sequence.table) for slot, sequence in assigned)),
            shift_S=None if self.cfg.vision is None else np.zeros(S, np.int32),
        )
        slots, sequences = [slot for slot, _ in assigned], [sequence for _, sequence in assigned]
        columns = [self.snapshots.columns(sequence.parent.snapshot) for sequence in sequences]
        rows.tokens_S[slots] = [sequence.last_token for sequence in sequences]
        rows.positions_S[slots] = [sequence.cached for sequence in sequences]
        if rows.shift_S is not None:
            rows.shift_S[slots] = [sequence.parent.rotary_shift for sequence in sequences]
        rows.columns_S2[slots] = [(place.start, place.end) for place in columns]
        rows.uniform_CS[:steps, slots] = np.stack([each.draw(steps) for each in sequences], axis=1)
        choices = zip(*(sequence.parent.sampling_choice(self.cfg.vocab) for sequence in sequences), strict=True)
        for part, chosen in zip(jax.tree.leaves(rows.choice), choices, strict=True):
            part[slots] = chosen
        return rows if self._no_tokens_M is None else self._continued(rows, assigned, before)

    def _continued(self, rows: Rows, assigned: RowAssignment, before: Chunk[ActiveSequence] | None) -> Rows:
        """The rows, with last tokens in flight taken from the previous chunk."""
        from_S = np.full(len(rows.tokens_S), -1, np.int32)
        place_of = {id(sequence): place for place, sequence in before.slots} if before is not None else {}
        for slot, sequence in assigned:
            if sequence.in_flight:
                from_S[slot] = place_of[id(sequence)]
        last_M = self._no_tokens_M if before is None else before.decoded.last_M
        return replace(rows, before_M=last_M, from_S=from_S)
