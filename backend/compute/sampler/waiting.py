"""The queue of jobs that wait for prefill: projects share it fairly, by sequences.

All sequences count alike (`FairQueue`): a project that asks for many waits behind the requests that other projects send
meanwhile. Requests of one project are served in the order in which they came, with two exceptions. A request for few
tokens may overtake (`Scheduler.next_short_group`). An interactive request goes before its project's batch requests. It
gets the place of the first of them, and they move back. No batch request is overtaken by more than `MOST_OVERTAKING`
sequences, so none waits for ever. A project gets no more than its share by declaring its requests interactive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tinkerflow.backend.compute.sampler.prefill_jobs import PrefillJob
from tinkerflow.backend.compute.sampler.requests import ActiveRequest
from tinkerflow.backend.core.fairness import FairQueue, Ticket

MOST_OVERTAKING = 256  # sequences that go before a batch request that came earlier


class WaitingJobs:
    """Jobs in the order in which they are served: first preempted sequences, then the fair queue."""

    def __init__(self) -> None:
        """Empty."""
        self.clear()

    def clear(self) -> None:
        """Forget all jobs, and which projects were served."""
        self._queue: FairQueue[PrefillJob] = FairQueue()
        self._tickets: dict[PrefillJob, Ticket[PrefillJob]] = {}
        self._preempted: list[PrefillJob] = []
        self._overtaken: dict[PrefillJob, int] = {}  # sequences that came later and went before

    def __iter__(self) -> Iterator[PrefillJob]:
        """The jobs, first the one that is served next."""
        yield from self._preempted
        yield from (ticket.item for ticket in self._queue)

    def __len__(self) -> int:
        return len(self._preempted) + len(self._queue)

    def add(self, job: PrefillJob) -> None:
        """Queue a job by its project's share, and by its priority."""
        overtaken = self._overtaken_by(job)
        before = self._tickets[overtaken[0]] if overtaken else None
        count = len(job.sequences)
        self._tickets[job] = self._queue.push(job.parent.request.owner, job, count, before=before)
        for other in overtaken:
            self._overtaken[other] = self._overtaken.get(other, 0) + count

    def add_preempted(self, job: PrefillJob) -> None:
        """Queue a sequence that had to leave its slot, before all others: its project has paid for it."""
        self._preempted.insert(0, job)

    def serve(self, jobs: Collection[PrefillJob]) -> None:
        """Remove jobs that are prefilled now. Their projects pay for them."""
        for job in jobs:
            if (ticket := self._tickets.pop(job, None)) is not None:
                self._queue.serve(ticket)
                self._overtaken.pop(job, None)
            else:
                self._preempted.remove(job)

    def withdraw(self, request: ActiveRequest) -> None:
        """Remove the jobs of a request. Its project pays nothing for them."""
        self._preempted = [job for job in self._preempted if job.parent is not request]
        for job in [job for job in self._tickets if job.parent is request]:
            self._queue.withdraw(self._tickets.pop(job))
            self._overtaken.pop(job, None)

    def _overtaken_by(self, job: PrefillJob) -> list[PrefillJob]:
        """The batch jobs of its project that an interactive job goes before, in their order."""
        request, count = job.parent.request, len(job.sequences)
        overtaken: list[PrefillJob] = []
        if request.priority == "interactive":
            for ticket in reversed([*self._queue]):
                other = ticket.item
                if ticket.owner != request.owner:
                    continue
                if other.parent.request.priority != "batch" or self._overtaken.get(other, 0) + count > MOST_OVERTAKING:
                    break
                overtaken.append(other)
        return overtaken[::-1]
