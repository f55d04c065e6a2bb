"""The sampler: requests join and leave one decode batch between short chunks.

A step admits and cancels, prefills a bounded number of prompt tokens or decodes one chunk for every slot (both, where
there is little to prefill), and reports the requests that are done. A step takes about as long whatever is asked, so
training commands and short requests between steps never wait long.

Off CPUs it runs ahead: a step asks the devices for its chunk, and then reads the chunk of the step before. So they
compute while the host hands tokens out, answers, and waits for the next command. Last tokens stay on the devices; a
sequence that had ended is found out one chunk later, and what was decoded after its end is dropped. Where the host must
know the tokens first, because of penalties, a constraint, or a sequence that has to wait again, the chunk is read
before the next one is begun. Constrained sequences decode token by token within a step; on CPUs the others decode their
chunk beside them. What a step does follows from commands and from chunks that were read, and a chunk is
always read in the same step: so processes of a group agree.

    request --admit--> Scheduler --next_group--> prefill --join--> decode, chunk by chunk --hand_out--> result
                           '--next_short_group--> served beside the batch within one chunk --'
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, partial

import jax
import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import FSDP, cache_mesh
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.params import by_layer
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.models.vision_tower import VisionTower, image_shift
from tinkerflow.backend.compute.platforms import on_cpu, platform
from tinkerflow.backend.compute.sampler.constraints import Matcher, new_matcher
from tinkerflow.backend.compute.sampler.model import Chunk, SamplerModel
from tinkerflow.backend.compute.sampler.pages import PAGE, PagePool
from tinkerflow.backend.compute.sampler.prefill_jobs import PrefillGroup
from tinkerflow.backend.compute.sampler.programs import SamplerPrograms
from tinkerflow.backend.compute.sampler.prompt_scores import PieceScores, prompt_scores
from tinkerflow.backend.compute.sampler.requests import ActiveSequence, ParentRequest, PrefixScope
from tinkerflow.backend.compute.sampler.sampling import UniformStream
from tinkerflow.backend.compute.sampler.scheduler import Scheduler
from tinkerflow.backend.compute.sampler.shapes import make_shapes
from tinkerflow.backend.compute.sampler.snapshot_cache import SnapshotCache, usual_spec
from tinkerflow.backend.compute.sampler.stops import Decode, StopDetector, load_decode
from tinkerflow.backend.compute.warming import Program
from tinkerflow.backend.core.errors import OUT_OF_MEMORY, UserError
from tinkerflow.backend.spec.commands import (
    Candidates,
    Constraint,
    GroupConfig,
    LoraSpec,
    NewTokens,
    SampleProgress,
    SampleRequest,
    SampleResult,
    SampleStep,
)

log = logging.getLogger(__name__)

_BUDGET_PIECES = 2  # of the largest size, whose tokens one step prefills at most
_KEPT_MATCHERS = 32  # of constraints that were asked last: a grammar takes up to seconds to compile
_SHORT = 4  # sequences that are decoded beside the batch together
_FILLING_STEPS = 3  # the most steps in a row that only prefill: a fuller batch decodes for the price of this one
_WORTH = 4  # the batch waits only if at least one sequence joins for so many that are in it


class Sampler:
    """Snapshots, and the batch that samples from them and from the base model. Call it on every process alike."""

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        mesh: Mesh,
        config: GroupConfig,
        *,
        pages: int,
        states: int = 0,
        snapshot_bytes: int | None = None,
        page: int = PAGE,
        prefill_budget: int | None = None,
        tower: VisionTower | None = None,
        weights: str = "the base model",
    ) -> None:
        """An idle sampler.

        cfg, params: the base model. mesh: the devices that `params` are on. config: slots, chunk, context and the
        number of resident snapshots. pages: of each shard of the KV cache, the page of zeros included. states: how many
        sequences' states each shard holds for layers with linear attention. snapshot_bytes: how much of each device
        resident snapshots may take; None: no limit. page: positions of a page, a multiple of 32. prefill_budget: prompt
        tokens, padding included, that one step prefills; None: as many as two of the largest pieces have. tower: the
        tower of models that see images.
        weights: what `params` are, in errors.
        """
        self._weights = weights
        self._cfg, self._config = cfg, config
        sizes = platform().prefill_tokens
        self._prefill_budget = prefill_budget or _BUDGET_PIECES * sizes[-1]
        params, dtype = by_layer(cfg, params), params.embed_VD.dtype
        shards = cache_mesh(mesh, cfg.split_heads).shape[FSDP]
        self._shapes = make_shapes(max_slots=config.sample_slots, fsdp=shards, pieces=sizes, rows_are_dear=on_cpu())
        windows = {attention.window for attention in cfg.attentions}
        window = max((one for one in windows if one), default=None) if None not in windows else None
        self._pool = PagePool(pages, shards=shards, page=page, states=states, window=window)
        self._max_context = min(config.max_context, cfg.max_positions, self._pool.capacity)
        usual = usual_spec(cfg, config.expert_rank)
        self._runs_ahead = not on_cpu()  # on CPUs, decoding after an end costs more than the host's work
        self._programs = partial(
            SamplerPrograms,
            cfg,
            mesh,
            self._shapes,
            pool=self._pool,
            chunk=config.decode_chunk,
            max_context=self._max_context,
            usual=usual,
            accelerated=self._runs_ahead,
            kv_cache=config.kv_cache,
            tower=tower,
        )
        most = None if on_cpu() else config.resident_snapshots
        self.snapshots = SnapshotCache(
            cfg,
            mesh,
            dtype.name,
            by_layer=params.unstacked,
            most_resident=most,
            most_bytes=snapshot_bytes,
            usual=usual,
            plain=self._runs_ahead,
        )
        self._scheduler = Scheduler(self._shapes, config.sample_slots, self._pool)
        self._model = SamplerModel(
            cfg,
            mesh,
            params,
            self.snapshots,
            self._pool,
            chunk=config.decode_chunk,
            max_context=self._max_context,
            most_ahead=self._shapes.slots[-1] if self._runs_ahead else None,
            kv_cache=config.kv_cache,
            tower=tower,
        )
        self._matcher = lru_cache(_KEPT_MATCHERS)(self._new_matcher)
        self._asked: Chunk | None = None  # it is not read yet
        self._prefilled: PieceScores | None = None  # of the last step that only prefilled
        self._served_short = False  # in the last step
        self._filling = 0  # steps in a row that only prefilled
        self._asked_for: list[ParentRequest] = []  # whom the devices were asked for, who came last at the end
        self._failed: list[SampleResult] = []
        self._streamed: list[NewTokens] = []  # decoded in this step for requests that stream

    # ------------------------------------------------------------------ what it looks like
    @property
    def decoding(self) -> list[tuple[str, int]]:
        """The request and the number of tokens so far of every sequence in a slot, in the order of their joining."""
        return [(each.parent.request.request_id, len(each.tokens)) for each in self._scheduler.decoding]

    @property
    def pages(self) -> PagePool:
        """The pages of the KV cache."""
        return self._pool

    @property
    def requests(self) -> list[str]:
        """The ids of all requests that are on their way."""
        return self._scheduler.requests

    @property
    def room(self) -> int:
        """How many more sequences would have a slot at once."""
        return self._config.sample_slots - self._scheduler.wanted_slots()

    # ------------------------------------------------------------------ warm-up
    def programs(self) -> Iterator[Program]:
        """The programs that requests may need, whatever adapters there are."""
        return self._programs(params=self._model.params).all()

    def publishing(self, spec: LoraSpec, adapter: Lora) -> Iterator[Program]:
        """The programs that publish and sample an adapter of that shape; `adapter` needs no values."""
        return self._programs(params=self._model.params).publishing(spec, adapter)

    # ------------------------------------------------------------------ snapshots
    def publish(self, snapshot_id: str, lora: Lora, spec: LoraSpec) -> None:
        """Keep a copy of an adapter (on the devices or the host) for sampling.

        ConflictError when the id is taken; UserError when a weight is not finite.
        """
        self.snapshots.publish(snapshot_id, lora, spec)

    def holds(self, snapshot_id: str) -> bool:
        """Whether there is a snapshot of that id."""
        return snapshot_id in self.snapshots

    def host_bytes(self, snapshot_id: str) -> int | None:
        """The host memory that a snapshot takes once it is evicted from the devices; None where none is evicted."""
        return None if self.snapshots.most_resident is None else self.snapshots.find(snapshot_id).nbytes

    def move(self, snapshot_id: str, to_id: str) -> None:
        """Rename a snapshot, over the one called `to_id`: requests that sample the old `to_id` go on with this one.

        NotFoundError when there is none to rename.
        """
        self._scheduler.switch_snapshot(self.snapshots.move(snapshot_id, to_id))
        self._forget_dead_prefixes()

    def drop(self, snapshot_id: str) -> None:
        """Forget a snapshot; requests already admitted with it finish. Unknown ids are fine."""
        self.snapshots.drop(snapshot_id)
        self._forget_dead_prefixes()

    def clear(self) -> None:
        """Forget all snapshots, all requests and what was kept of their prompts; programs stay compiled."""
        self.snapshots.clear()
        self._failed, self._streamed, self._served_short = [], [], False
        self._scheduler.clear()
        self._forget_asked()
        self._model.clear()
        self._start_over()

    def use(self, load: Callable[[], Params]) -> None:
        """Sample from the weights that `load` gives, which is called when the memory of those before is free.

        Requests begin anew with the tokens that they have; nothing stays that was computed with other weights.
        """
        self._read_asked()
        self._scheduler.restart()
        self._start_anew()
        self._model.use(lambda: by_layer(self._cfg, load()))

    def _start_anew(self) -> None:
        self._filling = 0
        self._forget_asked()
        self.snapshots.reset()

    def _forget_dead_prefixes(self) -> None:
        self._pool.forget(lambda scope: not self._alive(scope))

    def _alive(self, scope: PrefixScope) -> bool:
        """Whether requests of a scope may still come: its snapshot is not dropped."""
        return self.snapshots.alive(scope.snapshot)

    # ------------------------------------------------------------------ a step
    def step(self, command: SampleStep) -> SampleProgress:
        """Admit, cancel, prefill or decode. A request that cannot be served is answered by its own `error`."""
        for request_id in command.cancel:
            self._scheduler.remove(request_id)
        for request in command.admit:
            self._admit(request)
        self._asked_for, failure, finished = [], "", list[SampleResult]()
        try:
            # Short requests served beside the batch are answered at once; the batch goes on in the next step.
            self._served_short = not self._served_short and self._serve_short()
            if not self._served_short:
                self._prefill_or_decode()
            if command.wait:
                self._read_asked()
                jax.block_until_ready(self._model.last_piece)
        except Exception as error:
            log.exception("a sample step failed")
            failure = f"{type(error).__name__}: {error}"
        if failure:  # the error is gone, and with it what its traceback held: the old cache, where the next one goes
            finished = self._scheduler.finish()
            self._fail_step(failure)
        finished += [*self._failed, *self._scheduler.finish()]
        streamed, self._failed, self._streamed = tuple(self._streamed), [], []
        if not (self._scheduler.active or self._scheduler.waiting):
            self._start_over()
        return SampleProgress(tuple(finished), self._scheduler.active, self._scheduler.waiting, streamed)

    def _fail_step(self, failure: str) -> None:
        """Answer those whose step failed: where no memory was left, who came last of them; the others wait again.

        Nobody, where all whom the devices were asked for are answered or cancelled. The cache is gone with its donated
        buffers, but not the snapshots.
        """
        if OUT_OF_MEMORY in failure:
            held = [name for one in self._asked_for if self._scheduler.holds(name := one.request.request_id)]
            text, names = "the devices had no memory left for this request beside the others", held[-1:]
            log.error("no memory was left on the devices for %s; the other requests wait again", names)
            for name in names:
                self._scheduler.remove(name)
            self._scheduler.restart()
        else:
            log.error("every request that the sampler has is answered with an error")
            text, names = "the sampler's batch failed", self._scheduler.clear()
        text += f" ({failure}); the same request may work later"
        self._failed += [SampleResult(name, error=text, category="server") for name in names]
        self._start_anew()
        self._model.clear()

    def _admit(self, request: SampleRequest) -> None:
        if self._scheduler.holds(request.request_id):
            return  # sent again: the one on its way answers both
        try:
            snapshot = None if request.snapshot_id is None else self.snapshots.find(request.snapshot_id)
            decoder = self._text if request.stop_strings else None
            matcher = self._matcher(request.owner, request.constraint) if request.constraint else None
        except UserError as error:
            self._failed.append(SampleResult(request.request_id, error=error.message))
            return
        left = self._max_context - len(request.prompt_T)
        if left < 0:
            rule = f"must be at most {self._max_context}, the capacity of the KV cache"
            text = f"prompt: {len(request.prompt_T)} tokens; {rule}"
            self._failed.append(SampleResult(request.request_id, error=text))
            return
        limit = min(request.max_tokens, max(left, 1))  # the token after a full context never enters the model
        parent = ParentRequest(request, snapshot, limit, scores=prompt_scores(request, self._cfg.vocab))
        if request.images and self._cfg.vision is not None:
            parent.shift = image_shift(self._cfg.vision, request.images)
        stops = frozenset(request.stop_tokens).union(request.constraint.ends if request.constraint else ())
        sequences = [
            ActiveSequence(
                parent,
                index,
                StopDetector(stops, request.stop_strings, decoder),
                UniformStream(request.seed, index),
                matcher=None if matcher is None else matcher.fresh(),
            )
            for index in range(request.num_samples)
        ]
        self._scheduler.admit(parent, sequences)

    @cached_property
    def _text(self) -> Decode:
        return load_decode(self._config.model_path)

    def _new_matcher(self, owner: str, constraint: Constraint) -> Matcher:
        """By owner: how long the answer takes must not tell what other owners asked."""
        return new_matcher(self._config.model_path, self._cfg.vocab, constraint)

    def _start_over(self) -> None:
        """Be idle, so that the shapes which later requests meet depend on them alone."""
        self._start_anew()
        self._scheduler.rest()

    def _forget_asked(self) -> None:
        self._asked, self._prefilled = None, None

    # ------------------------------------------------------------------ prefill, or a chunk of the batch
    def _prefill_or_decode(self) -> None:
        waited = self._filling > 0 and not self._fills_up()
        if waited or self._prefill() < self._prefill_budget:
            self._filling = 0
            self._decode()
        else:
            self._filling += 1
            self._read_asked()
            before, self._prefilled = self._prefilled, self._model.last_piece
            # A command between steps must not wait for several of them.
            jax.block_until_ready(before if self._runs_ahead else self._prefilled)

    def _fills_up(self) -> bool:
        """Whether one more step may prefill before the batch decodes: many are to join soon, or there is no batch."""
        busy, group, steps = self._scheduler.busy, self._scheduler.group, _FILLING_STEPS - self._filling
        if not busy:
            return True
        if group is not None and group.rows * group.remaining > steps * self._prefill_budget:
            return False
        joining = self._scheduler.wanted_slots() - busy
        return steps > 0 and joining * _WORTH >= busy

    def _prefill(self) -> int:
        """Compute as much of the waiting prompts as a step may: how many tokens, padded."""
        spent = 0
        while spent < self._prefill_budget and (group := self._scheduler.next_group()) is not None:
            self._asked_for = [job.parent for job in group.jobs]
            self.snapshots.use(self._scheduler.snapshots())
            while group.remaining > 0 and spent < self._prefill_budget:
                spent += self._model.prefill_piece(group)
                self._scheduler.keep_state()
            if group.remaining > 0:
                break
            self._fail_unscored(group)
            if self._scheduler.group is not None:
                self._scheduler.join(self._alive)
            if self._scheduler.group is not None:
                break  # no more free slots: the rest of the group waits
        return spent

    def _decode(self) -> None:
        """One chunk of every sequence, and as many tokens of those which the host leads one by one."""
        scheduler = self._scheduler
        self._asked_for = [sequence.parent for sequence in scheduler.decoding] or self._asked_for
        if any(sequence.needs_host for sequence in scheduler.running):
            self._read_asked()
        while not scheduler.make_room(steps := self._steps(scheduler.running)):
            self._read_asked()
        if not scheduler.running:  # a group in prefill has the pages: who was preempted begins after it
            self._read_asked()
            return
        self.snapshots.use(scheduler.snapshots())  # prefill may have given their columns to others
        running = scheduler.running
        led = self._led(running)
        self._decode_led(led, steps)
        apart = set(led)
        if others := [sequence for sequence in running if sequence not in apart]:
            self._ask(others, steps)

    def _led(self, running: list[ActiveSequence]) -> list[ActiveSequence]:
        """The sequences that decode token by token: constrained ones, whose last token decides which may be the next.

        Where a step takes as long for few rows as for many, the others go along: apart, they would take a step more.
        """
        led = [sequence for sequence in running if sequence.matcher is not None]
        return running if led and not self._shapes.rows_are_dear else led

    def _decode_led(self, led: list[ActiveSequence], steps: int) -> None:
        """`steps` tokens of each, of which every one is read before the next is asked for."""
        for _ in range(steps):
            self._constrain(led)
            led = [sequence for sequence in led if self._scheduler.expects(sequence)]
            if not led:
                return
            self._ask(led, 1)
            self._read_asked()

    def _constrain(self, led: list[ActiveSequence]) -> None:
        """Compute what each constrained sequence may say next; requests for which that is nothing are answered."""
        for sequence in led:
            if sequence.matcher is None or not self._scheduler.expects(sequence):
                continue
            try:
                sequence.matcher.advance(sequence.tokens)
            except UserError as error:
                request_id = sequence.parent.request.request_id
                self._scheduler.remove(request_id)
                self._failed.append(SampleResult(request_id, error=error.message))

    def _steps(self, running: Sequence[ActiveSequence]) -> int:
        """How many tokens to decode: up to where the first sequence reaches its limit, but half a chunk to a whole."""
        chunk = self._config.decode_chunk
        if not running:
            return 1
        remaining = [sequence.remaining for sequence in running]
        return min(chunk, max(remaining), max(min(remaining), -(-chunk // 2)))

    def _serve_short(self) -> bool:
        """Serve requests that want no more than a chunk beside the batch, unless no other is there: at most `_SHORT`.

        In the batch they would wait for a free slot, and then for a whole chunk of every sequence.
        """
        scheduler = self._scheduler
        group = scheduler.next_short_group(_SHORT, self._config.decode_chunk)
        if group is None:
            return False
        self._asked_for = [job.parent for job in group.jobs]
        self.snapshots.use(
            [*scheduler.snapshots(), *(job.parent.snapshot for job in group.jobs if job.parent.snapshot)]
        )
        while group.remaining > 0:
            self._model.prefill_piece(group)
        self._fail_unscored(group)
        if sequences := scheduler.join_beside(group):
            self._ask(sequences, max(sequence.remaining for sequence in sequences))
        return True

    # ------------------------------------------------------------------ results
    def _ask(self, sequences: Sequence[ActiveSequence], steps: int) -> None:
        """Ask the devices for `steps` tokens of every sequence, and read what they were asked for before.

        Where the sampler does not run ahead, that is read at once, too.
        """
        slots, held = self._scheduler.held(sequences)
        before, self._asked = self._asked, self._model.decode_chunk(slots, held, steps, self._asked)
        for sequence in sequences:
            sequence.ahead += steps
        if before is not None:
            self._hand_out(before)
        if not self._runs_ahead:
            self._read_asked()

    def _read_asked(self) -> None:
        """Read what the devices were asked for, if they were: no sequence has tokens that are not read yet."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._hand_out(asked)

    def _hand_out(self, chunk: Chunk) -> None:
        """Give each sequence what was decoded for it, as soon as that is there. Those that end leave."""
        decoded, steps = self._model.read(chunk), chunk.steps
        finite_CS = np.isfinite(np.asarray(decoded.logprobs_CS)[:steps])
        finite_S = np.where(finite_CS.all(axis=0), steps, finite_CS.argmin(axis=0)).tolist()  # tokens that are finite
        tokens_SC = np.asarray(decoded.tokens_CS[:steps]).T.tolist()
        logprobs_SC = np.asarray(decoded.logprobs_CS[:steps]).T.tolist()
        for slot, sequence in chunk.held:
            sequence.ahead -= steps
            if not self._scheduler.expects(sequence):
                continue  # it has ended in the chunk before, or its request is gone
            count = min(steps, sequence.parent.limit - len(sequence.tokens))
            top = None
            if sequence.parent.request.topk_sample:
                assert decoded.top_CSk is not None and decoded.top_logprobs_CSk is not None
                listed, their_logprobs = decoded.top_CSk[:count, slot], decoded.top_logprobs_CSk[:count, slot]
                top = Candidates(np.asarray(listed), np.asarray(their_logprobs))
            if finite_S[slot] < count:
                self._fail(sequence.parent)
                continue
            start = len(sequence.tokens)
            if sequence.take(tokens_SC[slot], logprobs_SC[slot], top):
                self._scheduler.end(sequence, finite=finite_S[slot] == steps)
            if sequence.parent.request.stream:
                self._streamed.append(sequence.since(start, top))

    def _fail_unscored(self, group: PrefillGroup) -> None:
        for parent in dict.fromkeys(job.parent for job in group.jobs if job.sequences):  # else it is gone, or joined
            if parent.scores is not None and not parent.scores.finite:
                self._fail(parent)

    def _fail(self, parent: ParentRequest) -> None:
        name = self._weights if parent.snapshot is None else f"snapshot {parent.snapshot.snapshot_id!r}"
        text = f"{name} gave logits that are not finite for this prompt; its weights may have diverged"
        self._scheduler.remove(parent.request.request_id, failed=True)
        self._pool.forget(lambda scope: scope == parent.scope, spoiled=True)
        self._failed.append(SampleResult(parent.request.request_id, error=text))
