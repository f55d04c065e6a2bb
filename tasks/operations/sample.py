"""sample: requests join a running decode batch between its chunks, and leave as they end.

Two loops meet in a SampleBatch. Each request has a task (`_perform`): it decodes the request, has the snapshot loaded,
puts its command into `_admit`, and waits for a future in `_answers`. One loop, driven by the sampling runner, calls
`step` as long as there is something to decode: a step sends what is in `_admit` to the worker group, and resolves the
futures of the requests that finished. The task then writes the answer. When the worker group ends, every future gets a
GroupFailedError: nothing is answered, and the runner takes the requests from the journal again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tinkerflow.backend.commands import (
    LoadSnapshot,
    SampleProgress,
    SampleRequest,
    SampleResult,
    SampleStep,
    SnapshotHeld,
    StabilityInfo,
)
from tinkerflow.backend.errors import GroupFailedError, NotFoundError, ServerError, StateLostError, SuspectError
from tinkerflow.backend.journal import Outcome, Pending, SamplerLoaded, SamplerView, SequencesRecorded, UsageKind, Used
from tinkerflow.backend.wire import SampleBody, TargetTensor, encode_sample, sample_request
from tinkerflow.tasks.execution.context import ExecutionContext
from tinkerflow.tasks.execution.crashes import attribute_crash
from tinkerflow.tasks.execution.operation import failure
from tinkerflow.tasks.operations.load_weights import read_checkpoint

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1  # between looks whether published weights are in the store


class _Asked(NamedTuple):
    """What the answer needs of a request's body, which itself goes: its prompt is a list of 36 bytes for each token.

    prompt: the tokens of the prompt. targets: its target_prompt_logprobs. records: whether its sequences are recorded.
    """

    prompt: int
    targets: TargetTensor | None
    records: bool


class SampleBatch:
    """The decode batch of one worker group, as the engine sees it. Only `step` sends SampleSteps."""

    def __init__(self, context: ExecutionContext, group: asyncio.TaskGroup) -> None:
        """Empty. Answers are written by tasks of `group`, beside the decoding."""
        self._context = context
        self._group = group
        self._requests: dict[str, Pending] = {}  # taken and not answered yet
        self._answers: dict[str, asyncio.Future[Outcome]] = {}  # of those that wait for the decode batch
        self._asked: dict[str, _Asked] = {}
        self._joined: dict[str, datetime] = {}  # when they joined the decode batch
        self._admit: list[SampleRequest] = []  # they join with the next step
        self._cancel: list[str] = []  # they leave with the next step
        self._decoding: set[str] = set()  # in the decode batch
        self._stopped: set[str] = set()  # answered by somebody else
        self._performing: set[asyncio.Task[Outcome | None]] = set()
        self._suspects: set[str] = set()  # a group ended with them: they are decoded alone
        self._some = asyncio.Event()

    @property
    def requests(self) -> frozenset[str]:
        """Ids of the requests that were taken and not answered yet."""
        return frozenset(self._requests)

    @property
    def owners(self) -> Counter[str]:
        """How many of these each owner has."""
        return Counter(request.owner for request in self._requests.values())

    @property
    def busy(self) -> bool:
        """Whether a step would have something to do."""
        return bool(self._admit or self._cancel or self._decoding)

    async def wait(self) -> None:
        """Wait until a step would have something to do."""
        while not self.busy:
            self._some.clear()
            await self._some.wait()

    async def drain(self) -> None:
        """Wait until everything that was taken is answered; somebody must go on calling `step`."""
        while self._performing:
            await asyncio.wait(self._performing)

    def take(self, request: Pending) -> asyncio.Task[Outcome | None]:
        """Begin with a request: check it, have its snapshot loaded, let it join. The task's result is stored.

        None: the worker group ended; the request is still pending in the journal, and can be taken again.
        """
        self._requests[request.id] = request
        task = self._group.create_task(self._perform(request), name=f"sample {request.id}")
        self._performing.add(task)
        task.add_done_callback(self._performing.discard)
        return task

    def cancel(self, request_id: str) -> None:
        """The request was answered by somebody else (cancelled, or its session ended): the next step frees its place.

        What was not taken here, or has ended, is passed over.
        """
        if request_id not in self._requests:
            return
        self._stopped.add(request_id)
        answered = self._answers.get(request_id)
        if answered is None or answered.done():
            return  # it did not join yet, and will not; or it is leaving
        joining = [one for one in self._admit if one.request_id != request_id]
        if len(joining) == len(self._admit):
            self._cancel.append(request_id)
        self._admit = joining
        self._end(_stopped(self._requests[request_id]))
        self._some.set()

    async def step(self) -> None:
        """One step of the sampler. When the group ends, all that were taken are given back."""
        command = SampleStep(self._joining(), tuple(self._cancel))
        self._cancel = []
        self._decoding |= {request.request_id for request in command.admit}
        self._joined |= dict.fromkeys((one.request_id for one in command.admit), self._context.clock.now())
        self._decoding -= set(command.cancel)
        try:
            progress = await self._context.send(command, SampleProgress)
        except GroupFailedError as error:
            await self._interrupt(error)
            return
        except Exception as error:  # noqa: BLE001  each of them is told
            self._fail(self._answers, error)
            self._decoding = set()
            self._admit, self._cancel = [], []
            return
        for result in progress.finished:
            self._decoding.discard(result.request_id)
            if (request := self._requests.get(result.request_id)) is not None:
                self._end(_outcome(request, self._asked[request.id], result))
        if not progress.active and not progress.waiting:
            self._fail(self._decoding, ServerError("the sampler does not know this request any more"))
            self._decoding = set()

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
        executing = [self._requests[request_id] for request_id in self._decoding if request_id in self._requests]
        failed = await attribute_crash(self._context, executing, error)
        if isinstance(error, SuspectError) and error.crashed:
            self._suspects |= {request.id for request in executing}
        for outcome in failed.values():
            self._end(outcome)
        self._give_back(error)
        generation = await self._context.pool.serving()
        self._give_back(error)  # also who came meanwhile, and counts on what the group had
        self._context = self._context.bound_to(generation)

    def _give_back(self, error: GroupFailedError) -> None:
        for ended in self._answers.values():
            if not ended.done():
                ended.set_exception(GroupFailedError(error.message))
        self._decoding = set()
        self._admit, self._cancel = [], []

    async def _perform(self, request: Pending) -> Outcome | None:
        try:
            try:
                outcome = await self._decode(request)
            except GroupFailedError as error:
                log.info("sample %s is taken again: %s", request.id, error)
                self._context = self._context.bound_to(await self._context.pool.serving())
                return None
            except Exception as error:  # noqa: BLE001  a failure becomes a stored, named outcome
                outcome = failure(request, error)
            await self._context.answer(replace(outcome, started_at=self._joined.get(request.id)))
            return outcome
        finally:
            self._answers.pop(request.id, None)
            self._asked.pop(request.id, None)
            self._joined.pop(request.id, None)
            self._requests.pop(request.id, None)
            self._stopped.discard(request.id)

    async def _decode(self, request: Pending) -> Outcome:
        sampler, card = request.sampler, self._context.card
        assert sampler is not None, f"request {request.id}: the journal gives samples with their sampler"

        def decode() -> tuple[_Asked, SampleRequest]:
            body = SampleBody.decode(request.payload)
            command = sample_request(
                body,
                request_id=request.id,
                owner=request.owner,
                snapshot_id=None,
                vocab_size=card.vocab_size,
                max_context=card.max_context,
                eos=card.eos_token_ids,
            )
            return _Asked(len(command.prompt_T), body.target_prompt_logprobs, body.record_stability_info), command

        self._asked[request.id], wanted = await self._context.decode(len(request.payload), decode)
        if (snapshot := _snapshot(self._context, sampler)) is None:
            return await self._sample(request, wanted)
        with self._context.snapshots.using(snapshot):
            loaded = await _load_unless_there(self._context, sampler, snapshot)
            # Nothing is awaited from here until it waits for its slot: a group that ends gives it back.
            outcome = await self._sample(request, replace(wanted, snapshot_id=snapshot))
            return outcome if loaded is None else replace(outcome, effects=(*outcome.effects, loaded))

    async def _sample(self, request: Pending, wanted: SampleRequest) -> Outcome:
        if request.id in self._stopped:
            return _stopped(request)
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._answers[request.id] = ended
        self._admit.append(wanted)
        self._some.set()
        return await ended

    def _end(self, outcome: Outcome) -> None:
        ended = self._answers.get(outcome.request_id)
        if ended is not None and not ended.done():
            ended.set_result(outcome)

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        for request_id in tuple(request_ids):
            self._end(failure(self._requests[request_id], error))


def _snapshot(context: ExecutionContext, sampler: SamplerView) -> str | None:
    """The snapshot that the sampler samples; None: the base model."""
    return sampler.snapshot_id if sampler.model_path is None else f"{sampler.id}@{context.pool.generation}"


async def _load_unless_there(context: ExecutionContext, sampler: SamplerView, snapshot: str) -> SamplerLoaded | None:
    """Have the worker group hold the sampler's snapshot; the change of the sampler's row when it has another one."""

    async def load_checkpoint(path: str) -> int | None:
        state, _ = await read_checkpoint(context, sampler.owner, path, optimizer=False)
        return (await context.send(LoadSnapshot(snapshot, state), SnapshotHeld)).host_bytes

    bring = (
        partial(load_checkpoint, sampler.model_path) if sampler.model_path else partial(_bring_back, context, snapshot)
    )
    await context.snapshots.load_once(snapshot, bring)
    if sampler.snapshot_id != snapshot:
        return SamplerLoaded(sampler.id, snapshot)
    context.snapshots.recorded(snapshot)
    return None


def _stopped(request: Pending) -> Outcome:
    """What nobody reads: the request was answered before."""
    return request.failed("sampling was stopped: the request was answered already", "user")


async def _bring_back(context: ExecutionContext, snapshot_id: str) -> int | None:
    """Load what an unnamed save has committed, or will: the group that it was published in is gone."""
    missed, recovery = None, context.journal.recovery
    while True:
        # First: once it is not coming, it is stored, or lost.
        coming = context.saves.is_being_stored(snapshot_id) or await context.read(recovery.is_unstored, snapshot_id)
        if (stored := await context.read(recovery.sampler_snapshot, snapshot_id)) is None:
            if not coming:
                where = "its weights are in no worker group and not in the store"
                raise StateLostError(f"sampling snapshot {snapshot_id}: {where}")
            await asyncio.sleep(_LOOK_SECONDS)
            continue
        try:
            state, _ = await asyncio.to_thread(context.store.load, stored.path)
        except NotFoundError:
            if stored.path == missed:
                raise
            missed = stored.path  # maybe a later inflight save took its place, and it was deleted: look again
        else:
            return (await context.send(LoadSnapshot(snapshot_id, state), SnapshotHeld)).host_bytes


def _outcome(request: Pending, asked: _Asked, result: SampleResult) -> Outcome:
    """The answer, and what it used. asked: what the answer needs of the request's body."""
    if result.error is not None:
        return request.failed(result.error, result.category)
    assert request.sampler is not None, f"request {request.id}: the journal gives samples with their sampler"
    session, base = request.session_id, request.sampler.base_model
    prompt, cached, sharing = asked.prompt, result.prompt_cache_hit_tokens, len(result.sequences) - 1
    sampled = sum(len(sequence.tokens_T) for sequence in result.sequences)
    outcome = request.done(
        encode_sample(result, asked.targets),
        "proto",
        Used(session, base, UsageKind.PREFILL, prompt - cached),
        Used(session, base, UsageKind.CACHED_PREFILL, cached + sharing * prompt),
        Used(session, base, UsageKind.SAMPLE, sampled),
    )
    if not asked.records:
        return outcome
    sequences = tuple(
        StabilityInfo(f"{request.id}-{i}", sequence.tokens_T, sequence.logprobs_T)
        for i, sequence in enumerate(result.sequences)
    )
    return replace(outcome, effects=(*outcome.effects, SequencesRecorded(session, sequences)))
