"""The flow run of one base model's sampling: all samplers share one decode batch, task runs are windows of it."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.states import Cancelled, Completed

from tinkerflow.backend.journal import Outcome, Pending
from tinkerflow.flows.prefect.tracking import run_body
from tinkerflow.flows.prefect.training_run import MOST_RUNS
from tinkerflow.flows.prefect.window import MOST, SAMPLE, Window, track
from tinkerflow.flows.runner import End, Shared, Why
from tinkerflow.tasks.execution.context import ExecutionContext
from tinkerflow.tasks.execution.operation import Operation
from tinkerflow.tasks.operations.sample import SampleBatch

log = logging.getLogger(__name__)

_LOOKS = 32  # into the journal while as many samples are answered as are taken at once, if more wait there


@flow(
    name="sampling",
    flow_run_name="sampling {base_model}",
    retries=0,
    persist_result=False,
    validate_parameters=False,
    log_prints=False,
)
async def sampling(base_model: str) -> State[None]:
    """Samples of one base model and of all adapters on it; a task run follows the requests of one window of time."""
    end = cast(End, await run_body())
    return Cancelled(message=end.text) if end.why is Why.STOPPED else Completed(message=end.text)


class SamplingRunner:
    """Takes samples from the journal and keeps the decode batch going."""

    def __init__(self, context: ExecutionContext, shared: Shared, most_waiting: int) -> None:
        """`most_waiting`: requests taken from the journal at once; more wait there."""
        self._context = context
        self._shared = shared
        self._most = most_waiting
        self._woken = asyncio.Event()
        self._woken.set()
        self._stopping = False
        self._full = False  # more may wait in the journal than was taken
        self._batch: SampleBatch | None = None
        self._window: Window | None = None
        self._windows = 0

    def wake(self) -> None:
        """There may be samples, or a sampler may have ended."""
        self._woken.set()

    def stop(self) -> None:
        """Take nothing more from the journal; `serve` returns when what was taken is answered."""
        self._stopping = True
        self._woken.set()

    async def serve_for_ever(self) -> None:
        """Serve until stopped, in as many flow runs as it takes."""
        name = self._context.card.name
        while not self._stopping:
            labels = ("tinkerflow", name)
            await self._shared.tracking.run(sampling, lambda: self.serve(MOST_RUNS), labels, base_model=name)

    async def serve(self, most_runs: int) -> End:
        """Answer samples as they come. Ends after `most_runs` task runs, or when another flow run should begin."""
        tracked = FlowRunContext.get() is not None
        first = self._windows
        context = replace(self._context, generation=await self._context.pool.serving())
        async with asyncio.TaskGroup() as group:
            batch = self._batch = SampleBatch(context, group)
            decoding = group.create_task(_decode(batch), name="decode")
            try:
                while True:
                    await self._woken.wait()
                    if self._stopping:
                        return End(Why.STOPPED, Why.STOPPED.value)
                    if self._windows - first >= most_runs or (not tracked and self._shared.tracking.reachable):
                        return End(Why.ROLL_OVER, Why.ROLL_OVER.value)
                    self._woken.clear()
                    await self._take(batch, group, tracked)
            finally:
                if self._window is not None:
                    self._window.close()
                    self._window = None
                await batch.drain()
                decoding.cancel()

    def cancel(self, request_id: str) -> None:
        """The request was cancelled: its place in the decode batch is free after the chunk that runs now."""
        if self._batch is not None:
            self._batch.cancel(request_id)

    async def cancel_ended(self) -> None:
        """Stop decoding for requests that somebody else has answered (their session ended, or a bell was lost)."""
        if self._batch is None or not (taken := self._batch.requests):
            return
        for request_id in await self._context.read(self._context.journal.requests.finished, taken):
            self._batch.cancel(request_id)

    async def _take(self, batch: SampleBatch, group: asyncio.TaskGroup, tracked: bool) -> None:
        room = self._most - len(batch.requests)
        if room < max(1, self._most // _LOOKS if self._full else 0):
            self._full = True
            return  # an answer wakes us
        rows = await self._pending(batch, room)
        self._full = len(rows) == room
        if self._full:
            waiting = await self._context.read(self._context.journal.queue.waiting_samples, self._context.card.name)
            if len(waiting) > 1:
                taken = batch.owners
                shares = shared_out(room, taken, {owner: count - taken[owner] for owner, count in waiting.items()})
                rows = [row for owner, share in shares.items() for row in await self._pending(batch, share, owner)]
        for row in rows:
            self._follow(row, batch, group, tracked)

    async def _pending(self, batch: SampleBatch, limit: int, owner: str | None = None) -> list[Pending]:
        journal, base = self._context.journal, self._context.card.name
        return await self._context.read(
            journal.queue.pending_samples, limit, base_model=base, exclude=batch.requests, owner=owner
        )

    def _left(self, answered: asyncio.Task[Outcome | None]) -> None:
        interrupted = not answered.cancelled() and answered.exception() is None and answered.result() is None
        if self._full or interrupted:
            self._woken.set()

    def _follow(self, row: Pending, batch: SampleBatch, group: asyncio.TaskGroup, tracked: bool) -> None:
        answered = batch.take(row)
        answered.add_done_callback(self._left)
        tracking, pacing = self._shared.tracking, self._shared.pacing
        if not tracked or not tracking.reachable:
            tracking.untracked += 1
            return
        if self._window is None or not self._window.open or self._window.size >= MOST:
            if self._window is not None:
                self._window.close()
            self._windows += 1
            pacing.open()
            tracking.tracked += 1
            name = f"{self._context.card.name.rstrip('/').rsplit('/', 1)[-1]}/sample-{self._windows:06d}"
            self._window = Window(name, linger=lambda: pacing.seconds)
            group.create_task(tracking.guard(track(self._window, SAMPLE)), name=name)
        self._window.add(Operation(row, answered))


def shared_out(places: int, taken: Mapping[str, int], waiting: Mapping[str, int]) -> dict[str, int]:
    """How many more requests to take of each owner: one after the other of whoever then has the fewest."""
    line = [(taken.get(owner, 0), owner) for owner, count in waiting.items() if count > 0]
    heapq.heapify(line)
    shares: Counter[str] = Counter()
    while line and shares.total() < places:
        have, owner = line[0]
        shares[owner] += 1
        if shares[owner] < waiting[owner]:
            heapq.heapreplace(line, (have + 1, owner))
        else:
            heapq.heappop(line)
    return dict(shares)


async def _decode(batch: SampleBatch) -> None:
    while True:
        await batch.wait()
        await batch.step()
