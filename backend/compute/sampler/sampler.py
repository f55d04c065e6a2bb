"""The sampler: requests join and leave one decode batch between short chunks.

A step admits and cancels, prefills a bounded number of prompt tokens or decodes one chunk for every slot (both, where
there is little to prefill), and reports who is done. It takes about as long whatever is asked, so training commands and
short requests between steps never wait long.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from functools import cached_property

import jax
import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.commands import (
    Candidates,
    GroupConfig,
    LoraSpec,
    SampleProgress,
    SampleRequest,
    SampleResult,
    SampleStep,
)
from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.lora import Lora
from tinkerflow.backend.compute.mesh import FSDP, on_cpu, to_host
from tinkerflow.backend.compute.params import by_layer
from tinkerflow.backend.compute.sampler.decode import Decoded, Rows, decode
from tinkerflow.backend.compute.sampler.kv_cache import (
    KVCache,
    SlotCopy,
    copy_slots,
    empty_cache,
    pages_for,
    zero_slots,
)
from tinkerflow.backend.compute.sampler.memory import most_cells, most_pages
from tinkerflow.backend.compute.sampler.prefill import Piece, prefill
from tinkerflow.backend.compute.sampler.prefix_cache import PrefixCache
from tinkerflow.backend.compute.sampler.programs import SamplerPrograms
from tinkerflow.backend.compute.sampler.prompt_scores import empty_queries, prompt_scores
from tinkerflow.backend.compute.sampler.requests import ActiveSequence, ParentRequest, PrefixScope, check
from tinkerflow.backend.compute.sampler.sampling import (
    UniformStream,
    greedy_choice,
    normal_temperature,
    normal_top_p,
    width_for,
)
from tinkerflow.backend.compute.sampler.scheduler import PrefillGroup, Scheduler
from tinkerflow.backend.compute.sampler.shapes import PREFILL_TOKENS, make_shapes
from tinkerflow.backend.compute.sampler.snapshot_cache import AdapterSnapshot, SnapshotCache
from tinkerflow.backend.compute.sampler.stops import Decode, StopDetector, load_decode
from tinkerflow.backend.compute.transformer import Params
from tinkerflow.backend.compute.warming import Program
from tinkerflow.backend.errors import UserError

log = logging.getLogger(__name__)

_PREFILL_BUDGET = 2 * PREFILL_TOKENS[-1]  # padded prompt tokens of one step
_SHORT = 4  # sequences that are decoded beside the batch at once
_FILLING_STEPS = 3  # that only prefill, one after another: a fuller batch decodes for the price of this one
_WORTH = 4  # the batch waits so long when at least one is to join for so many that are in it
_CALM_STEPS = 4  # the batch shrinks only after so many steps that would have fitted, so that it does not go to and fro


class Sampler:
    """Snapshots, and the batch that samples from them and from the base model. Call it on every process alike."""

    def __init__(
        self, cfg: ModelConfig, params: Params, mesh: Mesh, config: GroupConfig, *, cache_cells: int | None = None
    ) -> None:
        """An idle sampler. `cache_cells`: slots times positions of the largest cache; None = what memory allows."""
        self._cfg, self._params, self._mesh, self._config = cfg, by_layer(params), mesh, config
        self._dtype = params.embed_VD.dtype
        self._max_context = min(config.max_context, cfg.max_positions)
        cells = most_cells(cfg, mesh, self._dtype.itemsize) if cache_cells is None else cache_cells
        self._shapes = make_shapes(
            max_slots=config.sample_slots,
            max_context=self._max_context,
            fsdp=mesh.shape[FSDP],
            most_cells=cells,
            rows_are_dear=on_cpu(),
        )
        self._programs = SamplerPrograms(cfg, mesh, self._shapes, self._params, config.decode_chunk)
        most = None if on_cpu() else config.resident_snapshots
        self._snapshots = SnapshotCache(cfg, mesh, self._dtype.name, by_layer=self._params.apart, most_resident=most)
        pages = most_pages(cells, rows=self._shapes.rows[0], slots=config.sample_slots)
        self._prefix_cache = PrefixCache(cfg, mesh, pages)
        self._scheduler = Scheduler(self._shapes, config.sample_slots)
        self._cache: KVCache | None = None
        self._staged: KVCache | None = None  # belongs to _staged_group
        self._staged_group: PrefillGroup | None = None
        self._staged_scope: PrefixScope | None = None  # what it was begun in; None when it has been kept
        self._calm = 0
        self._served_short = False  # in the last step
        self._filling = 0  # steps in a row that only prefilled
        self._failed: list[SampleResult] = []

    # ------------------------------------------------------------------ warm-up
    def programs(self) -> Iterator[Program]:
        """What it may need, whatever adapters there are."""
        return self._programs.all()

    def publishing(self, spec: LoraSpec, adapter: Lora) -> Iterator[Program]:
        """What it takes to publish and sample an adapter of that shape, which need have no values."""
        return self._programs.publishing(spec, adapter)

    # ------------------------------------------------------------------ snapshots
    def publish(self, snapshot_id: str, lora: Lora, spec: LoraSpec) -> None:
        """Keep a copy of an adapter (on the devices or the host) for sampling; ConflictError when the id is taken."""
        self._snapshots.publish(snapshot_id, lora, spec)

    def holds(self, snapshot_id: str) -> bool:
        """Whether there is a snapshot of that id."""
        return snapshot_id in self._snapshots

    def host_bytes(self, snapshot_id: str) -> int | None:
        """What a snapshot takes when it has left the devices; None where none does."""
        return None if self._snapshots.most_resident is None else self._snapshots.find(snapshot_id).nbytes

    def move(self, snapshot_id: str, to_id: str) -> None:
        """Rename a snapshot, over the one that `to_id` names: whoever samples that one goes on with this one.

        NotFoundError when there is none to rename.
        """
        self._scheduler.switch_snapshot(self._snapshots.move(snapshot_id, to_id))
        self._prefix_cache.forget(lambda scope: not self._snapshots.alive(scope.snapshot))

    def drop(self, snapshot_id: str) -> None:
        """Forget a snapshot; requests already admitted with it finish. Unknown ids are fine."""
        self._snapshots.drop(snapshot_id)
        self._prefix_cache.forget(lambda scope: not self._snapshots.alive(scope.snapshot))

    def clear(self) -> None:
        """Forget all snapshots, all requests and what was kept of their prompts; programs stay compiled."""
        self._snapshots.clear()
        self._prefix_cache.clear()
        self._failed, self._served_short = [], False
        self._start_over()

    # ------------------------------------------------------------------ sampling
    def step(self, command: SampleStep) -> SampleProgress:
        """Admit, cancel, prefill or decode. A request that cannot be served is answered by its own `error`."""
        if command.cancel:
            self._cancel(command.cancel)
        for request in command.admit:
            self._admit(request)
        try:
            # Who was served beside the batch is answered at once, and the batch goes on in the next step.
            self._served_short = not self._served_short and self._serve_short()
            if not self._served_short:
                self._prefill_or_decode()
        except Exception as error:
            # The batch is gone with its donated buffers (say, no memory was left), but not the snapshots.
            log.exception("a sample step failed; every request in it is answered with an error")
            text = f"the sampler's batch failed ({type(error).__name__}: {error}); the same request may work later"
            self._failed += [SampleResult(name, error=text, category="server") for name in self._scheduler.clear()]
            self._prefix_cache.clear()
        finished = (*self._failed, *self._scheduler.finish())
        self._failed = []
        if not (self._scheduler.active or self._scheduler.waiting):
            self._start_over()
        return SampleProgress(finished, active=self._scheduler.active, waiting=self._scheduler.waiting)

    def _cancel(self, request_ids: Collection[str]) -> None:
        """They leave, and what they have cached with them: maybe nobody has looked whether it is finite."""
        left_S = np.zeros(self._slots, bool)
        for slot, held in self._scheduler.decoding():
            left_S[slot] = held.parent.request.request_id in request_ids
        self._scrub(left_S)
        for request_id in request_ids:
            self._scheduler.remove(request_id)

    def _start_over(self) -> None:
        """Be idle, so that the shapes which later requests meet depend on them alone."""
        self._cache = self._staged = self._staged_group = self._staged_scope = None
        self._calm = self._filling = 0
        self._scheduler.clear()
        self._snapshots.reset()

    def _admit(self, request: SampleRequest) -> None:
        if self._scheduler.holds(request.request_id):
            return  # sent again: the one on its way answers both
        try:
            check(request, vocab=self._cfg.vocab, max_context=self._max_context)
            snapshot = None if request.snapshot_id is None else self._snapshots.find(request.snapshot_id)
            decoder = self._text if request.stop_strings else None
        except UserError as error:
            self._failed.append(SampleResult(request.request_id, error=error.message))
            return
        limit = min(request.max_tokens, self._max_context - len(request.prompt_T))
        parent = ParentRequest(request, snapshot, limit, scores=prompt_scores(request, self._cfg.vocab))
        stops = frozenset(request.stop_tokens)
        self._scheduler.admit(
            parent,
            [
                ActiveSequence(
                    parent,
                    index,
                    StopDetector(stops, request.stop_strings, decoder),
                    UniformStream(request.seed, index),
                )
                for index in range(request.num_samples)
            ],
        )

    @cached_property
    def _text(self) -> Decode:
        return load_decode(self._config.model_path)

    def _fail(self, parent: ParentRequest) -> None:
        name = "the base model" if parent.snapshot is None else f"snapshot {parent.snapshot.snapshot_id!r}"
        text = f"{name} gave logits that are not finite for this prompt; its weights may have diverged"
        self._scheduler.remove(parent.request.request_id)
        self._prefix_cache.forget(lambda scope: scope == parent.scope)
        self._failed.append(SampleResult(parent.request.request_id, error=text))

    def _prefill_or_decode(self) -> None:
        waited = self._filling > 0 and not self._fills_up()
        if waited or self._prefill() < _PREFILL_BUDGET:
            self._filling = 0
            self._decode()
        else:
            self._filling += 1
            jax.block_until_ready((self._cache, self._staged))  # whoever comes between steps must not wait for several

    def _fills_up(self) -> bool:
        """Whether one more step may prefill before the batch decodes: many are to join soon, or there is no batch."""
        busy, group, steps = self._scheduler.busy, self._scheduler.group, _FILLING_STEPS - self._filling
        if not busy:
            return True
        if group is not None and group.rows * group.remaining > steps * _PREFILL_BUDGET:
            return False
        joining = min(self._scheduler.wanted_slots(), self._shapes.most_slots(self._length)) - busy
        return steps > 0 and joining * _WORTH >= busy

    # ------------------------------------------------------------------ prefill
    def _prefill(self) -> int:
        """Compute as much of the prompts in line as a step may: how many tokens, padded."""
        budget = _PREFILL_BUDGET
        while budget > 0 and (group := self._scheduler.next_group(self._length)) is not None:
            self._snapshots.use(self._snapshots_in_use())
            if self._staged_group is not group or self._staged is None:
                self._staged_group, self._staged_scope = group, group.scope
                empty = self._empty_cache(group.rows, group.length)
                self._staged, known = self._prefix_cache.fill(group, empty)
                group.begin(known)
            while group.remaining > 0 and budget > 0:
                budget -= group.rows * group.piece
                self._staged = self._compute_piece(group, self._staged)
            if group.remaining > 0:
                break
            self._fail_unscored(group)
            if self._scheduler.group is not None:
                self._keep(group, self._staged)
                self._seed(group, self._staged)
            if self._scheduler.group is not None:
                break  # no more free slots: the rest of the group stays staged
            self._staged = self._staged_group = None
        return _PREFILL_BUDGET - budget

    def _fail_unscored(self, group: PrefillGroup) -> None:
        for parent in dict.fromkeys(job.parent for job in group.jobs):
            if parent.scores is not None and not parent.scores.finite:
                self._fail(parent)

    def _keep(self, group: PrefillGroup, staged: KVCache) -> None:
        """Let later requests begin with the group's prompt, if all of it was computed with weights that they have."""
        scope, self._staged_scope = self._staged_scope, None
        if scope is not None and scope == group.scope and self._snapshots.alive(scope.snapshot):
            self._prefix_cache.keep(group, staged)

    def _compute_piece(self, group: PrefillGroup, staged: KVCache) -> KVCache:
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
            columns = self._snapshots.columns(job.parent.snapshot)
            piece.columns_B2[row] = columns.start, columns.end
        staged, scored = prefill(self._cfg, self._mesh, widths, self._params, self._snapshots.lora, staged, piece)
        group.advance(size, to_host(scored) if piece.score else None)
        return staged

    def _seed(self, group: PrefillGroup, staged: KVCache) -> None:
        length = max(self._length, self._shapes.length_for(max(job.length for job in group.jobs) + 1))
        most = self._shapes.most_slots(length)
        if self._scheduler.busy >= most:
            return
        self._resize(min(max(self._shapes.slots_for(self._scheduler.wanted_slots()), self._slots), most), length)
        assignments = self._scheduler.assign_slots(length)
        assert self._cache is not None
        moves = [SlotCopy(one.row, one.slot, pages_for(group.jobs[one.row].length)) for one in assignments]
        self._cache = copy_slots(self._cfg, self._mesh, self._cache, staged, moves)

    # ------------------------------------------------------------------ decode
    def _decode(self) -> None:
        if self._scheduler.busy == 0:
            return
        steps = self._steps()
        self._fit(steps)
        self._snapshots.use(
            self._snapshots_in_use()
        )  # other snapshots may have taken the place of those that were prefilled with
        assert self._cache is not None
        held = list(self._scheduler.decoding())
        self._cache, decoded = self._chunk(self._cache, held, steps)
        self._scrub(~np.isfinite(decoded.logprobs_CS).all(axis=0))
        for slot in self._take(held, steps, decoded):
            self._scheduler.slots[slot] = None

    def _steps(self) -> int:
        """How many tokens to decode: up to where the first reaches their limit, but half a chunk to a whole one."""
        remaining, chunk = [held.remaining for _, held in self._scheduler.decoding()], self._config.decode_chunk
        return min(chunk, max(remaining), max(min(remaining), -(-chunk // 2)))

    def _serve_short(self) -> bool:
        """Serve those who want no more than a chunk beside the batch, unless nobody else is there: at most `_SHORT`.

        In it they would wait for a free slot, and then for a whole chunk of everybody's.
        """
        group = self._scheduler.next_short_group(min(_SHORT, self._shapes.slots[-1]), self._config.decode_chunk)
        if group is None:
            return False
        self._snapshots.use(
            [*self._snapshots_in_use(), *(job.parent.snapshot for job in group.jobs if job.parent.snapshot)]
        )
        staged = self._empty_cache(group.rows, group.length)
        group.begin(0)
        while group.remaining > 0:
            staged = self._compute_piece(group, staged)
        self._fail_unscored(group)
        whose = [(row, one) for row, job in enumerate(group.jobs) for one in job.sequences]
        whose = [(row, one) for row, one in whose if self._scheduler.holds(one.parent.request.request_id)]
        if not whose:
            return True
        held = [(slot, one) for slot, (_, one) in enumerate(whose)]
        steps = max(one.remaining for _, one in held)
        slots = self._shapes.slots_for(len(held))
        length = self._shapes.length_for(max(one.cached for _, one in held) + steps)
        cache = self._empty_cache(slots, length)
        moves = [SlotCopy(row, slot, pages_for(one.cached)) for slot, (row, one) in enumerate(whose)]
        _, decoded = self._chunk(copy_slots(self._cfg, self._mesh, cache, staged, moves), held, steps)
        self._take(held, steps, decoded)
        return True

    def _chunk(self, cache: KVCache, held: list[tuple[int, ActiveSequence]], steps: int) -> tuple[KVCache, Decoded]:
        """`steps` tokens of every slot of `cache`, in which `held` are; what was decoded is on the host."""
        asked = max(one.parent.request.topk_sample for _, one in held)
        cache, on_devices = decode(
            self._cfg,
            self._mesh,
            self._config.decode_chunk,
            min(width_for(asked), self._cfg.vocab),
            self._params,
            self._snapshots.lora,
            cache,
            self._rows(held, cache.slots, steps),
            np.int32(steps),
        )
        return cache, to_host(on_devices)

    def _take(self, held: list[tuple[int, ActiveSequence]], steps: int, decoded: Decoded) -> list[int]:
        """Give everybody what was decoded; the slots of those who have ended."""
        ended = []
        for slot, one in held:
            count = min(steps, one.remaining)
            logprobs_C = decoded.logprobs_CS[:count, slot]
            top = None
            if one.parent.request.topk_sample:
                top = Candidates(decoded.top_CSk[:count, slot], decoded.top_logprobs_CSk[:count, slot])
            if not np.isfinite(logprobs_C).all():
                self._fail(one.parent)
            elif one.take(decoded.tokens_CS[:count, slot].tolist(), logprobs_C.tolist(), top):
                ended.append(slot)
        return ended

    def _fit(self, steps: int) -> None:
        """Room for `steps` more tokens of everybody: a longer cache, maybe with fewer slots; if calm, a smaller one.

        Calm: for some steps fewer slots would have done, or a shorter cache would have had room for more who wait.
        """
        need = max(held.cached + min(steps, held.remaining) for _, held in self._scheduler.decoding())
        length = max(self._length, self._shapes.length_for(need))
        most = self._shapes.most_slots(length)
        if length > self._length:
            self._scheduler.preempt(most)
            need = max(held.cached + min(steps, held.remaining) for _, held in self._scheduler.decoding())
            length = max(self._length, self._shapes.length_for(need))
        wanted, short = self._shapes.slots_for(self._scheduler.wanted_slots()), self._shapes.length_for(need)
        slots, in_short = (min(wanted, self._shapes.most_slots(each)) for each in (length, short))
        self._calm = self._calm + 1 if slots < self._slots or slots < in_short else 0
        if self._calm >= _CALM_STEPS:
            self._calm = 0
            self._resize(in_short, short)
        else:
            self._resize(min(self._slots, self._shapes.most_slots(length)), length)

    def _rows(self, decoding: list[tuple[int, ActiveSequence]], S: int, steps: int) -> Rows:
        rows = Rows(
            tokens_S=np.zeros(S, np.int32),
            positions_S=np.zeros(S, np.int32),
            columns_S2=np.zeros((S, 2), np.int32),
            uniform_CS=np.zeros((self._config.decode_chunk, S), np.float32),
            choice=greedy_choice(S),
        )
        for slot, held in decoding:
            request, columns = held.parent.request, self._snapshots.columns(held.parent.snapshot)
            rows.tokens_S[slot], rows.positions_S[slot] = held.last_token, held.cached
            rows.columns_S2[slot] = columns.start, columns.end
            rows.uniform_CS[:steps, slot] = held.uniforms.take(steps)
            rows.choice.temperature_S[slot] = normal_temperature(request.temperature)
            rows.choice.top_k_S[slot] = min(request.top_k, self._cfg.vocab)
            rows.choice.top_p_S[slot] = normal_top_p(request.top_p)
        return rows

    def _scrub(self, dirty_S: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> None:
        """Zero the slots in which something is not finite, or may be: so it cannot reach whoever has them next."""
        if dirty_S.any() and self._cache is not None:
            self._cache = zero_slots(self._cfg, self._mesh, self._cache, dirty_S)

    # ------------------------------------------------------------------ sizes
    @property
    def _slots(self) -> int:
        return self._cache.slots if self._cache is not None else 0

    @property
    def _length(self) -> int:
        return self._cache.length if self._cache is not None else 0

    def _resize(self, slots: int, length: int) -> None:
        if (slots, length) == (self._slots, self._length):
            return
        old, from_S = self._cache, self._scheduler.resize(slots)
        self._cache = self._empty_cache(slots, length)
        if old is not None:
            moves = [SlotCopy(from_S[slot], slot, pages_for(held.cached)) for slot, held in self._scheduler.decoding()]
            self._cache = copy_slots(self._cfg, self._mesh, self._cache, old, moves)

    def _empty_cache(self, slots: int, length: int) -> KVCache:
        return empty_cache(self._cfg, self._mesh, slots, length, self._dtype.name, self._params.apart)

    def _snapshots_in_use(self) -> list[AdapterSnapshot]:
        """Every snapshot that a slot or the group in prefill decodes with, in a fixed order."""
        parents = [held.parent for _, held in self._scheduler.decoding()]
        parents += [job.parent for job in self._scheduler.group.jobs] if self._scheduler.group else []
        return [snapshot for parent in parents if (snapshot := parent.snapshot) is not None]
