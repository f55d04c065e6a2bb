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
from tinkerflow.backend.compute.sampler.bank import Snapshot, SnapshotBank
from tinkerflow.backend.compute.sampler.cache import Cache, Move, empty_cache, moved, pages_for, scrubbed
from tinkerflow.backend.compute.sampler.decode import Decoded, Rows, decode
from tinkerflow.backend.compute.sampler.memory import most_cells, most_pages
from tinkerflow.backend.compute.sampler.prefill import Piece, prefill
from tinkerflow.backend.compute.sampler.prefixes import Prefixes
from tinkerflow.backend.compute.sampler.programs import SamplerPrograms
from tinkerflow.backend.compute.sampler.prompt_scores import empty_wanted, prompt_scores
from tinkerflow.backend.compute.sampler.requests import Scope, Sequence, Ticket, check
from tinkerflow.backend.compute.sampler.sampling import (
    UniformStream,
    greedy_choice,
    normal_temperature,
    normal_top_p,
    width_for,
)
from tinkerflow.backend.compute.sampler.scheduler import Group, Scheduler
from tinkerflow.backend.compute.sampler.shapes import PREFILL_TOKENS, make_shapes
from tinkerflow.backend.compute.sampler.stops import Decode, StopWatch, load_decode
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
        self._bank = SnapshotBank(cfg, mesh, self._dtype.name, by_layer=self._params.apart, most_resident=most)
        pages = most_pages(cells, rows=self._shapes.rows[0], slots=config.sample_slots)
        self._prefixes = Prefixes(cfg, mesh, pages)
        self._line = Scheduler(self._shapes, config.sample_slots)
        self._cache: Cache | None = None
        self._staged: Cache | None = None  # belongs to _staged_group
        self._staged_group: Group | None = None
        self._staged_scope: Scope | None = None  # what it was begun in; None when it has been kept
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
        self._bank.publish(snapshot_id, lora, spec)

    def holds(self, snapshot_id: str) -> bool:
        """Whether there is a snapshot of that id."""
        return snapshot_id in self._bank

    def host_bytes(self, snapshot_id: str) -> int | None:
        """What a snapshot takes when it has left the devices; None where none does."""
        return None if self._bank.most_resident is None else self._bank.find(snapshot_id).nbytes

    def move(self, snapshot_id: str, to_id: str) -> None:
        """Rename a snapshot, over the one that `to_id` names: whoever samples that one goes on with this one.

        NotFoundError when there is none to rename.
        """
        self._line.adopt(self._bank.move(snapshot_id, to_id))
        self._prefixes.forget(lambda scope: not self._bank.alive(scope.snapshot))

    def drop(self, snapshot_id: str) -> None:
        """Forget a snapshot; requests already admitted with it finish. Unknown ids are fine."""
        self._bank.drop(snapshot_id)
        self._prefixes.forget(lambda scope: not self._bank.alive(scope.snapshot))

    def clear(self) -> None:
        """Forget all snapshots, all requests and what was kept of their prompts; programs stay compiled."""
        self._bank.clear()
        self._prefixes.clear()
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
            self._failed += [SampleResult(name, error=text, category="server") for name in self._line.clear()]
            self._prefixes.clear()
        finished = (*self._failed, *self._line.finish())
        self._failed = []
        if not (self._line.active or self._line.waiting):
            self._start_over()
        return SampleProgress(finished, active=self._line.active, waiting=self._line.waiting)

    def _cancel(self, request_ids: Collection[str]) -> None:
        """They leave, and what they have cached with them: maybe nobody has looked whether it is finite."""
        left_S = np.zeros(self._slots, bool)
        for slot, held in self._line.decoding():
            left_S[slot] = held.ticket.request.request_id in request_ids
        self._scrub(left_S)
        for request_id in request_ids:
            self._line.remove(request_id)

    def _start_over(self) -> None:
        """Be idle, so that the shapes which later requests meet depend on them alone."""
        self._cache = self._staged = self._staged_group = self._staged_scope = None
        self._calm = self._filling = 0
        self._line.clear()
        self._bank.reset()

    def _admit(self, request: SampleRequest) -> None:
        if self._line.holds(request.request_id):
            return  # sent again: the one on its way answers both
        try:
            check(request, vocab=self._cfg.vocab, max_context=self._max_context)
            snapshot = None if request.snapshot_id is None else self._bank.find(request.snapshot_id)
            decoder = self._text if request.stop_strings else None
        except UserError as error:
            self._failed.append(SampleResult(request.request_id, error=error.message))
            return
        limit = min(request.max_tokens, self._max_context - len(request.prompt_T))
        ticket = Ticket(request, snapshot, limit, scores=prompt_scores(request, self._cfg.vocab))
        stops = frozenset(request.stop_tokens)
        self._line.admit(
            ticket,
            [
                Sequence(
                    ticket,
                    index,
                    StopWatch(stops, request.stop_strings, decoder),
                    UniformStream(request.seed, index),
                )
                for index in range(request.num_samples)
            ],
        )

    @cached_property
    def _text(self) -> Decode:
        return load_decode(self._config.model_path)

    def _fail(self, ticket: Ticket) -> None:
        name = "the base model" if ticket.snapshot is None else f"snapshot {ticket.snapshot.snapshot_id!r}"
        text = f"{name} gave logits that are not finite for this prompt; its weights may have diverged"
        self._line.remove(ticket.request.request_id)
        self._prefixes.forget(lambda scope: scope == ticket.scope)
        self._failed.append(SampleResult(ticket.request.request_id, error=text))

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
        busy, group, steps = self._line.busy, self._line.group, _FILLING_STEPS - self._filling
        if not busy:
            return True
        if group is not None and group.rows * group.remaining > steps * _PREFILL_BUDGET:
            return False
        joining = min(self._line.wanted_slots(), self._shapes.most_slots(self._length)) - busy
        return steps > 0 and joining * _WORTH >= busy

    # ------------------------------------------------------------------ prefill
    def _prefill(self) -> int:
        """Compute as much of the prompts in line as a step may: how many tokens, padded."""
        budget = _PREFILL_BUDGET
        while budget > 0 and (group := self._line.form(self._length)) is not None:
            self._bank.use(self._snapshots())
            if self._staged_group is not group or self._staged is None:
                self._staged_group, self._staged_scope = group, group.scope
                empty = self._empty_cache(group.rows, group.length)
                self._staged, known = self._prefixes.fill(group, empty)
                group.begin(known)
            while group.remaining > 0 and budget > 0:
                budget -= group.rows * group.piece
                self._staged = self._compute_piece(group, self._staged)
            if group.remaining > 0:
                break
            self._fail_unscored(group)
            if self._line.group is not None:
                self._keep(group, self._staged)
                self._seed(group, self._staged)
            if self._line.group is not None:
                break  # no more free slots: the rest of the group stays staged
            self._staged = self._staged_group = None
        return _PREFILL_BUDGET - budget

    def _fail_unscored(self, group: Group) -> None:
        for ticket in dict.fromkeys(job.ticket for job in group.jobs):
            if ticket.scores is not None and not ticket.scores.finite:
                self._fail(ticket)

    def _keep(self, group: Group, staged: Cache) -> None:
        """Let later requests begin with the group's prompt, if all of it was computed with weights that they have."""
        scope, self._staged_scope = self._staged_scope, None
        if scope is not None and scope == group.scope and self._bank.alive(scope.snapshot):
            self._prefixes.keep(group, staged)

    def _compute_piece(self, group: Group, staged: Cache) -> Cache:
        size, start, widths = group.piece, group.start, group.widths
        piece = Piece(
            tokens_BQ=np.zeros((group.rows, size), np.int32),
            start=np.int32(start),
            columns_B2=np.zeros((group.rows, 2), np.int32),
            score=np.bool_(any(job.wants(start, start + size) for job in group.jobs)),
            wanted=empty_wanted(widths, group.rows, size),
        )
        for row, job in enumerate(group.jobs):
            here_T = job.tokens_T[start : min(start + size, job.length)]
            piece.tokens_BQ[row, : len(here_T)] = here_T
            piece.wanted.next_BQ[row, : len(here_T)] = job.tokens_T[start + 1 : start + 1 + len(here_T)]
            if job.wants(start, start + size) and job.ticket.scores is not None:
                job.ticket.scores.fill(start, start + len(here_T), row, piece.wanted)
            columns = self._bank.columns(job.ticket.snapshot)
            piece.columns_B2[row] = columns.start, columns.end
        staged, scored = prefill(self._cfg, self._mesh, widths, self._params, self._bank.lora, staged, piece)
        group.advance(size, to_host(scored) if piece.score else None)
        return staged

    def _seed(self, group: Group, staged: Cache) -> None:
        length = max(self._length, self._shapes.length_for(max(job.length for job in group.jobs) + 1))
        most = self._shapes.most_slots(length)
        if self._line.busy >= most:
            return
        self._resize(min(max(self._shapes.slots_for(self._line.wanted_slots()), self._slots), most), length)
        seedings = self._line.seed(length)
        assert self._cache is not None
        moves = [Move(one.row, one.slot, pages_for(group.jobs[one.row].length)) for one in seedings]
        self._cache = moved(self._cfg, self._mesh, self._cache, staged, moves)

    # ------------------------------------------------------------------ decode
    def _decode(self) -> None:
        if self._line.busy == 0:
            return
        steps = self._steps()
        self._fit(steps)
        self._bank.use(self._snapshots())  # other snapshots may have taken the place of those that were prefilled with
        assert self._cache is not None
        held = list(self._line.decoding())
        self._cache, decoded = self._chunk(self._cache, held, steps)
        self._scrub(~np.isfinite(decoded.logprobs_CS).all(axis=0))
        for slot in self._take(held, steps, decoded):
            self._line.slots[slot] = None

    def _steps(self) -> int:
        """How many tokens to decode: up to where the first reaches their limit, but half a chunk to a whole one."""
        remaining, chunk = [held.remaining for _, held in self._line.decoding()], self._config.decode_chunk
        return min(chunk, max(remaining), max(min(remaining), -(-chunk // 2)))

    def _serve_short(self) -> bool:
        """Serve those who want no more than a chunk beside the batch, unless nobody else is there: at most `_SHORT`.

        In it they would wait for a free slot, and then for a whole chunk of everybody's.
        """
        group = self._line.form_short(min(_SHORT, self._shapes.slots[-1]), self._config.decode_chunk)
        if group is None:
            return False
        self._bank.use([*self._snapshots(), *(job.ticket.snapshot for job in group.jobs if job.ticket.snapshot)])
        staged = self._empty_cache(group.rows, group.length)
        group.begin(0)
        while group.remaining > 0:
            staged = self._compute_piece(group, staged)
        self._fail_unscored(group)
        whose = [(row, one) for row, job in enumerate(group.jobs) for one in job.sequences]
        whose = [(row, one) for row, one in whose if self._line.holds(one.ticket.request.request_id)]
        if not whose:
            return True
        held = [(slot, one) for slot, (_, one) in enumerate(whose)]
        steps = max(one.remaining for _, one in held)
        slots = self._shapes.slots_for(len(held))
        length = self._shapes.length_for(max(one.cached for _, one in held) + steps)
        cache = self._empty_cache(slots, length)
        moves = [Move(row, slot, pages_for(one.cached)) for slot, (row, one) in enumerate(whose)]
        _, decoded = self._chunk(moved(self._cfg, self._mesh, cache, staged, moves), held, steps)
        self._take(held, steps, decoded)
        return True

    def _chunk(self, cache: Cache, held: list[tuple[int, Sequence]], steps: int) -> tuple[Cache, Decoded]:
        """`steps` tokens of every slot of `cache`, in which `held` are; what was decoded is on the host."""
        asked = max(one.ticket.request.topk_sample for _, one in held)
        cache, on_devices = decode(
            self._cfg,
            self._mesh,
            self._config.decode_chunk,
            min(width_for(asked), self._cfg.vocab),
            self._params,
            self._bank.lora,
            cache,
            self._rows(held, cache.slots, steps),
            np.int32(steps),
        )
        return cache, to_host(on_devices)

    def _take(self, held: list[tuple[int, Sequence]], steps: int, decoded: Decoded) -> list[int]:
        """Give everybody what was decoded; the slots of those who have ended."""
        ended = []
        for slot, one in held:
            count = min(steps, one.remaining)
            logprobs_C = decoded.logprobs_CS[:count, slot]
            top = None
            if one.ticket.request.topk_sample:
                top = Candidates(decoded.top_CSk[:count, slot], decoded.top_logprobs_CSk[:count, slot])
            if not np.isfinite(logprobs_C).all():
                self._fail(one.ticket)
            elif one.take(decoded.tokens_CS[:count, slot].tolist(), logprobs_C.tolist(), top):
                ended.append(slot)
        return ended

    def _fit(self, steps: int) -> None:
        """Room for `steps` more tokens of everybody: a longer cache, maybe with fewer slots; if calm, a smaller one.

        Calm: for some steps fewer slots would have done, or a shorter cache would have had room for more who wait.
        """
        need = max(held.cached + min(steps, held.remaining) for _, held in self._line.decoding())
        length = max(self._length, self._shapes.length_for(need))
        most = self._shapes.most_slots(length)
        if length > self._length:
            self._line.preempt(most)
            need = max(held.cached + min(steps, held.remaining) for _, held in self._line.decoding())
            length = max(self._length, self._shapes.length_for(need))
        wanted, short = self._shapes.slots_for(self._line.wanted_slots()), self._shapes.length_for(need)
        slots, in_short = (min(wanted, self._shapes.most_slots(each)) for each in (length, short))
        self._calm = self._calm + 1 if slots < self._slots or slots < in_short else 0
        if self._calm >= _CALM_STEPS:
            self._calm = 0
            self._resize(in_short, short)
        else:
            self._resize(min(self._slots, self._shapes.most_slots(length)), length)

    def _rows(self, decoding: list[tuple[int, Sequence]], S: int, steps: int) -> Rows:
        rows = Rows(
            tokens_S=np.zeros(S, np.int32),
            positions_S=np.zeros(S, np.int32),
            columns_S2=np.zeros((S, 2), np.int32),
            uniform_CS=np.zeros((self._config.decode_chunk, S), np.float32),
            choice=greedy_choice(S),
        )
        for slot, held in decoding:
            request, columns = held.ticket.request, self._bank.columns(held.ticket.snapshot)
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
            self._cache = scrubbed(self._cfg, self._mesh, self._cache, dirty_S)

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
        old, from_S = self._cache, self._line.resize(slots)
        self._cache = self._empty_cache(slots, length)
        if old is not None:
            moves = [Move(from_S[slot], slot, pages_for(held.cached)) for slot, held in self._line.decoding()]
            self._cache = moved(self._cfg, self._mesh, self._cache, old, moves)

    def _empty_cache(self, slots: int, length: int) -> Cache:
        return empty_cache(self._cfg, self._mesh, slots, length, self._dtype.name, self._params.apart)

    def _snapshots(self) -> list[Snapshot]:
        """Every snapshot that a slot or the group in prefill decodes with, in a fixed order."""
        tickets = [held.ticket for _, held in self._line.decoding()]
        tickets += [job.ticket for job in self._line.group.jobs] if self._line.group else []
        return [snapshot for ticket in tickets if (snapshot := ticket.snapshot) is not None]
