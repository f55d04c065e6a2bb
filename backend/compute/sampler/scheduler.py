"""Which requests are prefilled, have a slot, or are done: the sampler's state on the host, without device arrays.

    waiting --next_group--> prefilling --assign_slots--> decoding in a slot --take--> finished
     | ^------------------ preempt (no memory for longer caches) --'     ^
     '--next_short_group--> over within a chunk, beside the batch -------------'

Owners (the projects that ask) share the slots by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). All
sequences count alike: an owner that asks for many waits behind what other owners ask meanwhile. One owner's requests
are served in the order they come, but a request for few tokens overtakes a busy batch. All decisions follow from
commands and from what the devices answered, so every process of a group decides alike.

Three schedulers share a worker group fairly, each at its own level. The pool (`CommandScheduler`) divides the devices
between training and sampling, and training between models: a step of the sampler follows a micro-batch. The engine
(`flows/sampling_runner.py`) decides which waiting requests the sampler is told of when there are more than it takes:
each owner gets an equal number of places. This scheduler decides which of the admitted requests get the slots of the
decode batch. The engine's shares keep an owner with a long queue from filling the sampler before others are seen; the
slots' shares then hold for what was admitted, by sequences, which the engine does not count. Neither knows of training.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from tinkerflow.backend.commands import Int32, SampleResult
from tinkerflow.backend.compute.sampler.prompt_scores import PLAIN, PieceScores, Widths
from tinkerflow.backend.compute.sampler.requests import ActiveSequence, ParentRequest, PrefixScope
from tinkerflow.backend.compute.sampler.shapes import SHORT_PROMPT, Shapes, at_least, prefill_piece
from tinkerflow.backend.compute.sampler.snapshot_cache import AdapterSnapshot


@dataclass(eq=False)
class PrefillJob:
    """Sequences that continue the same tokens. All but the last token are prefilled; the last is decode's first input.

    score: the parent wants scores of the prompt, and they are still to be computed. start: the job's place in line, as
    the number of sequences its owner may have been served before it, had all owners shared alike.
    """

    parent: ParentRequest
    tokens_T: Int32
    sequences: deque[ActiveSequence]
    score: bool
    start: int = 0

    @property
    def length(self) -> int:
        """How many tokens to prefill."""
        return len(self.tokens_T) - 1

    @property
    def alone(self) -> bool:
        """Whether it is prefilled alone: other jobs would wait for its long prompt, or for its prompt scores."""
        scores = self.parent.scores
        return self.length > SHORT_PROMPT or (self.score and scores is not None and scores.widths != PLAIN)

    def is_over_in(self, tokens: int) -> bool:
        """Whether its sequences end within that many tokens."""
        return all(sequence.remaining <= tokens for sequence in self.sequences)

    def wants(self, start: int, end: int) -> bool:
        """Whether the request wants scores of what follows the prompt's tokens [start, end)."""
        scores = self.parent.scores
        return self.score and scores is not None and scores.want(start, min(end, self.length))


@dataclass(eq=False)
class PrefillGroup:
    """Jobs that are prefilled together, one a row. length: of the cache that they are staged in, in positions."""

    jobs: list[PrefillJob]
    rows: int
    length: int
    start: int = 0  # tokens of every row that are computed

    @property
    def remaining(self) -> int:
        """Tokens that the longest row still lacks."""
        return max((job.length for job in self.jobs), default=0) - self.start

    @property
    def widths(self) -> Widths:
        """What its program computes beside logprobs. Only a job that goes alone wants any of it."""
        scores = self.jobs[0].parent.scores
        return scores.widths if scores is not None and self.jobs[0].score else PLAIN

    @property
    def scope(self) -> PrefixScope | None:
        """The requests that may share its prompt's pages; None when it was computed in shapes that depend on others."""
        return self.jobs[0].parent.scope if len(self.jobs) == 1 and self.widths == PLAIN else None

    @property
    def piece(self) -> int:
        """How many tokens a row the next dispatch computes."""
        alone, room = len(self.jobs) == 1, self.length - self.start
        return prefill_piece(alone=alone, start=self.start, remaining=self.remaining, room=room)

    def begin(self, known: int) -> None:
        """The staged cache exists, with the first `known` tokens of each prompt in it."""
        self.start = known
        for job in self.jobs:
            if job.parent.known is None:  # else it was preempted, and is prefilled again
                job.parent.known = known

    def advance(self, tokens: int, scored: PieceScores | None) -> None:
        """That many more tokens are computed. scored: what was asked of the tokens after them, on the host, or None."""
        for row, job in enumerate(self.jobs):
            end = min(self.start + tokens, job.length)
            if scored is not None and job.wants(self.start, end):
                assert job.parent.scores is not None
                job.parent.scores.take(self.start, end, row, scored)
        self.start += tokens


@dataclass(frozen=True)
class SlotAssignment:
    """A sequence gets a slot: row `row` of the staged cache is to be copied to slot `slot`."""

    row: int
    slot: int


class Scheduler:
    """The queue, the group in prefill, and the slots."""

    def __init__(self, shapes: Shapes, max_slots: int) -> None:
        """No requests. shapes: the sizes of caches. max_slots: the most sequences that decode together."""
        self._shapes = shapes
        self._max_slots = max_slots
        self._parents: dict[str, ParentRequest] = {}
        self._waiting: deque[PrefillJob] = deque()  # by their starts
        self._now = 0  # the start of the job that was served last
        self._next_start: dict[str, int] = {}  # by owner
        self.group: PrefillGroup | None = None
        self.slots: list[ActiveSequence | None] = []

    # ------------------------------------------------------------------ what it looks like
    @property
    def active(self) -> int:
        """Requests with a sequence in a slot."""
        return len({sequence.parent for _, sequence in self.decoding()})

    @property
    def waiting(self) -> int:
        """Requests of which no sequence has a slot yet."""
        return len(self._parents) - self.active

    @property
    def busy(self) -> int:
        """Sequences in slots."""
        return sum(1 for _ in self.decoding())

    def holds(self, request_id: str) -> bool:
        """Whether a request of that id is on its way."""
        return request_id in self._parents

    def decoding(self) -> Iterator[tuple[int, ActiveSequence]]:
        """(slot, sequence), ascending."""
        return ((slot, sequence) for slot, sequence in enumerate(self.slots) if sequence is not None)

    def snapshots(self) -> list[AdapterSnapshot]:
        """Every snapshot that a slot or the group in prefill uses, in a fixed order."""
        parents = [sequence.parent for _, sequence in self.decoding()]
        parents += [job.parent for job in self.group.jobs] if self.group else []
        return [snapshot for parent in parents if (snapshot := parent.snapshot) is not None]

    def wanted_slots(self) -> int:
        """How many sequences would decode if there were slots for all, at most `max_slots`."""
        jobs = [*self._waiting, *(self.group.jobs if self.group else ())]
        return min(self._max_slots, self.busy + sum(len(job.sequences) for job in jobs))

    # ------------------------------------------------------------------ coming and going
    def admit(self, parent: ParentRequest, sequences: list[ActiveSequence]) -> None:
        """Queue a request: behind its owner's other requests, before what exceeds the share of other owners."""
        request = parent.request
        self._parents[request.request_id] = parent
        tokens = np.asarray(request.prompt_T, np.int32)
        start = max(self._now, self._next_start.get(request.owner, 0))
        self._next_start[request.owner] = start + len(sequences)
        job = PrefillJob(parent, tokens, deque(sequences), score=parent.scores is not None, start=start)
        self._waiting.insert(bisect.bisect(self._waiting, start, key=lambda other: other.start), job)

    def remove(self, request_id: str) -> None:
        """Forget a request and free its slots; unknown ids are fine."""
        parent = self._parents.pop(request_id, None)
        if parent is None:
            return
        if unserved := [job for job in self._waiting if job.parent is parent]:
            self._waiting = deque(job for job in self._waiting if job.parent is not parent)
            owner = parent.request.owner
            theirs = [job.start + len(job.sequences) for job in self._waiting if job.parent.request.owner == owner]
            self._next_start[owner] = max(theirs, default=min(job.start for job in unserved))
        self.slots = [None if sequence and sequence.parent is parent else sequence for sequence in self.slots]
        if self.group is not None:
            for job in self.group.jobs:  # the row stays until the group is computed, for no request
                if job.parent is parent:
                    job.sequences.clear()
                    job.score = False
            if not any(job.sequences for job in self.group.jobs):
                self.group = None

    def switch_snapshot(self, snapshot: AdapterSnapshot) -> None:
        """From now on every request that samples a snapshot of this id samples `snapshot`."""
        for parent in self._parents.values():
            if parent.snapshot is not None and parent.snapshot.snapshot_id == snapshot.snapshot_id:
                parent.snapshot = snapshot

    def clear(self) -> list[str]:
        """Forget all requests; returns their ids."""
        requests = list(self._parents)
        self._parents.clear()
        self._waiting.clear()
        self._next_start.clear()
        self._now = 0
        self.group, self.slots = None, []
        return requests

    def finish(self) -> list[SampleResult]:
        """The results of requests whose sequences are all done; the scheduler forgets these requests."""
        results = [result for parent in self._parents.values() if (result := parent.result())]
        for result in results:
            del self._parents[result.request_id]
        return results

    # ------------------------------------------------------------------ prefill
    def next_group(self, cache_length: int) -> PrefillGroup | None:
        """The group in prefill; if there is none and a slot would be free, a new one from the head of the queue.

        cache_length: positions of the decode batch's cache; a longer one has fewer slots.
        """
        if self.group is not None or not self._waiting:
            return self.group
        first = self._waiting[0]
        most = self._most_slots(max(cache_length, self._shapes.length_for(first.length + 1)))
        free = most - self.busy
        if free < 1:
            return None
        fitting = 1
        if not first.alone:
            free -= len(first.sequences)
            for job in islice(self._waiting, 1, self._shapes.rows[-1]):
                if job.alone or free <= 0:
                    break
                free -= len(job.sequences)
                fitting += 1
        self.group = self._formed([self._waiting.popleft() for _ in range(self._shapes.together(fitting))])
        return self.group

    def next_short_group(self, most_sequences: int, most_tokens: int) -> PrefillGroup | None:
        """Waiting requests with short prompts that want at most `most_tokens` tokens: they need no slot, and overtake.

        At most `most_sequences` sequences. None when no such request waits, or when no other request is there.
        """
        jobs: list[PrefillJob] = []
        short = [job for job in self._waiting if not job.alone and job.is_over_in(most_tokens)]
        if not self.busy and len(short) == len(self._waiting):
            return None
        for job in short:
            if len(job.sequences) <= most_sequences and len(jobs) < self._shapes.rows[-1]:
                jobs.append(job)
                most_sequences -= len(job.sequences)
        if not jobs:
            return None
        self._waiting = deque(job for job in self._waiting if job not in jobs)
        return self._formed(jobs)

    def _formed(self, jobs: list[PrefillJob]) -> PrefillGroup:
        """The group of jobs taken from the queue. Later requests start behind them, not behind jobs that still wait."""
        served = max(job.start for job in jobs)
        self._now = max(self._now, min(served, self._waiting[0].start if self._waiting else served))
        longest = max(job.length for job in jobs)
        return PrefillGroup(jobs, at_least(self._shapes.rows, len(jobs)), self._shapes.length_for(longest))

    def assign_slots(self, cache_length: int) -> list[SlotAssignment]:
        """Give free slots to the prefilled group's sequences; when all have one, the group is gone.

        Call `resize` before. A slot is free if it is None, as long as `max_slots` and memory at `cache_length` allow.
        """
        group = self._group()
        assignments = []
        free = [slot for slot, sequence in enumerate(self.slots) if sequence is None]
        free = free[: max(0, self._most_slots(cache_length) - self.busy)]
        for row, job in enumerate(group.jobs):
            while job.sequences and free:
                slot = free.pop(0)
                self.slots[slot] = job.sequences.popleft()
                assignments.append(SlotAssignment(row, slot))
        if not any(job.sequences for job in group.jobs):
            self.group = None
        return assignments

    # ------------------------------------------------------------------ slots
    def resize(self, slots: int) -> list[int]:
        """Have `slots` slots, with all sequences at the front. Returns the slot that each came from, -1 for none."""
        moved = [slot for slot, _ in self.decoding()]
        assert len(moved) <= slots
        self.slots = [self.slots[slot] for slot in moved] + [None] * (slots - len(moved))
        return moved + [-1] * (slots - len(moved))

    def preempt(self, keep: int) -> None:
        """Take slots from the youngest requests until `keep` sequences decode; theirs go to the head of the queue."""
        order = {parent: place for place, parent in enumerate(self._parents.values())}
        youngest = sorted(self.decoding(), key=lambda held: (order[held[1].parent], held[1].index))
        for slot, sequence in reversed(youngest[keep:]):
            self.slots[slot] = None
            self._waiting.appendleft(PrefillJob(sequence.parent, sequence.prefix(), deque([sequence]), score=False))

    def _most_slots(self, length: int) -> int:
        return min(self._max_slots, self._shapes.most_slots(length))

    def _group(self) -> PrefillGroup:
        assert self.group is not None, "no group is in prefill"
        return self.group
