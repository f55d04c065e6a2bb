"""The runner of one base model's samples: all samplers share one decode batch.

Three queues divide a base model's devices among projects (backend/core/fairness.py). Here, `equal_places` decides whose
sampling requests leave the journal when more wait than fit: the next place goes to the project with the fewest taken
requests. In the sampler (backend/compute/sampler/scheduler.py), a fair queue decides whose requests get
the slots of the decode batch. In the pool (backend/pool/scheduler.py), a fair queue of training commands takes turns
with the steps of the decode batch, so that neither waits for the other to finish.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from tinkerflow.backend.core.fairness import equal_places
from tinkerflow.backend.journal import Outcome, Pending
from tinkerflow.flows.observers import RunObserver
from tinkerflow.flows.runner import STOPPED, End
from tinkerflow.tasks.execution.operation import ExecutionContext, Operation
from tinkerflow.tasks.operations.sample import SampleRequests

_MOST_TAKEN = 2**14  # requests of all projects, including separate ones: each read of the journal lists them all
_PARTS = 32  # the journal is read for more samples once this part of the places is free again


class SamplingRunner:
    """Takes samples from the journal and keeps the decode batch going."""

    def __init__(self, context: ExecutionContext, observers: Sequence[RunObserver], most_waiting: int) -> None:
        """context: not bound to a worker group. observers: get reports about the work.

        most_waiting: requests that are taken from the journal at a time; others wait there. Requests with images or
        long bodies do not count, but no project has more requests taken in total.
        """
        self._context = context
        self.observers = observers
        self._most = most_waiting
        self._woken = asyncio.Event()
        self._woken.set()
        self._stopping = False
        self._full = False  # more may wait in the journal
        self._taken: SampleRequests | None = None
        self._odd_interactive: dict[str | None, bool] = {}  # by owner, whether the next odd place is interactive

    def wake(self) -> None:
        """Read the journal again: there may be samples, or a worker group serves now."""
        self._woken.set()

    def stop(self) -> None:
        """Stop taking requests from the journal. `serve` returns when the taken ones are answered."""
        self._stopping = True
        self._woken.set()

    async def serve(self) -> End:
        """Answer samples as they arrive, until stopped."""
        heard = self._context.journal.notifier.subscribe("sample", "cancel:")
        async with heard as topics, asyncio.TaskGroup() as group:
            listening = group.create_task(self._listen(topics), name="samples")
            try:
                while not (self._context.pool.ready or self._stopping):
                    await self._woken.wait()  # also when a group serves
                    self._woken.clear()
                if not self._stopping:
                    await self._serve(group)
            finally:
                listening.cancel()
        return STOPPED

    async def _listen(self, topics: AsyncIterator[str]) -> None:
        async for topic in topics:
            if topic == "sample":
                self.wake()
            else:
                self.cancel(topic.removeprefix("cancel:"))

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        context = self._context.bound_to(await self._context.pool.serving())
        taken = self._taken = SampleRequests(context, group, self._freed)
        decoding = group.create_task(taken.batch.run(), name="decode")
        self._woken.set()
        try:
            while await self._woken.wait() and not self._stopping:
                self._woken.clear()
                await self._take(taken)
        finally:
            await taken.drain()
            decoding.cancel()

    def cancel(self, request_id: str) -> None:
        """Cancel a request. Its place in the decode batch is free after the current chunk."""
        if self._taken is not None:
            self._taken.cancel(request_id)

    async def cancel_ended(self) -> None:
        """Stop decoding for requests that another process has answered, since a notification may be lost."""
        if self._taken is None or not self._taken.ids:
            return
        for request_id in await self._context.read(self._context.journal.results.finished, self._taken.ids):
            self._taken.cancel(request_id)

    @property
    def busy(self) -> bool:
        """Whether any sample was taken and is not answered."""
        return self._taken is not None and bool(self._taken.ids)

    async def _take(self, taken: SampleRequests) -> None:
        """Take samples from the journal, up to the free places."""
        if self._context.pool.draining:
            return
        free = min(self._most - taken.places, _MOST_TAKEN - len(taken.ids))
        if free < max(1, self._most // _PARTS if self._full else 0):
            self._full = True
            return  # an answer wakes the runner
        owners = taken.owners
        many = max(owners.values(), default=0) >= self._most
        rows = [] if many else await self._pending(taken, free)
        many = many or max((owners + Counter(row.owner for row in rows)).values(), default=0) > self._most
        self._full = many or len(rows) == free
        if self._full:
            waiting = await self._context.read(self._context.journal.queue.waiting_samples, self._context.card.name)
            if many or len(waiting) > 1:
                more = {owner: min(count, self._most) - owners[owner] for owner, count in waiting.items()}
                shares = equal_places(free, owners, more)
                rows = [row for owner, share in shares.items() for row in await self._pending(taken, share, owner)]
        for row in rows:
            answered = taken.take(row)
            answered.add_done_callback(self._answered)
            for observer in self.observers:
                observer.sampled(Operation(row, answered))

    async def _pending(self, taken: SampleRequests, limit: int, owner: str | None = None) -> list[Pending]:
        odd_interactive = self._odd_interactive.get(owner, True)
        if limit % 2:  # otherwise an owner with one place would use it for one kind of sample only
            self._odd_interactive[owner] = not odd_interactive
        return await self._context.read(
            self._context.journal.requests.pending_samples,
            limit,
            base_model=self._context.card.name,
            exclude=taken.ids,
            owner=owner,
            odd_interactive=odd_interactive,
        )

    def _freed(self) -> None:
        if self._full:
            self._woken.set()

    def _answered(self, answered: asyncio.Task[Outcome | None]) -> None:
        self._freed()
        if not answered.cancelled() and answered.exception() is None and answered.result() is None:
            self._woken.set()  # the request's worker group ended
