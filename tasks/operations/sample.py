"""sample: requests join a running decode batch between its chunks, and leave as they end.

Two loops meet in a SampleBatch. Each request has a task (`_perform`): it reads the request, has the snapshot loaded,
puts its command into `_admit`, and waits until its `ended` is resolved. One loop, `decode`, makes a step as long as
there is something to decode: a step sends what is in `_admit` to the worker group, and ends the requests that finished.
The task then writes the answer. When the worker group ends, all that wait get a GroupFailedError: nothing is answered,
and the runner takes the requests from the journal again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

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
from tinkerflow.backend.spec.commands import (
    NewTokens,
    SampleProgress,
    SampleRequest,
    SampleResult,
    SampleStep,
    SnapshotHeld,
    StabilityInfo,
)
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.wire import SampleBody, TargetTensor, encode_sample, sample_request
from tinkerflow.tasks.execution.operation import INLINE_BYTES, ExecutionContext, attribute_crash, failure
from tinkerflow.tasks.execution.project_room import BODIES, ProjectRoom
from tinkerflow.tasks.execution.state_transfers import load_snapshot, make_room_for_whole
from tinkerflow.tasks.operations.load_weights import check_readable, gone

log = logging.getLogger(__name__)

_STOPPED = "sampling was stopped: the request was answered already"
_LOOK_SECONDS = 0.1  # between looks whether published weights are in the store


@dataclass
class _Sample:
    """One request that was taken and not answered yet, and what its answer needs of its body.

    The body itself goes: its prompt is a list of 36 bytes for each token. prompt: how many tokens. targets: its
    target_prompt_logprobs. records: whether its sequences are recorded. ended: resolved with its outcome; None before
    it waits for the decode batch. joined: when it joined that. stopped: somebody else has answered it. apart: it waits
    or waited for its own project's requests (`ProjectRoom`), and holds no place in the line of all.
    """

    request: Pending
    sampler: SamplerView
    prompt: int = 0
    targets: TargetTensor | None = None
    records: bool = False
    ended: asyncio.Future[Outcome] | None = None
    joined: datetime | None = None
    stopped: bool = False
    apart: bool = False
    task: asyncio.Task[Outcome | None] = field(init=False)

    @property
    def waits(self) -> bool:
        """Whether it waits for the decode batch, or is in it."""
        return self.ended is not None and not self.ended.done()

    def end(self, outcome: Outcome | Exception) -> None:
        """Let it go on with its outcome, or with why there is none, if it still waits."""
        if self.ended is None or self.ended.done():
            return
        if isinstance(outcome, Outcome):
            self.ended.set_result(outcome)
        else:
            self.ended.set_exception(outcome)


class SampleBatch:
    """The decode batch of one worker group, as the engine sees it. Only `decode` sends SampleSteps."""

    def __init__(self, context: ExecutionContext, group: asyncio.TaskGroup, freed: Callable[[], object]) -> None:
        """Empty. Answers are written by tasks of `group`, beside the decoding. freed: called when a sample is apart."""
        self._context = context
        self._group = group
        self._freed = freed
        self._samples: dict[str, _Sample] = {}
        self._admit: list[SampleRequest] = []  # they join with the next step
        self._cancel: list[str] = []  # they leave with the next step
        self._decoding: set[str] = set()  # in the decode batch
        self._suspects: set[str] = set()  # a group ended with them: they are decoded alone until they are answered
        self._some = asyncio.Event()
        self._streamed: list[StreamedTokens] = []  # they go into the journal with the next write
        self._telling: asyncio.Task[None] | None = None
        self._images, self._bodies = ProjectRoom(), ProjectRoom(BODIES)

    @property
    def requests(self) -> frozenset[str]:
        """Ids of the requests that were taken and not answered yet."""
        return frozenset(self._samples)

    @property
    def owners(self) -> Counter[str]:
        """How many of these each owner has."""
        return Counter(sample.request.owner for sample in self._samples.values())

    @property
    def in_line(self) -> int:
        """How many of these hold a place in the line of all: none that has images or a long body (`_Sample.apart`)."""
        return sum(not sample.apart for sample in self._samples.values())

    async def decode(self) -> None:
        """Step after step, as long as there is something to do; never returns."""
        while True:
            while not (self._admit or self._cancel or self._decoding):
                self._some.clear()
                await self._some.wait()
            await self._step()

    async def drain(self) -> None:
        """Wait until everything that was taken is answered; `decode` must go on."""
        while self._samples:
            await asyncio.wait([sample.task for sample in self._samples.values()])

    def take(self, request: Pending) -> asyncio.Task[Outcome | None]:
        """Begin with a request: check it, have its snapshot loaded, let it join. The task's result is stored.

        None: the worker group ended; the request is still pending in the journal, and can be taken again.
        """
        assert request.sampler is not None, f"request {request.id}: the journal gives samples with their sampler"
        sample = self._samples[request.id] = _Sample(request, request.sampler)
        if request.left:
            self._set_apart(sample)
        work = self._perform(sample)
        if request.trace is not None:
            named = {"request_id": request.id, "sampler_id": sample.sampler.id}
            work = tracing.inside(request.trace, work, "sample", **named)
        sample.task = self._group.create_task(work, name=f"sample {request.id}")
        return sample.task

    def cancel(self, request_id: str) -> None:
        """The request was answered by somebody else (cancelled, or its session ended): the next step frees its place.

        What was not taken here, or has ended, is passed over.
        """
        if (sample := self._samples.get(request_id)) is None:
            return
        sample.stopped = True
        if not sample.waits:
            return  # it did not join yet, and will not; or it is leaving
        joining = [one for one in self._admit if one.request_id != request_id]
        if len(joining) == len(self._admit):
            self._cancel.append(request_id)
        self._admit = joining
        sample.end(_stopped(sample.request))
        self._some.set()

    async def _step(self) -> None:
        """One step of the sampler. When the group ends, all that were taken are given back."""
        command = SampleStep(self._joining(), tuple(self._cancel))
        self._cancel = []
        joining = {request.request_id for request in command.admit}
        for sample in self._of(joining):
            sample.joined = self._context.clock.now()
        self._decoding = (self._decoding | joining) - set(command.cancel)
        try:
            progress = await self._context.send(command, SampleProgress)
        except GroupFailedError as error:
            await self._interrupt(error)
            return
        except Exception as error:  # noqa: BLE001  each of them is told
            self._fail(self._samples, error)
            self._empty()
            return
        self._tell(progress.streamed)
        for result in progress.finished:
            self._decoding.discard(result.request_id)
            if (finished := self._samples.get(result.request_id)) is not None:
                finished.end(_outcome(finished, result))
        if not progress.active and not progress.waiting:
            self._fail(self._decoding, ServerError("the sampler does not know this request any more"))
            self._decoding = set()

    def _tell(self, streamed: Sequence[NewTokens]) -> None:
        """Let whoever listens have new tokens. What is decoded during one write goes into the next."""
        for tokens in streamed:
            if (sample := self._samples.get(tokens.request_id)) is not None and not sample.stopped:
                self._streamed.append(StreamedTokens(stream_name(sample.sampler.id, sample.request.seq_id), tokens))
        if self._streamed and (self._telling is None or self._telling.done()):
            self._telling = self._group.create_task(self._write_streamed(), name="stream tokens")

    async def _write_streamed(self) -> None:
        while self._streamed:
            tokens, self._streamed = self._streamed, []
            try:
                await asyncio.to_thread(self._context.journal.streams.write, tokens)
            except (ServerError, *AWAY):
                # Nothing is lost: listeners get the rest with the result.
                log.warning("tokens of %d samples were not streamed: the journal is away", len(tokens), exc_info=True)

    def _of(self, request_ids: Iterable[str]) -> list[_Sample]:
        """The samples of these requests, without those that are answered."""
        return [self._samples[request_id] for request_id in request_ids if request_id in self._samples]

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        for sample in self._of(request_ids):
            if sample.waits:
                sample.end(failure(sample.request, error))

    def _empty(self) -> None:
        """Nothing is in the decode batch, or about to join or leave it."""
        self._decoding = set()
        self._admit, self._cancel = [], []

    def _joining(self) -> tuple[SampleRequest, ...]:
        """Who joins the batch now: all that wait; but a suspect only when it is alone, and while it is, nobody."""
        if self._decoding & self._suspects:
            return ()
        if not any(request.request_id in self._suspects for request in self._admit):
            joining, self._admit = tuple(self._admit), []
            return joining
        if self._decoding:
            return ()
        suspect = next(request for request in self._admit if request.request_id in self._suspects)
        self._admit.remove(suspect)
        return (suspect,)

    async def _interrupt(self, error: GroupFailedError) -> None:
        """The group ended. Whoever it was decoding is under suspicion when it crashed."""
        executing = [sample.request for sample in self._of(self._decoding)]
        failed = await attribute_crash(self._context, executing, error)
        if isinstance(error, SuspectError) and error.crashed:
            self._suspects |= {request.id for request in executing}
        for sample in self._of(failed):
            sample.end(failed[sample.request.id])
        self._give_back(error)
        generation = await self._context.pool.serving()
        self._give_back(error)  # also who came meanwhile, and counts on what the group had
        self._context = self._context.bound_to(generation)

    def _give_back(self, error: GroupFailedError) -> None:
        for sample in self._samples.values():
            sample.end(GroupFailedError(error.message))
        self._empty()

    async def _perform(self, sample: _Sample) -> Outcome | None:
        request = sample.request
        try:
            try:
                outcome = await self._decode(sample)
            except GroupFailedError as error:
                log.info("sample %s is taken again: %s", request.id, error)
                self._context = self._context.bound_to(await self._context.pool.serving())
                return None
            except Exception as error:  # noqa: BLE001  a failure becomes a stored, named outcome
                outcome = failure(request, error)
            await self._context.answer(replace(outcome, started_at=sample.joined))
            self._suspects.discard(request.id)
            return outcome
        finally:
            del self._samples[request.id]

    async def _decode(self, sample: _Sample) -> Outcome:
        wanted = await self._read(sample)
        sample.prompt = len(wanted.prompt_T)
        if not wanted.images:
            return await self._join(sample, wanted)
        self._set_apart(sample)
        pixels = sum(image.pixels_HWC.size for image in wanted.images)
        async with self._images.hold(sample.request.owner, pixels) as decoding:
            async with decoding:
                wanted = await self._read(sample, blank=False)
            return await self._join(sample, wanted)

    def _set_apart(self, sample: _Sample) -> None:
        sample.apart = True
        self._freed()

    async def _read(self, sample: _Sample, *, blank: bool = True) -> SampleRequest:
        """The command that the body asks for. blank: its images are measured and not decoded.

        UserError when somebody else has answered the request, of which no more is read then.
        """
        request = sample.request
        if not request.left:
            return await self._parse(sample, request.payload, blank)
        async with self._bodies.hold(request.owner, request.left):
            _check_going_on(sample)
            payload = await self._context.read(self._context.journal.requests.payload, request.id)
            if payload is None:
                raise UserError(_STOPPED)
            return await self._parse(sample, payload, blank)

    async def _parse(self, sample: _Sample, payload: bytes, blank: bool) -> SampleRequest:
        request, card = sample.request, self._context.card

        def processor() -> ImageProcessor | None:
            _check_going_on(sample)  # before every image
            return image_processor(card.path)

        def parse() -> SampleRequest:
            body = SampleBody.decode(payload)
            sample.targets, sample.records = body.target_prompt_logprobs, body.record_stability_info
            return sample_request(
                body,
                request_id=request.id,
                owner=request.owner,
                vocab_size=card.vocab_size,
                max_context=card.max_context,
                context_rule=card.context_rule,
                eos=card.eos_token_ids,
                processor=processor,
                blank=blank,
            )

        # A grammar takes longer to check than its bytes tell: never on the loop. A name may be written with escapes.
        slow = not blank or b'"constraint"' in payload or b"\\" in payload
        return await self._context.decode(INLINE_BYTES + 1 if slow else len(payload), parse)

    async def _join(self, sample: _Sample, wanted: SampleRequest) -> Outcome:
        request, sampler = sample.request, sample.sampler
        if not await _is_whole(self._context, sampler):
            return await self._join_with_weights(sample, wanted)
        self._set_apart(sample)
        async with self._context.whole_turns.hold(request.owner, sampler.snapshot_id or sampler.id):
            _check_going_on(sample)
            if self._context.snapshots.held(sampler.snapshot_id) is None:
                await make_room_for_whole(self._context, coming=True)
            return await self._join_with_weights(sample, wanted)

    async def _join_with_weights(self, sample: _Sample, wanted: SampleRequest) -> Outcome:
        sampler, wanted = sample.sampler, replace(wanted, trace=tracing.current.get())
        snapshot = sampler.snapshot_id  # None: the base model
        if sampler.model_path is not None:
            snapshot = f"{sampler.id}@{self._context.pool.generation}"
        if snapshot is None:
            return await self._sample(sample, wanted)
        with self._context.snapshots.using(snapshot):
            loaded = await _load_unless_there(self._context, sampler, snapshot)
            if (held := self._context.snapshots.held(snapshot)) is not None and held.on_host:
                self._context.whole_turns.loaded(held.host_bytes or 0)
            # Nothing is awaited from here until it waits for its slot: a group that ends gives it back.
            outcome = await self._sample(sample, replace(wanted, snapshot_id=snapshot))
            return outcome if loaded is None else replace(outcome, effects=(*outcome.effects, loaded))

    async def _sample(self, sample: _Sample, wanted: SampleRequest) -> Outcome:
        if sample.stopped:
            return _stopped(sample.request)
        sample.ended = asyncio.get_running_loop().create_future()
        self._admit.append(wanted)
        self._some.set()
        return await sample.ended


async def _is_whole(context: ExecutionContext, sampler: SamplerView) -> bool:
    """Whether all parameters of what it samples were trained."""
    if sampler.model_path is None and sampler.snapshot_id is None:
        return False
    if (held := context.snapshots.held(sampler.snapshot_id)) is not None:
        return held.on_host
    try:
        path = sampler.model_path or await _path_of_published(context, str(sampler.snapshot_id))
        state, _ = await asyncio.to_thread(context.store.stored, path, optimizer=False)
        return state.spec.full
    except (NotFoundError, StateLostError, StoreError):
        return False  # loading says what is wrong


async def _load_unless_there(context: ExecutionContext, sampler: SamplerView, snapshot: str) -> SamplerLoaded | None:
    """Have the worker group hold the sampler's snapshot; the change of the sampler's row when it has another one."""

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


def _stopped(request: Pending) -> Outcome:
    """What nobody reads: the request was answered before."""
    return request.failed(_STOPPED, "user")


def _check_going_on(sample: _Sample) -> None:
    """UserError when somebody else has answered the request."""
    if sample.stopped:
        raise UserError(_STOPPED)


async def _load_published(context: ExecutionContext, snapshot_id: str) -> SnapshotHeld:
    """Load what an unnamed save has committed, or will: the group that it was published in is gone."""
    missed = None
    while True:
        path = await _path_of_published(context, snapshot_id)
        try:
            return await load_snapshot(context, snapshot_id, path)
        except NotFoundError:
            if path == missed:
                raise
            missed = path  # maybe a later inflight save took its place, and it was deleted: look again


async def _path_of_published(context: ExecutionContext, snapshot_id: str) -> str:
    """Where an unnamed save has committed, once it has; StateLostError when it never will."""
    recovery = context.journal.recovery
    while True:
        # First: once it is not coming, it is stored, or lost.
        coming = context.saves.is_being_stored(snapshot_id) or await context.read(recovery.is_unstored, snapshot_id)
        if (stored := await context.read(recovery.sampler_snapshot, snapshot_id)) is not None:
            return stored.path
        if not coming:
            where = "its weights are in no worker group and not in the store"
            raise StateLostError(f"sampling snapshot {snapshot_id}: {where}")
        await asyncio.sleep(_LOOK_SECONDS)


def _outcome(sample: _Sample, result: SampleResult) -> Outcome:
    """The answer, and what it used."""
    request = sample.request
    if result.error is not None:
        return request.failed(result.error, result.category)
    session, base = request.session_id, sample.sampler.base_model
    cached, sharing = result.prompt_cache_hit_tokens, len(result.sequences) - 1
    sampled = sum(len(sequence.tokens_T) for sequence in result.sequences)
    outcome = request.done(
        encode_sample(result, sample.targets),
        "proto",
        Used(session, base, UsageKind.PREFILL, sample.prompt - cached),
        Used(session, base, UsageKind.CACHED_PREFILL, cached + sharing * sample.prompt),
        Used(session, base, UsageKind.SAMPLE, sampled),
    )
    if not sample.records:
        return outcome
    sequences = tuple(
        StabilityInfo(f"{request.id}-{i}", sequence.tokens_T, sequence.logprobs_T)
        for i, sequence in enumerate(result.sequences)
    )
    return replace(outcome, effects=(*outcome.effects, SequencesRecorded(session, sequences)))
