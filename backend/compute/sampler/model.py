"""What the sampler does on the devices. Each method is one dispatch or a few.

Letters: B rows, Q tokens of a piece, S slots, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.mesh import to_host
from tinkerflow.backend.compute.sampler.decode import Decoded, Rows, decode
from tinkerflow.backend.compute.sampler.kv_cache import KVCache, SlotCopy, copy_slots, empty_cache, zero_slots
from tinkerflow.backend.compute.sampler.prefill import Piece, prefill
from tinkerflow.backend.compute.sampler.prompt_scores import empty_queries
from tinkerflow.backend.compute.sampler.requests import ActiveSequence
from tinkerflow.backend.compute.sampler.sampling import greedy_choice, normal_temperature, normal_top_p, width_for
from tinkerflow.backend.compute.sampler.scheduler import PrefillGroup
from tinkerflow.backend.compute.sampler.snapshot_cache import SnapshotCache
from tinkerflow.backend.compute.transformer import Params

Held = list[tuple[int, ActiveSequence]]  # (slot, the sequence in it), ascending


class SamplerModel:
    """The base model and the snapshots on the devices. It keeps no KV cache: callers hand theirs in and get it back."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, params: Params, snapshots: SnapshotCache, chunk: int) -> None:
        """cfg, mesh: the base model's shape, and the devices. params: the weights, by layer if `snapshots` are.

        chunk: the most tokens that one decode dispatch makes.
        """
        self.cfg, self.mesh, self.snapshots, self.chunk = cfg, mesh, snapshots, chunk
        self._params = params

    def empty_cache(self, slots: int, length: int) -> KVCache:
        """A cache of zeros for `slots` sequences of `length` positions."""
        return empty_cache(self.cfg, self.mesh, slots, length, self._params.embed_VD.dtype.name, self._params.apart)

    def copy_slots(self, into: KVCache, source: KVCache, copies: Sequence[SlotCopy]) -> KVCache:
        """`into`, updated in place, with the front of some slots of `source`."""
        return copy_slots(self.cfg, self.mesh, into, source, copies)

    def zero_slots(self, cache: KVCache, dirty_S: npt.NDArray[np.bool_]) -> KVCache:
        """`cache`, updated in place, with zeros in the slots where dirty_S is true."""
        return zero_slots(self.cfg, self.mesh, cache, dirty_S)

    def prefill_piece(self, group: PrefillGroup, staged: KVCache) -> KVCache:
        """The next piece of every prompt of `group`: `staged`, updated in place. The group has then gone on by it."""
        size, start, widths = group.piece, group.start, group.widths
        piece = Piece(
            tokens_BQ=np.zeros((group.rows, size), np.int32),
            start=np.int32(start),
            columns_B2=np.zeros((group.rows, 2), np.int32),
            score=np.bool_(any(job.wants(start, start + size) for job in group.jobs)),
            wanted=empty_queries(widths, group.rows, size),
        )
        for row, job in enumerate(group.jobs):
            here_T = job.tokens_T[start : min(start + size, job.length)]
            piece.tokens_BQ[row, : len(here_T)] = here_T
            piece.wanted.next_BQ[row, : len(here_T)] = job.tokens_T[start + 1 : start + 1 + len(here_T)]
            if job.wants(start, start + size) and job.parent.scores is not None:
                job.parent.scores.fill(start, start + len(here_T), row, piece.wanted)
            columns = self.snapshots.columns(job.parent.snapshot)
            piece.columns_B2[row] = columns.start, columns.end
        staged, scored = prefill(self.cfg, self.mesh, widths, self._params, self.snapshots.lora, staged, piece)
        group.advance(size, to_host(scored) if piece.score else None)
        return staged

    def decode_chunk(self, cache: KVCache, held: Held, steps: int) -> tuple[KVCache, Decoded]:
        """`steps` more tokens of every slot: `cache`, updated in place, and what was decoded, on the host.

        held: the sequences; other slots decode what nobody reads. steps: at most `chunk`.
        """
        most_listed = max(sequence.parent.request.topk_sample for _, sequence in held)
        cache, on_devices = decode(
            self.cfg,
            self.mesh,
            self.chunk,
            min(width_for(most_listed), self.cfg.vocab),
            self._params,
            self.snapshots.lora,
            cache,
            self._rows(held, cache.slots, steps),
            np.int32(steps),
        )
        return cache, to_host(on_devices)

    def _rows(self, held: Held, S: int, steps: int) -> Rows:
        rows = Rows(
            tokens_S=np.zeros(S, np.int32),
            positions_S=np.zeros(S, np.int32),
            columns_S2=np.zeros((S, 2), np.int32),
            uniform_CS=np.zeros((self.chunk, S), np.float32),
            choice=greedy_choice(S),
        )
        for slot, sequence in held:
            request, columns = sequence.parent.request, self.snapshots.columns(sequence.parent.snapshot)
            rows.tokens_S[slot], rows.positions_S[slot] = sequence.last_token, sequence.cached
            rows.columns_S2[slot] = columns.start, columns.end
            rows.uniform_CS[:steps, slot] = sequence.uniforms.take(steps)
            rows.choice.temperature_S[slot] = normal_temperature(request.temperature)
            rows.choice.top_k_S[slot] = min(request.top_k, self.cfg.vocab)
            rows.choice.top_p_S[slot] = normal_top_p(request.top_p)
        return rows


def wait(*caches: KVCache | None) -> None:
    """Until the devices have computed them."""
    jax.block_until_ready(caches)
