"""The sampler: requests join and leave one decode batch between short chunks.

    request --admit--> Scheduler --next_group--> prefill --start_group--> decode, chunk by chunk --> result
                           '--next_short_group--> served without the batch in one chunk -----------'

`Sampler.step` executes one command. Each step admits and cancels requests, runs one step of the batch (`batch`), and
returns the results of finished requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import FSDP, cache_mesh
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.params import by_layer
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.models.vision_tower import VisionTower
from tinkerflow.backend.compute.platforms import on_cpu, platform
from tinkerflow.backend.compute.sampler.admission import Admission
from tinkerflow.backend.compute.sampler.answers import Answers
from tinkerflow.backend.compute.sampler.batch import DecodeBatch
from tinkerflow.backend.compute.sampler.chunks import ChunkPipeline
from tinkerflow.backend.compute.sampler.drafts import Drafts
from tinkerflow.backend.compute.sampler.model import SamplerModel
from tinkerflow.backend.compute.sampler.pages import PAGE, PagePool
from tinkerflow.backend.compute.sampler.programs import SamplerPrograms
from tinkerflow.backend.compute.sampler.scheduler import Scheduler
from tinkerflow.backend.compute.sampler.shapes import make_shapes
from tinkerflow.backend.compute.sampler.snapshot_cache import SnapshotCache, usual_spec
from tinkerflow.backend.compute.warming import Program
from tinkerflow.backend.core.errors import OUT_OF_MEMORY, UserError
from tinkerflow.backend.spec.commands import (
    GroupConfig,
    LoraSpec,
    SampleProgress,
    SampleRequest,
    SampleResult,
    SampleStep,
)

log = logging.getLogger(__name__)

_BUDGET_PIECES = 2  # pieces of the largest size: the most that one step prefills


class Sampler:
    """Snapshots, and the batch that samples from them and the base model. All processes must make the same calls."""

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
        """Create an idle sampler.

        cfg, params: the base model. mesh: the devices of `params`. config: slots, chunk, context and the number of
        resident snapshots. pages: of each shard of the KV cache, including the page of zeros. states: how many states
        of layers with linear attention each shard holds. snapshot_bytes: how much of each device resident snapshots may
        use; None: no limit. page: positions of a page, a multiple of 32. prefill_budget: prompt tokens, including
        padding, that one step prefills; None: the tokens of two of the largest pieces. tower: for models with images.
        weights: names `params` in errors.
        """
        self._cfg, self._config = cfg, config
        sizes = platform().prefill_tokens
        params, dtype = by_layer(cfg, params), params.embed_VD.dtype
        shards = cache_mesh(mesh, cfg.split_heads).shape[FSDP]
        invariant = config.batch_invariant
        shapes = make_shapes(config.sample_slots, shards, sizes, rows_are_dear=on_cpu(), invariant=invariant)
        self.pages = PagePool(pages, shards=shards, page=page, states=states, window=_widest_window(cfg))
        max_context = min(config.max_context, cfg.max_positions, self.pages.capacity)
        usual = usual_spec(cfg, config.expert_rank)
        host_decides = platform().host_decides
        runs_ahead = not on_cpu()  # on CPUs, decoding beyond an end costs more than the host's work
        self._programs = partial(
            SamplerPrograms,
            cfg,
            mesh,
            shapes,
            pool=self.pages,
            chunk=config.decode_chunk,
            max_context=max_context,
            usual=usual,
            accelerated=runs_ahead,
            host_decides=host_decides,
            kv_cache=config.kv_cache,
            routes=config.routing_replay and bool(cfg.experts),
            supports=config.support_replay,
            tower=tower,
        )
        self.snapshots = SnapshotCache(
            cfg,
            mesh,
            dtype.name,
            by_layer=params.unstacked,
            most_resident=None if on_cpu() else config.resident_snapshots,
            most_bytes=snapshot_bytes,
            usual=usual,
            plain=runs_ahead,
            invariant=invariant,
        )
        self._scheduler = Scheduler(shapes, config.sample_slots, self.pages, self.snapshots.fits)
        self._model = SamplerModel(
            cfg,
            mesh,
            params,
            self.snapshots,
            self.pages,
            chunk=config.decode_chunk,
            max_context=max_context,
            host_decides=host_decides,
            most_ahead=shapes.slots[-1] if runs_ahead else None,
            kv_cache=config.kv_cache,
            tower=tower,
        )
        # Neither linear attention nor an unread dispatch can return to the state before a wrong draft.
        may_draft = config.drafts and not states and not runs_ahead
        self.drafts = Drafts(shapes, self.pages) if may_draft else None
        self._answers = Answers(self.pages, shapes)
        shared = self._scheduler, self._model, self.pages, shapes
        self._chunks = ChunkPipeline(
            *shared, self._answers, self.drafts, runs_ahead=runs_ahead, host_decides=host_decides, weights=weights
        )
        self._batch = DecodeBatch(
            *shared,
            self._chunks,
            self._answers,
            self.drafts,
            prefill_budget=prefill_budget or _BUDGET_PIECES * sizes[-1],
            runs_ahead=runs_ahead,
            host_decides=host_decides,
        )
        self.admission = Admission(cfg, config.model_path, self.snapshots, max_context=max_context)

    # ------------------------------------------------------------------ what it holds
    @property
    def decoding(self) -> list[tuple[str, int]]:
        """The request and the number of tokens so far of every sequence in a slot, in the order of joining."""
        return [(each.parent.id, len(each.tokens)) for each in self._scheduler.slots.sequences]

    @property
    def request_ids(self) -> list[str]:
        return self._scheduler.request_ids

    @property
    def free_slots(self) -> int:
        """How many more sequences would get a slot immediately."""
        return self._config.sample_slots - self._scheduler.wanted_slots()

    # ------------------------------------------------------------------ warm-up
    def programs(self) -> Iterator[Program]:
        """The programs that requests may need, except those that depend on adapters."""
        return self._programs(params=self._model.params).all()

    def publishing_programs(self, spec: LoraSpec, adapter: Lora) -> Iterator[Program]:
        return self._programs(params=self._model.params).publishing(spec, adapter)

    # ------------------------------------------------------------------ snapshots
    def publish(self, snapshot_id: str, lora: Lora, spec: LoraSpec, step: int = 0) -> None:
        """Keep a copy of an adapter (on the devices or the host), after `step` optimizer steps, for sampling.

        ConflictError: the id is used. UserError: a weight is not finite.
        """
        self.snapshots.publish(snapshot_id, lora, spec, step)

    def snapshot_host_bytes(self, snapshot_id: str) -> int | None:
        """The host memory of a snapshot after its eviction from the devices; None if snapshots are never evicted."""
        return None if self.snapshots.most_resident is None else self.snapshots.find(snapshot_id).nbytes

    def rename_snapshot(self, snapshot_id: str, to_id: str, *, recompute: bool = False) -> None:
        """Rename a snapshot, replacing any snapshot `to_id`. Requests for the old `to_id` continue with this one.

        recompute: whether to recompute their keys and values. If the last tokens of the old weights cannot be read,
        the requests fail as in a step. NotFoundError: there is no snapshot to rename.
        """
        if failure := _failure_of(self._chunks.read_in_flight):  # these tokens come from the old weights
            self._fail_step(failure)
        self._scheduler.switch_snapshot(self.snapshots.rename(snapshot_id, to_id), recompute=recompute)
        self._drop_dead_prefixes()

    def drop_snapshot(self, snapshot_id: str) -> None:
        """Forget a snapshot. Requests that were admitted with it finish. Unknown ids are ignored."""
        self.snapshots.drop(snapshot_id)
        self._drop_dead_prefixes()

    def _drop_dead_prefixes(self) -> None:
        for drop in (self.pages.drop_keys, self._answers.drop):
            drop(lambda scope: not self._chunks.scope_is_alive(scope))

    def clear(self) -> None:
        """Forget all snapshots, requests and cached prompts. Programs stay compiled."""
        self.snapshots.clear()
        self._scheduler.clear()
        self._batch.clear()
        self._model.reset_cache()
        self._become_idle()

    def replace_weights(self, load: Callable[[], Params], step: int) -> None:
        """Sample from the weights that `load` returns, after `step` optimizer steps. The old weights are freed first.

        Requests begin again with the tokens that they have. All results of other weights are dropped.
        """
        self._chunks.read_in_flight()
        self.admission.base.step = step
        self._scheduler.requeue_all()
        self._forget_dispatches()
        self._model.replace_params(lambda: by_layer(self._cfg, load()))

    # ------------------------------------------------------------------ a step
    def step(self, command: SampleStep) -> SampleProgress:
        """Admit, cancel, prefill or decode. A request that cannot be served is answered with its own `error`.

        If the command finds the sampler idle, prefill a piece of an answer for the prefix cache.
        """
        batch, chunks, scheduler = self._batch, self._chunks, self._scheduler
        for request_id in command.cancel:
            scheduler.remove_request(request_id)
        for request in command.admit:
            self._admit(request)
        batch.dispatched, finished = [], list[SampleResult]()
        idle = command.idle and not (scheduler.active or scheduler.waiting)
        if failure := _failure_of(batch.prefill_answer if idle else partial(batch.run_step, wait=command.wait)):
            finished = scheduler.pop_finished()
            self._fail_step(failure)
        finished += [*chunks.failed, *scheduler.pop_finished()]
        streamed, chunks.failed, chunks.streamed = tuple(chunks.streamed), [], []
        if not (scheduler.active or scheduler.waiting):
            self._become_idle()
        return SampleProgress(tuple(finished), scheduler.active, scheduler.waiting, streamed, self._answers.waiting)

    def _fail_step(self, failure: str) -> None:
        """Fail the requests of a failed step. If memory ran out, only the newest request fails, and the others wait
        again.

        No request fails if all requests of the dispatch are answered or cancelled. The cache is lost with its donated
        buffers. The snapshots are kept.
        """
        if OUT_OF_MEMORY in failure:
            failed = [parent.id for parent in self._batch.dispatched if self._scheduler.has_request(parent.id)][-1:]
            text = "the devices had no memory left for this request and the others"
            log.error("no memory was left on the devices for %s; the other requests wait again", failed)
            for request_id in failed:
                self._scheduler.remove_request(request_id)
            self._scheduler.requeue_all()
        else:
            log.error("every request of the sampler is answered with an error")
            text, failed = "the sampler's batch failed", self._scheduler.clear()
        self._answers.clear()
        text += f" ({failure}); the same request may work later"
        self._chunks.failed += [SampleResult(request_id, error=text, category="server") for request_id in failed]
        self._forget_dispatches()
        self._model.reset_cache()

    def _admit(self, request: SampleRequest) -> None:
        if self._scheduler.has_request(request.request_id):
            return  # sent twice: a single result answers both requests
        try:
            parent, sequences = self.admission.begin(request)
        except UserError as error:
            self._chunks.failed.append(SampleResult(request.request_id, error=error.message))
            return
        self._scheduler.admit(parent, sequences)
        self._answers.turn(parent)

    def _become_idle(self) -> None:
        """Reset all state that depends on past requests, so that the shapes of later requests do not depend on them."""
        self._forget_dispatches()
        self._scheduler.reset_shares()

    def _forget_dispatches(self) -> None:
        self._batch.forget_dispatches()
        self.snapshots.reset_stack()


def _widest_window(cfg: ModelConfig) -> int | None:
    windows = {attention.window for attention in cfg.attentions}
    return max((each for each in windows if each), default=None) if None not in windows else None


def _failure_of(work: Callable[[], object]) -> str:
    """The error of `work` as text, or "". The error itself is dropped: its traceback keeps the old KV cache alive."""
    try:
        work()
    except Exception as error:
        log.exception("a sample step failed")
        return f"{type(error).__name__}: {error}"
    return ""
