"""sample: requests join a running decode batch between its chunks, and leave when they end.

Two kinds of tasks meet in a `SampleBatch`. Each request has a task, which reads the request, loads its snapshot, and
waits in the batch (`SampleBatch.decode`) until its `ended` is resolved. One loop, `SampleBatch.run`, makes steps while
there is anything to decode: a step sends waiting requests to the worker group, and ends the finished ones. The
request's task then encodes and writes the answer. When the worker group ends, all waiting requests get a
GroupFailedError. They are not answered, and the runner takes them from the journal again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from tinkerflow.backend.catalog.model_card import image_processor
from tinkerflow.backend.core import tracing
from tinkerflow.backend.core.errors import (
    GroupFailedError,
    NotFoundError,
    ServerError,
    StateLostError,
    StoreError,
    SuspectError,
    UserError,
)
from tinkerflow.backend.core.fairness import FairQueue
from tinkerflow.backend.journal import (
    AWAY,
    Outcome,
    Pending,
    SamplerLoaded,
    SamplerView,
    SequencesRecorded,
    UsageKind,
    Used,
)
from tinkerflow.backend.journal.streams import StreamedTokens, stream_name
from tinkerflow.backend.spec.checkpoint import CheckpointPath
from tinkerflow.backend.spec.commands import (
    Constraint,
    NewTokens,
    SampleProgress,
    SampleRequest,
    SampleResult,
    SampleStep,
    SnapshotHeld,
    StabilityInfo,
)
from tinkerflow.backend.spec.constraints import KEPT_CONSTRAINTS
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.wire import SampleBody, TargetTensor, encode_sample, sample_request
from tinkerflow.backend.wire.sample import answer_bytes
from tinkerflow.tasks.execution.memory_quota import BODIES, MemoryQuota
from tinkerflow.tasks.execution.operation import INLINE_BYTES, ExecutionContext, attribute_crash, failure
from tinkerflow.tasks.execution.state_transfers import drop_surplus_full_models, load_snapshot
from tinkerflow.tasks.operations.load_weights import check_readable, gone

log = logging.getLogger(__name__)

_CANCELLED = "sampling was stopped: the request has already been answered"
_IDLE_SECONDS = 0.05  # idle time, without requests and training, before a piece of an answer is prefilled
_POLL_SECONDS = 0.1  # seconds between checks whether published weights are in the store


@dataclass
class _Sample:
    """One request that was taken but not answered yet, and the parts of its body that its answer needs.

    The body itself is not kept, because its prompt is a list that takes 36 bytes for each token.

    prompt: number of tokens. targets: the request's target_prompt_logprobs. records: whether its sequences are
    recorded. ended: gets the tokens or the outcome; None before the request waits for the decode batch. joined: when it
    joined the batch. cancelled: whether the request was answered early, because its client or session ended.
    is_separate: whether it waits in a queue of its own project. Such a request does not count toward the limit of
    waiting requests.
    """

    request: Pending
    sampler: SamplerView
    prompt: int = 0
    targets: TargetTensor | None = None
    records: bool = False
    ended: asyncio.Future[SampleResult | Outcome] | None = None
    joined: datetime | None = None
    cancelled: bool = False
    is_separate: bool = False
    task: asyncio.Task[Outcome | None] = field(init=False)

    @property
    def waits(self) -> bool:
        """Whether the request waits for the decode batch, or is in the batch."""
        return self.ended is not None and not self.ended.done()

    def end(self, outcome: SampleResult | Outcome | Exception) -> None:
        """If the request still waits, let it continue: with its tokens, its outcome, or the reason why it has none."""
        if self.ended is None or self.ended.done():
            return
        if isinstance(outcome, Exception):
            self.ended.set_exception(outcome)
        else:
            self.ended.set_result(outcome)

    def check_not_cancelled(self) -> None:
        """UserError: the request was answered meanwhile."""
        if self.cancelled:
            raise UserError(_CANCELLED)


# ------------------------------------------------------------------ the requests that were taken
class SampleRequests:
    """The sampling requests of one base model that were taken from the journal and not answered yet."""

    def __init__(self, context: ExecutionContext, group: asyncio.TaskGroup, freed: Callable[[], object]) -> None:
        """Begin without requests. Tasks of `group` write answers. freed: called when a request becomes separate."""
        self.batch = SampleBatch(context, group)
        self._group = group
        self._freed = freed
        self._samples: dict[str, _Sample] = {}
        self._images, self._bodies = MemoryQuota(), MemoryQuota(BODIES)

    @property
    def ids(self) -> frozenset[str]:
        """The requests' ids."""
        return frozenset(self._samples)

    @property
    def owners(self) -> Counter[str]:
        """The number of requests of each owner."""
        return Counter(sample.request.owner for sample in self._samples.values())

    @property
    def places(self) -> int:
        """The number of requests that count toward the limit of waiting requests: all that are not separate."""
        return sum(not sample.is_separate for sample in self._samples.values())

    async def drain(self) -> None:
        """Wait until all requests are answered. The decode batch must keep running."""
        while self._samples:
            await asyncio.wait([sample.task for sample in self._samples.values()])

    def take(self, request: Pending) -> asyncio.Task[Outcome | None]:
        """Begin a request: read it, load its snapshot, let it join the batch, and answer it.

        The task returns the stored outcome, or None if the worker group ended. In that case the request is still
        pending in the journal, and can be taken again.
        """
        assert request.sampler is not None, f"request {request.id}: the journal gives samples with their sampler"
        sample = self._samples[request.id] = _Sample(request, request.sampler)
        if request.left:
            self._separate(sample)
        work = self._perform(sample)
        if request.trace is not None:
            attributes = {"request_id": request.id, "sampler_id": sample.sampler.id}
            work = tracing.inside(request.trace, work, "sample", **attributes)
        sample.task = self._group.create_task(work, name=f"sample {request.id}")
        return sample.task

    def cancel(self, request_id: str) -> None:
        """Note that the request was answered early: its client or session ended. The next step frees its slot."""
        if (sample := self._samples.get(request_id)) is not None:
            sample.cancelled = True
            self.batch.remove(sample)

    async def _perform(self, sample: _Sample) -> Outcome | None:
        request, batch = sample.request, self.batch
        operation = _SampleOperation(sample, batch, self._images, self._bodies, lambda: self._separate(sample))
        try:
            try:
                outcome = await operation.execute()
            except GroupFailedError as error:
                log.info("sample %s is executed again: %s", request.id, error)
                batch.context = batch.context.bound_to(await batch.context.pool.serving())
                return None
            except Exception as error:  # noqa: BLE001  a failure becomes a stored, named outcome
                outcome = failure(request, error)
            await batch.context.answer(replace(outcome, started_at=sample.joined))
            batch.clear_of_suspicion(request.id)
            return outcome
        finally:
            del self._samples[request.id]

    def _separate(self, sample: _Sample) -> None:
        sample.is_separate = True
        self._freed()


# ------------------------------------------------------------------ one request
class _SampleOperation:
    """One request, from its body to its outcome."""

    def __init__(
        self,
        sample: _Sample,
        batch: SampleBatch,
        images: MemoryQuota,
        bodies: MemoryQuota,
        separate: Callable[[], None],
    ) -> None:
        """images, bodies: the projects' memory quotas. separate: called when the request waits in its own project."""
        self._sample = sample
        self._batch = batch
        self._images, self._bodies = images, bodies
        self._separate = separate

    @property
    def _context(self) -> ExecutionContext:
        return self._batch.context

    async def execute(self) -> Outcome:
        """Read the request, and sample. GroupFailedError: the worker group ended meanwhile."""
        sample = self._sample
        command = await self._read()
        sample.prompt = len(command.prompt_T)
        if not command.images:
            return await self._sample_weights(command)
        self._separate()
        pixels = sum(image.pixels_HWC.size for image in command.images)
        async with self._images.reserve(sample.request.owner, pixels) as decoding:
            async with decoding:
                command = await self._read(blank=False)
            return await self._sample_weights(command)

    async def _read(self, *, blank: bool = True) -> SampleRequest:
        """Read the body into a command. blank: measure its images, but do not decode them.

        UserError: the request was answered meanwhile, so reading stopped.
        """
        request = self._sample.request
        if not request.left:
            return await self._parse(request.payload, blank)
        async with self._bodies.reserve(request.owner, request.left):
            self._sample.check_not_cancelled()
            payload = await self._context.read(self._context.journal.requests.payload, request.id)
            if payload is None:
                raise UserError(_CANCELLED)
            return await self._parse(payload, blank)

    async def _parse(self, payload: bytes, blank: bool) -> SampleRequest:
        sample, card = self._sample, self._context.card

        def processor() -> ImageProcessor | None:
            sample.check_not_cancelled()  # before every image
            return image_processor(card.path)

        def parse() -> SampleRequest:
            body = SampleBody.decode(payload)
            sample.targets, sample.records = body.target_prompt_logprobs, body.record_stability_info
            return sample_request(
                body,
                request_id=sample.request.id,
                owner=sample.request.owner,
                vocab_size=card.vocab_size,
                max_context=card.max_context,
                context_rule=card.context_rule,
                eos=card.eos_token_ids,
                processor=processor,
                blank=blank,
                routes=sample.records and self._context.routing_replay and card.experts_per_token > 0,
                supports=sample.records and self._context.support_replay,
            )

        # Checking a grammar takes longer than its size suggests, so it never runs in the event loop. The key
        # "constraint" may contain escapes.
        slow = not blank or b'"constraint"' in payload or b"\\" in payload
        if slow:
            self._separate()  # the constraint waits for its project's other checks, and then for its turn to compile
        size = INLINE_BYTES + 1 if slow else len(payload)
        return await self._context.decode(sample.request.owner, size, parse)

    async def _sample_weights(self, command: SampleRequest) -> Outcome:
        """Sample. A full-parameter model first waits until the workers' host memory has space for its weights."""
        sample, context = self._sample, self._context
        if (path := sample.sampler.model_path) is not None and CheckpointPath.parse(path).step is not None:
            await check_readable(context, sample.sampler.owner, path)  # saves the fork, so that its size is known
        if not await _is_full_model(context, sample.sampler):
            return await self._load_and_sample(command)
        self._separate()
        weights = sample.sampler.snapshot_id or sample.sampler.id
        async with context.full_models.reserve(sample.request.owner, weights):
            sample.check_not_cancelled()
            if context.snapshots.held(sample.sampler.snapshot_id) is None:
                await drop_surplus_full_models(self._context, coming=True)
            return await self._load_and_sample(command)

    async def _load_and_sample(self, command: SampleRequest) -> Outcome:
        sampler, command = self._sample.sampler, replace(command, trace=tracing.current.get())
        snapshot = sampler.snapshot_id  # None for the base model
        if sampler.model_path is not None:
            snapshot = f"{sampler.id}@{self._context.pool.generation}"
        if snapshot is None:
            return await self._batch.decode(self._sample, command)
        snapshots = self._context.snapshots
        with snapshots.using(snapshot):
            loaded = await _load_unless_there(self._context, sampler, snapshot)
            if (held := snapshots.held(snapshot)) is not None and held.on_host:
                self._context.full_models.loaded(held.host_bytes or 0)
            # The request joins the batch without an await, so it is given back if the group ends.
            outcome = await self._batch.decode(self._sample, replace(command, snapshot_id=snapshot))
            return outcome if loaded is None else replace(outcome, effects=(*outcome.effects, loaded))


# ------------------------------------------------------------------ the decode batch
class SampleBatch:
    """The decode batch of one worker group, as the engine sees it. Only `run` sends SampleSteps."""

    def __init__(self, context: ExecutionContext, group: asyncio.TaskGroup) -> None:
        """Begin with an empty batch. context: bound to the worker group. Tasks of `group` stream tokens."""
        self.context = context
        self._group = group
        self._waiting: dict[str, _Sample] = {}  # requests that wait for the batch or are in it
        self._admit: FairQueue[SampleRequest] = FairQueue()  # requests that join with the next steps
        # The constraints that the group keeps compiled, by owner, least recently used first. sampler.py has the same.
        self._compiled = OrderedDict[tuple[str, Constraint], None]()
        self._compiles = False  # whether the current step compiles a constraint
        self._compile_at = 0.0  # the event loop's time from which the next constraint may be compiled
        self._cancel: list[str] = []  # requests that leave with the next step
        self._decoding: set[str] = set()  # requests in the batch
        self._suspects: set[str] = set()  # requests of a group that crashed; each is decoded alone until it is answered
        self._has_work = asyncio.Event()
        self._answers = False  # whether the group has answers to prefill
        self._streamed: list[StreamedTokens] = []  # tokens that go into the journal with the next write
        self._streaming: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Make steps of the sampler while there is anything to decode, until cancelled."""
        while True:
            await self._step(idle=await self._wait_for_work())

    async def _wait_for_work(self) -> bool:
        """Wait for requests. Returns True if there are none, but the idle group has an answer to prefill."""
        while not (self._admit or self._cancel or self._decoding):
            self._has_work.clear()
            may_prefill = self._answers and self.context.prefill_answers
            try:
                async with asyncio.timeout(_IDLE_SECONDS if may_prefill else None):
                    await self._has_work.wait()
            except TimeoutError:
                if self.context.pool.idle:
                    return True
        return False

    async def decode(self, sample: _Sample, command: SampleRequest) -> Outcome:
        """Let a request join the batch. Returns its outcome. GroupFailedError: the worker group ended meanwhile."""
        if sample.cancelled:
            return _cancelled(sample.request)
        sample.ended = asyncio.get_running_loop().create_future()
        self._waiting[sample.request.id] = sample
        self._admit.push(command.owner, command, cost=0.0 if command.constraint is None else 1.0)
        self._has_work.set()
        try:
            ended = await sample.ended
        finally:
            del self._waiting[sample.request.id]
        if isinstance(ended, Outcome):
            return ended
        return await self.context.decode(command.owner, answer_bytes(ended), partial(_outcome, sample, ended))

    def remove(self, sample: _Sample) -> None:
        """Let a cancelled request leave the batch with the next step, or not join it."""
        if not sample.waits:
            return
        ticket = next((ticket for ticket in self._admit if ticket.item.request_id == sample.request.id), None)
        if ticket is None:
            self._cancel.append(sample.request.id)
        else:
            self._admit.withdraw(ticket)
        sample.end(_cancelled(sample.request))
        self._has_work.set()

    def clear_of_suspicion(self, request_id: str) -> None:
        """Note that the request was answered, so it did not end its worker group."""
        self._suspects.discard(request_id)

    async def _step(self, *, idle: bool) -> None:
        """Make one step of the sampler. If the group ends, all waiting requests are given back."""
        command = SampleStep(self._joining(), tuple(self._cancel), idle=idle)
        self._cancel, self._answers = [], False
        joining = {request.request_id for request in command.admit}
        for sample in self._samples_of(joining):
            sample.joined = self.context.clock.now()
        self._decoding = (self._decoding | joining) - set(command.cancel)
        began = asyncio.get_running_loop().time()
        try:
            progress = await self.context.send(command, SampleProgress)
        except GroupFailedError as error:
            await self._interrupt(error)
            return
        except Exception as error:  # noqa: BLE001  each request in the batch fails with it
            self._fail(self._decoding, error)
            self._cancel += sorted(self._decoding)  # the group may still have these requests
            self._decoding = set()
            return
        if self._compiles:
            self._pause_compiling(asyncio.get_running_loop().time() - began)
        self._answers = progress.answers
        self._stream(progress.streamed)
        for result in progress.finished:
            self._decoding.discard(result.request_id)
            if (finished := self._waiting.get(result.request_id)) is not None:
                finished.end(result)
        if not progress.active and not progress.waiting:
            self._fail(self._decoding, ServerError("the sampler no longer has this request"))
            self._decoding = set()

    def _joining(self) -> tuple[SampleRequest, ...]:
        """The requests that join the batch now. A suspect is decoded alone, and new constraints take turns."""
        if self._decoding & self._suspects:
            return ()
        suspects = [ticket for ticket in self._admit if ticket.item.request_id in self._suspects]
        if suspects and self._decoding:
            return ()
        joining = list[SampleRequest]()
        may_compile = not self._decoding or asyncio.get_running_loop().time() >= self._compile_at
        self._compiles = False
        for ticket in suspects[:1] or self._admit:
            request = ticket.item
            compiled = request.constraint is None or (request.owner, request.constraint) in self._compiled
            if not compiled and (self._compiles or not may_compile):
                continue
            self._compiles |= not compiled
            (self._admit.withdraw if compiled else self._admit.serve)(ticket)  # projects pay only for new constraints
            if request.constraint is not None:
                self._keep(request.owner, request.constraint)
            joining.append(request)
        return tuple(joining)

    def _keep(self, owner: str, constraint: Constraint) -> None:
        """Note that the group now uses this constraint, and therefore keeps it compiled for a while."""
        self._compiled[owner, constraint] = None
        self._compiled.move_to_end((owner, constraint))
        if len(self._compiled) > KEPT_CONSTRAINTS:
            self._compiled.popitem(last=False)

    def _pause_compiling(self, seconds: float) -> None:
        """Compile no constraint until every other project has had `seconds`, the duration of the compiling step."""
        others = len({sample.request.owner for sample in self._waiting.values()}) - 1
        self._compile_at = asyncio.get_running_loop().time() + seconds * others

    def _samples_of(self, request_ids: Iterable[str]) -> list[_Sample]:
        """The samples of those requests that are not answered yet."""
        return [self._waiting[request_id] for request_id in request_ids if request_id in self._waiting]

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        for sample in self._samples_of(request_ids):
            if sample.waits:
                sample.end(failure(sample.request, error))

    def _empty(self) -> None:
        """Clear the batch, and the requests that are about to join or leave it."""
        self._decoding = set()
        self._admit, self._cancel = FairQueue(), []
        self._compiled.clear()

    async def _interrupt(self, error: GroupFailedError) -> None:
        """Handle the end of the group. If it crashed, the requests in the batch become suspects."""
        executing = [sample.request for sample in self._samples_of(self._decoding)]
        failed = await attribute_crash(self.context, executing, error)
        if isinstance(error, SuspectError) and error.crashed:
            self._suspects |= {request.id for request in executing}
        for sample in self._samples_of(failed):
            sample.end(failed[sample.request.id])
        self._give_back(error)
        generation = await self.context.pool.serving()
        self._give_back(error)  # also interrupt later requests, which depend on snapshots that the group held
        self.context = self.context.bound_to(generation)

    def _give_back(self, error: GroupFailedError) -> None:
        for sample in self._waiting.values():
            sample.end(GroupFailedError(error.message))
        self._empty()

    def _stream(self, streamed: Sequence[NewTokens]) -> None:
        """Publish new tokens. Tokens decoded during one write go into the next write."""
        for tokens in streamed:
            if (sample := self._waiting.get(tokens.request_id)) is not None and not sample.cancelled:
                self._streamed.append(StreamedTokens(stream_name(sample.sampler.id, sample.request.seq_id), tokens))
        if self._streamed and (self._streaming is None or self._streaming.done()):
            self._streaming = self._group.create_task(self._write_streamed(), name="stream tokens")

    async def _write_streamed(self) -> None:
        while self._streamed:
            tokens, self._streamed = self._streamed, []
            try:
                await asyncio.to_thread(self.context.journal.streams.write, tokens)
            except (ServerError, *AWAY):
                # Listeners get the rest with the result.
                log.warning(
                    "tokens of %d samples were not streamed: the journal is unavailable", len(tokens), exc_info=True
                )


# ------------------------------------------------------------------ weights and outcomes
async def _is_full_model(context: ExecutionContext, sampler: SamplerView) -> bool:
    """Whether the sampler's weights are those of a full-parameter model."""
    if sampler.model_path is None and sampler.snapshot_id is None:
        return False
    if (held := context.snapshots.held(sampler.snapshot_id)) is not None:
        return held.on_host
    try:
        path = sampler.model_path or await _path_of_published(context, str(sampler.snapshot_id))
        state, _ = await context.in_store(context.store.stored, path, optimizer=False)
        return state.spec.full
    except (NotFoundError, StateLostError, StoreError):
        return False  # loading reports the error


async def _load_unless_there(context: ExecutionContext, sampler: SamplerView, snapshot: str) -> SamplerLoaded | None:
    """Load the sampler's snapshot unless the group holds it. Returns the update if the sampler's row names another."""

    async def load() -> SnapshotHeld:
        if sampler.model_path is None:
            return await _load_published(context, snapshot)
        await check_readable(context, sampler.owner, sampler.model_path)
        try:
            return await load_snapshot(context, snapshot, sampler.model_path)
        except NotFoundError as error:
            raise gone(sampler.model_path) from error

    await context.snapshots.load_once(snapshot, load)
    if sampler.snapshot_id != snapshot:
        return SamplerLoaded(sampler.id, snapshot)
    context.snapshots.recorded(snapshot)
    return None


def _cancelled(request: Pending) -> Outcome:
    """An outcome that no one reads: the request was already answered."""
    return request.failed(_CANCELLED, "user")


async def _load_published(context: ExecutionContext, snapshot_id: str) -> SnapshotHeld:
    """Load the weights of an unnamed save once they are committed. The group that published them has ended."""
    missed = None
    while True:
        path = await _path_of_published(context, snapshot_id)
        try:
            return await load_snapshot(context, snapshot_id, path)
        except NotFoundError:
            if path == missed:
                raise
            missed = path  # a later inflight save may have replaced it, so read the path again


async def _path_of_published(context: ExecutionContext, snapshot_id: str) -> str:
    """Wait until an unnamed save's weights are committed. Returns their path. StateLostError: they are lost."""
    recovery = context.journal.recovery
    while True:
        # The order matters: a save that is not being stored here is stored or lost before the next read.
        coming = context.saves.is_being_stored(snapshot_id) or await context.read(recovery.is_unstored, snapshot_id)
        if (stored := await context.read(recovery.sampler_snapshot, snapshot_id)) is not None:
            return stored.path
        if not coming:
            where = "its weights are in no worker group and not in the store"
            raise StateLostError(f"sampling snapshot {snapshot_id}: {where}")
        await asyncio.sleep(_POLL_SECONDS)


def _outcome(sample: _Sample, result: SampleResult) -> Outcome:
    """The answer, with its usage."""
    request = sample.request
    if result.error is not None:
        return request.failed(result.error, result.category)
    session, base = request.session_id, sample.sampler.base_model
    cached, sharing = result.prompt_cache_hit_tokens, len(result.sequences) - 1
    sampled = sum(len(sequence.tokens_T) for sequence in result.sequences)
    try:
        answer = encode_sample(result, sample.targets)
    except Exception as error:  # noqa: BLE001  such as an answer that is too large; the sampler's row is still updated
        return failure(request, error)
    outcome = request.done(
        answer,
        "proto",
        Used(session, base, UsageKind.PREFILL, sample.prompt - cached),
        Used(session, base, UsageKind.CACHED_PREFILL, cached + sharing * sample.prompt),
        Used(session, base, UsageKind.SAMPLE, sampled),
    )
    if not sample.records:
        return outcome
    sequences = tuple(
        StabilityInfo(f"{request.id}-{i}", one.tokens_T, one.logprobs_T, one.routes_Tn, base, one.supports)
        for i, one in enumerate(result.sequences)
    )
    return replace(outcome, effects=(*outcome.effects, SequencesRecorded(session, sequences)))
