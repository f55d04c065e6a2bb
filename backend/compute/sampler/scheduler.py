"""The sampler's state on the host, without device arrays: the requests that wait, are prefilled, decode, or are done.

    waiting --next_group--> prefilling --start_group--> decoding in a slot --append--> finished
     | ^---------------------- reserve_pages (no page is free) --'              ^
     '--next_short_group--> done within a chunk, without the batch -------------'

A prompt is prefilled when its pages are free, plus one page for each sequence that decodes. Sequences get pages as they
grow. Most sequences end long before their limit: if pages were reserved up to the limit, a fifth as many sequences
would decode.

When pages run out, the youngest sequence returns to the queue. It joins again when pages for twice its tokens are free,
and reserves them, so few sequences are preempted twice. Its tokens so far are prefilled. If results must not depend on
the batch (`Shapes.invariant`), they are drawn again instead, because decode rounds differently from prefill.

Projects share the slots fairly (`waiting`). All decisions depend only on commands and on tokens that were read, so
every process of a group makes the same decisions.

Three schedulers share a worker group fairly, each at its own level. The pool (`CommandScheduler`) divides the devices
between training and sampling, and training between projects: a step of the sampler follows a micro-batch. The engine
(`flows/sampling_runner.py`) selects the waiting requests that the sampler receives when there are more than it accepts:
each project gets an equal number of places. This scheduler gives the slots of the decode batch to admitted requests.
The engine's places keep a project with a long queue from filling the sampler before other projects' requests arrive.
The slots are then shared by sequences, which the engine does not count. Neither the engine nor this scheduler considers
training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from itertools import islice

from tinkerflow.backend.compute.sampler.pages import PagePool
from tinkerflow.backend.compute.sampler.prefill_jobs import PrefillGroup, PrefillJob, scope_for
from tinkerflow.backend.compute.sampler.prompt_pages import PromptPages
from tinkerflow.backend.compute.sampler.requests import ActiveRequest, ActiveSequence, PrefixScope
from tinkerflow.backend.compute.sampler.shapes import Shapes
from tinkerflow.backend.compute.sampler.slots import DecodeSlots
from tinkerflow.backend.compute.sampler.snapshot_cache import AdapterSnapshot
from tinkerflow.backend.compute.sampler.waiting import WaitingJobs
from tinkerflow.backend.spec.commands import Int32, SampleResult

Fits = Callable[[Collection[AdapterSnapshot | None]], bool]


class Scheduler:
    """All requests: waiting, in prefill, or decoding."""

    def __init__(self, shapes: Shapes, max_slots: int, pool: PagePool, fits: Fits = lambda _: True) -> None:
        """Start without requests. shapes: of dispatches. max_slots: the most sequences that decode. pool: the pages.

        fits: whether an invariant batch may contain these snapshots (None: the base model).
        """
        self._shapes, self._max_slots, self._pool, self._fits = shapes, max_slots, pool, fits
        self._requests: dict[str, ActiveRequest] = {}
        self.waiting_jobs = WaitingJobs()
        self.group: PrefillGroup | None = None
        self._short_group: PrefillGroup | None = None  # short requests, until their sequences decode
        self.slots = DecodeSlots(shapes, max_slots, pool)
        self._prompts = PromptPages(shapes, pool, self.slots)

    # ------------------------------------------------------------------ what it holds
    @property
    def active(self) -> int:
        """The number of requests with a sequence in a slot."""
        return len({sequence.parent for sequence in self.slots.sequences})

    @property
    def waiting(self) -> int:
        """The number of requests without a sequence in a slot."""
        return len(self._requests) - self.active

    @property
    def request_ids(self) -> list[str]:
        """The ids of all unfinished requests, oldest first."""
        return list(self._requests)

    def has_request(self, request_id: str) -> bool:
        """Whether there is an unfinished request with this id."""
        return request_id in self._requests

    def is_active(self, sequence: ActiveSequence) -> bool:
        """Whether the sequence needs its decoded tokens, because it has neither ended nor been removed."""
        return self._requests.get(sequence.parent.id) is sequence.parent and not sequence.ended

    def snapshots(self) -> list[AdapterSnapshot | None]:
        """The snapshot (None: the base model) of every slot and of the group in prefill, in a fixed order."""
        parents = [sequence.parent for sequence in self.slots.sequences]
        parents += [job.parent for job in self.group.jobs] if self.group else []
        return [parent.snapshot for parent in parents]

    def _may_join(self, job: PrefillJob) -> bool:
        return not self._shapes.invariant or self._fits([*self.snapshots(), job.parent.snapshot])

    def wanted_slots(self) -> int:
        """How many sequences would decode if there were slots for all, at most `max_slots`."""
        jobs = [*self.waiting_jobs, *(self.group.jobs if self.group else ())]
        return min(self._max_slots, self.slots.busy + sum(len(job.sequences) for job in jobs))

    # ------------------------------------------------------------------ coming and going
    def admit(self, parent: ActiveRequest, sequences: list[ActiveSequence]) -> None:
        """Queue sequences of a request with equal tokens so far, in jobs of at most as many sequences as slots."""
        self._requests[parent.id] = parent
        score, tokens_T = parent.scores is not None and not sequences[0].tokens, sequences[0].all_tokens()
        for begin in range(0, len(sequences), self._max_slots):  # other projects' requests may come in between
            part = deque(sequences[begin : begin + self._max_slots])
            self.waiting_jobs.add(self._job(tokens_T, part, score=score and begin == 0))

    def _job(self, tokens_T: Int32, sequences: deque[ActiveSequence], *, score: bool) -> PrefillJob:
        page, sizes = self._pool.page, self._shapes.pieces
        return PrefillJob(sequences[0].parent, tokens_T, sequences, score=score, page=page, sizes=sizes)

    def remove_request(self, request_id: str, *, tainted: bool = False) -> None:
        """Forget a request and free its slots and pages. Unknown ids are ignored.

        tainted: its pages contain NaN or infinity. Otherwise only pages without a decoded chunk may contain them.
        """
        if (parent := self._requests.pop(request_id, None)) is None:
            return
        self.waiting_jobs.withdraw(parent)
        self._free(parent, tainted=tainted)

    def _free(self, parent: ActiveRequest, *, tainted: bool = False) -> None:
        for sequence in [each for each in self.slots.sequences if each.parent is parent]:
            self.slots.remove(sequence, tainted=tainted)
        for job in self.group.jobs if self.group is not None else ():
            if job.parent is parent:
                self._prompts.leave_group(job, tainted=tainted)
        self._end_group_without_sequences()

    def switch_snapshot(self, snapshot: AdapterSnapshot, *, recompute: bool = False) -> None:
        """Make every request that samples a snapshot with this id sample `snapshot` from now on.

        recompute: whether to prefill them again with their tokens. No token may be in flight then.
        """
        for parent in self._requests.values():
            if parent.snapshot is not None and parent.snapshot.snapshot_id == snapshot.snapshot_id:
                parent.snapshot = snapshot
                if recompute:
                    self._prefill_again(parent)

    def _prefill_again(self, parent: ActiveRequest) -> None:
        """Requeue a request's sequences with pages, ahead of all others, because their project has already paid."""
        decoding = [sequence for sequence in self.slots.sequences if sequence.parent is parent]
        again = [self._job(sequence.all_tokens(), deque([sequence]), score=False) for sequence in decoding]
        prefilling = [job for job in self.group.jobs if job.parent is parent and job.sequences] if self.group else []
        again += [self._job(job.tokens_T, job.sequences.copy(), score=job.score) for job in prefilling]
        self._free(parent)
        for job in reversed(again):
            if job.score and parent.scores is not None:
                parent.scores.reset()
            self.waiting_jobs.add_preempted(job)

    def clear(self) -> list[str]:
        """Forget all requests and the content of the pages. Returns the ids of the requests."""
        request_ids = self.request_ids
        self._requests.clear()
        self.waiting_jobs.clear()
        self.group, self._short_group, self.slots.sequences = None, None, []
        self._pool.clear()
        return request_ids

    def requeue_all(self) -> None:
        """Requeue all requests, oldest first, with their tokens so far. All pages are emptied."""
        groups = [group for group in (self.group, self._short_group) if group]
        jobs = [*self.waiting_jobs, *(job for group in groups for job in group.jobs)]
        sequences = [*self.slots.sequences, *(each for job in jobs for each in job.sequences)]
        parents = dict(self._requests)
        self.clear()
        self._requests = parents
        for parent in parents.values():
            new: list[ActiveSequence] = []
            for sequence in [each for each in sequences if each.parent is parent]:
                sequence.reset(again=self._shapes.invariant)
                if sequence.tokens:
                    self.admit(parent, [sequence])
                else:
                    new.append(sequence)
            if new:
                if parent.scores is not None:
                    parent.scores.reset()
                self.admit(parent, new)

    def reset_shares(self) -> None:
        """Reset the shares of all projects, when there are no requests. Cached prompts are kept."""
        assert not self._requests and not self._pool.used, "a request that is gone has left pages"
        self.waiting_jobs.clear()

    def pop_finished(self) -> list[SampleResult]:
        """Remove the requests whose sequences are all done, and return their results."""
        results = [result for parent in self._requests.values() if (result := parent.result())]
        for result in results:
            del self._requests[result.request_id]
        return results

    # ------------------------------------------------------------------ prefill
    def next_group(self) -> PrefillGroup | None:
        """The group in prefill; if there is none, and a slot and pages are free, a new group from the queue's head."""
        if self.group is not None or not self.waiting_jobs or (free := self.slots.free) < 1:
            return self.group
        jobs = [*islice(self.waiting_jobs, self._shapes.most_prompts)]
        if self._may_join(jobs[0]):
            self.group = self._begin_group(jobs[: self._shapes.together(_fitting(jobs, free))])
        return self.group

    def next_short_group(self, most_sequences: int, most_tokens: int) -> PrefillGroup | None:
        """Waiting requests with short prompts and at most `most_tokens` tokens, which overtake others and need no slot.

        At most `most_sequences` sequences, and as many as a shard has slots, because all may be in one shard. None if
        no such request is waiting, or if there are no other requests.
        """
        short = [job for job in self.waiting_jobs if not job.alone and job.ends_within(most_tokens)]
        if len(short) == len(self.waiting_jobs) and not self.slots.busy:
            return None
        short = [job for job in short if self._may_join(job)]
        jobs = _first_within(short, min(most_sequences, self.slots.each_shard), self._shapes.most_prompts)
        self._short_group = self._begin_group(jobs) if jobs else None
        return self._short_group

    def _begin_group(self, jobs: list[PrefillJob]) -> PrefillGroup | None:
        if (group := self._prompts.begin_group(jobs)) is not None:
            self.waiting_jobs.serve(group.jobs)
        return group

    def keep_state(self) -> None:
        """Remember the current state of the group's prompt, if other prompts may continue it."""
        if self.group is not None:
            self._prompts.keep_state(self.group)

    def start_group(self, alive: Callable[[PrefixScope], bool]) -> None:
        """Give free slots to the sequences of the prefilled group. When all have one, the group ends.

        alive: whether requests of a scope may still arrive. The prompt is then kept for them.
        """
        group = self.group
        assert group is not None, "no group is in prefill"
        scope, group.scope = group.scope, None
        if scope is not None and scope == scope_for(group.jobs) and alive(scope):
            self._prompts.keep_prompt(group.jobs[0], scope)
        for job in group.jobs:
            self._prompts.release_states(job)
            free = self.slots.free
            while job.sequences and free > 0 and (table := self.slots.fork_table(job)) is not None:
                self.slots.add(job.sequences.popleft(), job, table)
                free -= 1
            if not job.sequences:
                self._pool.release(job.table)
        self._end_group_without_sequences()

    def start_short_group(self, group: PrefillGroup) -> list[ActiveSequence]:
        """Start the sequences of a short group, which end within a chunk. Sequences without pages wait again."""
        self._short_group = None
        pool, started = self._pool, []
        for job in group.jobs:
            wanted = self._requests.get(job.parent.id) is job.parent
            for sequence in job.sequences if wanted else ():
                table = pool.fork(job.table, job.table.shard)
                assert table is not None, "a fork in one shard takes no page"
                self.slots.add(sequence, job, table)
                started.append(sequence)
            pool.release(job.table, tainted_from=None if wanted else 0)
        for sequence in tuple(started):
            if not pool.reserve(sequence.table, sequence.cached, sequence.cached + sequence.remaining):
                self.slots.remove(sequence)
                self._requeue(sequence)
                started.remove(sequence)
        return started

    def _end_group_without_sequences(self) -> None:
        if self.group is not None and not any(job.sequences for job in self.group.jobs):
            self.group = None

    # ------------------------------------------------------------------ decode
    def reserve_pages(self, steps: int) -> bool:
        """Give each sequence pages for `steps` more tokens. If pages run out, the youngest sequences wait again.

        False: call this again when all tokens are read, because they may show that a sequence has ended.
        """
        preempted = self.slots.reserve_pages(steps, [*self._requests.values()])
        for sequence in preempted or ():
            self._requeue(sequence)
        return preempted is not None

    def restart(self, sequence: ActiveSequence) -> None:
        """Requeue a sequence whose pages may contain NaN after its tokens so far."""
        sequence.unverified_from = min(sequence.unverified_from or sequence.cached, sequence.cached) // self._pool.page
        self.slots.remove(sequence)
        self._requeue(sequence)

    def _requeue(self, sequence: ActiveSequence) -> None:
        tokens = max(sequence.preempted_at, sequence.cached + 1)
        sequence.reset(again=self._shapes.invariant)
        sequence.preempted_at = tokens
        self.waiting_jobs.add_preempted(self._job(sequence.all_tokens(), deque([sequence]), score=False))


def _fitting(jobs: list[PrefillJob], free: int) -> int:
    """How many of the first jobs may share a group. free: slots."""
    fitting = 1
    if not jobs[0].alone:
        free -= len(jobs[0].sequences)
        for job in jobs[1:]:
            if job.alone or free <= 0:
                break
            free -= len(job.sequences)
            fitting += 1
    return fitting


def _first_within(jobs: list[PrefillJob], most_sequences: int, most_jobs: int) -> list[PrefillJob]:
    """The first jobs that fit: at most `most_sequences` sequences together, and at most `most_jobs` jobs."""
    chosen: list[PrefillJob] = []
    for job in jobs:
        if len(job.sequences) <= most_sequences and len(chosen) < most_jobs:
            chosen.append(job)
            most_sequences -= len(job.sequences)
    return chosen
