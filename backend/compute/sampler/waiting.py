"""The queue of jobs that wait for prefill. Projects share it fairly, by sequences.

All sequences count alike (`FairQueue`). A project that requests many sequences waits behind the requests that other
projects send meanwhile. Requests of one project are served in the order of arrival, with two exceptions. A request for
few tokens may overtake (`Scheduler.next_short_group`). An interactive request goes ahead of its project's batch
requests. It takes the place of the first batch request, and the batch requests move back. No batch request is overtaken
by more than `MOST_OVERTAKING` sequences, so no request waits forever. A project cannot increase its share by declaring
its requests interactive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tinkerflow.backend.compute.sampler.prefill_jobs import PrefillJob
from tinkerflow.backend.compute.sampler.requests import ActiveRequest
from tinkerflow.backend.core.fairness import FairQueue, Ticket

MOST_OVERTAKING = 256  # sequences that may go ahead of an earlier batch request


class WaitingJobs:
    """Jobs in the order of service: first preempted sequences, then the fair queue."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all jobs, and all service given to projects."""
        self._queue: FairQueue[PrefillJob] = FairQueue()
        self._tickets: dict[PrefillJob, Ticket[PrefillJob]] = {}
        self._preempted: list[PrefillJob] = []
        self._overtaken: dict[PrefillJob, int] = {}  # later sequences that went ahead

    def __iter__(self) -> Iterator[PrefillJob]:
        """The jobs in the order of service."""
        yield from self._preempted
        yield from (ticket.item for ticket in self._queue)

    def __len__(self) -> int:
        return len(self._preempted) + len(self._queue)

    def add(self, job: PrefillJob) -> None:
        """Queue a job according to its project's share and its priority."""
        overtaken = self._overtaken_by(job)
        before = self._tickets[overtaken[0]] if overtaken else None
        count = len(job.sequences)
        self._tickets[job] = self._queue.push(job.parent.request.owner, job, count, before=before)
        for other in overtaken:
            self._overtaken[other] = self._overtaken.get(other, 0) + count

    def add_preempted(self, job: PrefillJob) -> None:
        """Queue a sequence that had to leave its slot, ahead of all others, because its project has already paid."""
        self._preempted.insert(0, job)

    def serve(self, jobs: Collection[PrefillJob]) -> None:
        """Remove jobs that are now prefilled. Their projects pay for them."""
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
        """The batch jobs of the same project that an interactive job overtakes, in order."""
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
