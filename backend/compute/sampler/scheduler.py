"""Which requests are prefilled, have a slot, or are done: the sampler's state on the host, without device arrays.

    waiting --next_group--> prefilling --join--> decoding in a slot --take--> finished
     | ^---------------------- make_room (no page is free) --'          ^
     '--next_short_group--> over within a chunk, beside the batch ------'

A prompt is prefilled when its pages are free, and one more for each sequence that decodes. Sequences take pages as they
grow. When there are none, the youngest goes back to the queue; it joins again when all pages that it may ever need are
free, and keeps them. So no sequence is preempted twice.

Owners (the projects that ask) share the slots by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). All
sequences count alike: an owner that asks for many waits behind what other owners ask meanwhile. One owner's requests
are served in the order they come, but a request for few tokens overtakes a busy batch, and an interactive request
overtakes those of its owner's batch requests that wait: it takes the place in line of the first, and they move back.
None of them is overtaken by more than `_MOST_OVERTAKING` sequences, so none waits for ever, and no owner gets more than
its share by calling its requests interactive. All decisions follow from commands and from what the devices answered, so
every process of a group decides alike.

Three schedulers share a worker group fairly, each at its own level. The pool (`CommandScheduler`) divides the devices
between training and sampling, and training between models: a step of the sampler follows a micro-batch. The engine
(`flows/sampling_runner.py`) decides which waiting requests the sampler is told of when there are more than it takes:
each owner gets an equal number of places. This scheduler decides which of the admitted requests get the slots of the
decode batch. The engine's shares keep an owner with a long queue from filling the sampler before others are seen; the
slots' shares then hold for what was admitted, by sequences, which the engine does not count. Neither knows of training.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice, pairwise

import numpy as np

from tinkerflow.backend.commands import Int32, SampleResult
from tinkerflow.backend.compute.sampler.pages import Key, PagePool, PageTable, pages_for
from tinkerflow.backend.compute.sampler.prompt_scores import PLAIN, PieceScores, Widths
from tinkerflow.backend.compute.sampler.requests import ActiveSequence, ParentRequest, PrefixScope
from tinkerflow.backend.compute.sampler.shapes import SHORT_PROMPT, Shapes, at_least, prefill_piece, prefill_pieces
from tinkerflow.backend.compute.sampler.snapshot_cache import AdapterSnapshot

_MOST_OVERTAKING = 256  # sequences that go before a batch request that came earlier

Held = list[tuple[int, ActiveSequence]]  # (slot, the sequence in it), ascending


@dataclass(eq=False)
class PrefillJob:
    """Sequences that continue the same tokens. All but the last token are prefilled; the last is decode's first input.

    score: the parent wants scores of the prompt, and they are still to be computed. start: the job's place in line, as
    the number of sequences its owner may have been served before it, had all owners shared alike. page: positions of a
    page. sizes: of the pieces it may go in. table, row: its pages and its row in a group, once it is in one. known: how
    many tokens these pages held before. overtaken: sequences that went before it and came later. branch: how many
    tokens there are pages of, but perhaps no state to go on from: then one is kept for the next prompt. past: its
    states after so many tokens, which are kept for others once it is computed.
    """

    parent: ParentRequest
    tokens_T: Int32
    sequences: deque[ActiveSequence]
    score: bool
    page: int
    sizes: tuple[int, ...]
    start: int = 0
    table: PageTable = field(default_factory=lambda: PageTable(0))
    row: int = 0
    known: int = 0
    overtaken: int = 0
    branch: int = 0
    past: list[tuple[int, PageTable]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How many tokens to prefill."""
        return len(self.tokens_T) - 1

    @property
    def positions(self) -> int:
        """For how many positions it needs pages when it begins: all it may ever have, if it was preempted."""
        return max((sequence.most_cached for sequence in self.sequences if sequence.preempted), default=self.length)

    @property
    def alone(self) -> bool:
        """Whether it is prefilled alone: others would wait for its long prompt, its images, or its prompt scores."""
        parent, long = self.parent, self.length > SHORT_PROMPT
        return long or bool(parent.request.images) or (self.score and _widths([self]) != PLAIN)

    @property
    def room(self) -> int:
        """The positions of the pages that hold its prompt."""
        return pages_for(self.length, self.page) * self.page

    @cached_property
    def borders(self) -> list[int]:
        """Where the pieces of a prompt that goes alone begin and end: from 0 to its length, or a little beyond."""
        return [0, *accumulate(prefill_pieces(self.sizes, self.length, self.room))]

    @cached_property
    def digests(self) -> list[bytes]:
        """For each page of a prompt that goes alone: a digest of the page before, its tokens, images, and their pieces.

        With the weights, they are everything that decides the pages' numbers: every token up to a page's end, and the
        pieces in which these were computed. So a page that is found is bit for bit what would be computed, and the rest
        of the prompt is computed in the pieces in which it would be: a result does not depend on what is found. Decoded
        tokens have no digests: decode computes them in other shapes.
        """
        tokens_T: Int32 = self.tokens_T[: self.length]
        digests, digest = [], b""
        for begin in range(0, self.length, self.page):
            end = begin + self.page
            pieces = [(start, stop) for start, stop in pairwise(self.borders) if start < end and stop > begin]
            told = repr(pieces).encode() + self.parent.marks(begin, end, pieces) + tokens_T[begin:end].tobytes()
            digests.append(digest := hashlib.sha256(digest + told).digest())
        return digests

    @cached_property
    def states(self) -> Mapping[int, bytes]:
        """By border: a digest of all that decides the state there, the tokens before it and their pieces."""
        found, digest = {0: b""}, b"state"
        for start, stop in pairwise(self.borders):
            own, here_T = [(start, stop)], self.tokens_T[start : min(stop, self.length)]
            told = repr((start, stop)).encode() + self.parent.marks(start, stop, own) + here_T.tobytes()
            found[min(stop, self.length)] = digest = hashlib.sha256(digest + told).digest()
        return found

    def keeps_state(self, border: int) -> bool:
        """Whether other prompts may go on from the state there.

        They may from the last border that a prompt which goes on has, too; and from where prompts seem to part.
        """
        longer = {0, *accumulate(prefill_pieces(self.sizes, 2 * self.length + self.sizes[-2], 4 * self.room))}
        return border in (self.branch, max(set(self.borders) & longer & set(range(self.length + 1))))

    def keys(self, scope: PrefixScope) -> list[Key]:
        """The keys of its prompt's pages for the requests of `scope`."""
        return [Key(scope, digest) for digest in self.digests]

    def is_over_in(self, tokens: int) -> bool:
        """Whether its sequences end within that many tokens of one dispatch."""
        return all(one.remaining <= tokens and one.matcher is None for one in self.sequences)

    def wants(self, start: int, end: int) -> bool:
        """Whether the request wants scores of what follows the prompt's tokens [start, end)."""
        scores = self.parent.scores
        return self.score and scores is not None and scores.want(start, min(end, self.length))


@dataclass(eq=False)
class PrefillGroup:
    """Jobs that are prefilled together. rows: of the dispatch.

    scope: the requests that may share its prompt's pages, as it was begun; None when it is computed in shapes that
    depend on other jobs.
    """

    jobs: list[PrefillJob]
    rows: int
    scope: PrefixScope | None
    start: int = 0  # tokens of every row that are computed

    @property
    def remaining(self) -> int:
        """Tokens that the longest row still lacks."""
        return max((job.length for job in self.jobs), default=0) - self.start

    @property
    def widths(self) -> Widths:
        """What its program computes beside logprobs. Only a job that goes alone wants any of it."""
        return _widths(self.jobs)

    @property
    def piece(self) -> int:
        """How many tokens a row the next dispatch computes."""
        first, alone = self.jobs[0], len(self.jobs) == 1
        room = first.room - self.start
        return prefill_piece(first.sizes, alone=alone, start=self.start, remaining=self.remaining, room=room)

    def begin(self, known: int) -> None:
        """The first `known` tokens of each prompt are in its pages."""
        self.start = known
        for job in self.jobs:
            job.known = known
            if job.parent.known is None:  # else it was preempted, and is prefilled again
                job.parent.known = known

    def advance(self, tokens: int, scored: PieceScores | None) -> None:
        """That many more tokens are computed. scored: what was asked of the tokens after them, on the host, or None."""
        for job in self.jobs:
            end = min(self.start + tokens, job.length)
            if scored is not None and job.wants(self.start, end):
                assert job.parent.scores is not None
                job.parent.scores.take(self.start, end, job.row, scored)
        self.start += tokens


class Scheduler:
    """The queue, the group in prefill, the sequences that decode, and the pages of all of them."""

    def __init__(self, shapes: Shapes, max_slots: int, pool: PagePool) -> None:
        """No requests.

        shapes: the sizes of dispatches. max_slots: the most sequences that decode together. pool: the pages.
        """
        self._shapes = shapes
        self._max_slots = max_slots
        self._pool = pool
        self._parents: dict[str, ParentRequest] = {}
        self._waiting: deque[PrefillJob] = deque()  # by their starts
        self._now = 0  # the start of the job that was served last
        self._next_start: dict[str, int] = {}  # by owner
        self.group: PrefillGroup | None = None
        self.decoding: list[ActiveSequence] = []  # in the order in which they joined

    # ------------------------------------------------------------------ what it looks like
    @property
    def active(self) -> int:
        """Requests with a sequence in a slot."""
        return len({sequence.parent for sequence in self.decoding})

    @property
    def waiting(self) -> int:
        """Requests of which no sequence has a slot yet."""
        return len(self._parents) - self.active

    @property
    def running(self) -> list[ActiveSequence]:
        """The sequences that the next chunk decodes: those of which the devices are to be asked for more tokens."""
        return [sequence for sequence in self.decoding if sequence.remaining > 0]

    @property
    def busy(self) -> int:
        """How many slots the next chunk needs."""
        return len(self.running)

    def holds(self, request_id: str) -> bool:
        """Whether a request of that id is on its way."""
        return request_id in self._parents

    def expects(self, sequence: ActiveSequence) -> bool:
        """Whether what was decoded for the sequence is its own: it has not ended, and its request is not gone."""
        return self._parents.get(sequence.parent.request.request_id) is sequence.parent and not sequence.ended

    def held(self, sequences: Sequence[ActiveSequence]) -> tuple[int, Held]:
        """How many slots a dispatch for these sequences has, and the slot of each.

        Those of a shard lie together, the longest first: CPUs attend to a few neighbours at a time.
        """
        longest = sorted(sequences, key=lambda one: -one.cached)
        shards = [[one for one in longest if one.table.shard == shard] for shard in range(self._pool.shards)]
        slots = self._shapes.slots_for(len(shards) * max(map(len, shards)))
        each = slots // len(shards)
        return slots, [(shard * each + i, one) for shard, mine in enumerate(shards) for i, one in enumerate(mine)]

    @property
    def _slots_of_a_shard(self) -> int:
        return self._shapes.slots[-1] // self._pool.shards

    def snapshots(self) -> list[AdapterSnapshot]:
        """Every snapshot that a slot or the group in prefill uses, in a fixed order."""
        parents = [sequence.parent for sequence in self.decoding]
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
        job = self._job(parent, tokens, deque(sequences), score=parent.scores is not None, start=start)
        if overtaken := self._overtaken_by(job):
            job.start = overtaken[0].start
            for other in overtaken:
                other.start += len(sequences)
                other.overtaken += len(sequences)
            self._waiting = deque(sorted(self._waiting, key=lambda other: other.start))
        self._waiting.insert(bisect.bisect(self._waiting, job.start, key=lambda other: other.start), job)

    def _job(
        self, parent: ParentRequest, tokens_T: Int32, sequences: deque[ActiveSequence], *, score: bool, start: int
    ) -> PrefillJob:
        page, sizes = self._pool.page, self._shapes.pieces
        return PrefillJob(parent, tokens_T, sequences, score=score, page=page, sizes=sizes, start=start)

    def _overtaken_by(self, job: PrefillJob) -> list[PrefillJob]:
        """The waiting jobs behind which its owner's order would put an interactive job, and before which it goes."""
        request, count = job.parent.request, len(job.sequences)
        found: list[PrefillJob] = []
        if request.priority == "interactive":
            for other in reversed(self._waiting):
                theirs = other.parent.request
                if theirs.owner != request.owner:
                    continue
                begun = other.sequences[0].preempted
                if theirs.priority != "batch" or begun or other.overtaken + count > _MOST_OVERTAKING:
                    break
                found.append(other)
        return found[::-1]

    def remove(self, request_id: str, *, failed: bool = False) -> None:
        """Forget a request and free its slots and pages; unknown ids are fine.

        failed: its pages hold what is not finite. Otherwise those may that no chunk was decoded from yet.
        """
        parent = self._parents.pop(request_id, None)
        if parent is None:
            return
        if unserved := [job for job in self._waiting if job.parent is parent]:
            self._waiting = deque(job for job in self._waiting if job.parent is not parent)
            owner = parent.request.owner
            theirs = [job.start + len(job.sequences) for job in self._waiting if job.parent.request.owner == owner]
            self._next_start[owner] = max(theirs, default=min(job.start for job in unserved))
        for sequence in [one for one in self.decoding if one.parent is parent]:
            self.decoding.remove(sequence)
            self._release(sequence, failed=failed)
        if self.group is not None:
            for job in self.group.jobs:  # the row stays until the group is computed, for no request and without pages
                if job.parent is parent:
                    job.sequences.clear()
                    job.score = False
                    self._forget_past(job)
                    self._pool.release(job.table, spoiled=0 if failed else job.known // self._pool.page)
            self._end_group_without_sequences()

    def switch_snapshot(self, snapshot: AdapterSnapshot) -> None:
        """From now on every request that samples a snapshot of this id samples `snapshot`."""
        for parent in self._parents.values():
            if parent.snapshot is not None and parent.snapshot.snapshot_id == snapshot.snapshot_id:
                parent.snapshot = snapshot

    def clear(self) -> list[str]:
        """Forget all requests and what their pages hold; returns their ids."""
        requests = list(self._parents)
        self._parents.clear()
        self._waiting.clear()
        self._next_start.clear()
        self._now = 0
        self.group, self.decoding = None, []
        self._pool.clear()
        return requests

    def rest(self) -> None:
        """Nobody is there: the next owners begin alike. What pages hold of prompts stays."""
        assert not self._parents and not self._pool.used, "a request that is gone has left pages"
        self._next_start.clear()
        self._now = 0

    def finish(self) -> list[SampleResult]:
        """The results of requests whose sequences are all done; the scheduler forgets these requests."""
        results = [result for parent in self._parents.values() if (result := parent.result())]
        for result in results:
            del self._parents[result.request_id]
        return results

    # ------------------------------------------------------------------ prefill
    def next_group(self) -> PrefillGroup | None:
        """The group in prefill; if there is none, and a slot and pages are free, a new one from the queue's head."""
        if self.group is not None or not self._waiting or (free := self._max_slots - self.busy) < 1:
            return self.group
        first, fitting = self._waiting[0], 1
        if not first.alone:
            free -= len(first.sequences)
            for job in islice(self._waiting, 1, self._shapes.rows[-1]):
                if job.alone or free <= 0:
                    break
                free -= len(job.sequences)
                fitting += 1
        self.group = self._formed(list(islice(self._waiting, self._shapes.together(fitting))))
        return self.group

    def next_short_group(self, most_sequences: int, most_tokens: int) -> PrefillGroup | None:
        """Waiting requests with short prompts that want at most `most_tokens` tokens: they need no slot, and overtake.

        At most `most_sequences` sequences, and as many as a shard has slots, because all may lie in one. None when no
        such request waits, or when no other request is there.
        """
        jobs: list[PrefillJob] = []
        short = [job for job in self._waiting if not job.alone and job.is_over_in(most_tokens)]
        if not short or (len(short) == len(self._waiting) and not self.busy):
            return None
        most_sequences = min(most_sequences, self._slots_of_a_shard)
        for job in short:
            if len(job.sequences) <= most_sequences and len(jobs) < self._shapes.rows[-1]:
                jobs.append(job)
                most_sequences -= len(job.sequences)
        return self._formed(jobs) if jobs else None

    def _formed(self, jobs: list[PrefillJob]) -> PrefillGroup | None:
        """The group of the first of these waiting jobs, as many as there are pages for; None without pages for one.

        Later requests start behind them, not behind jobs that still wait.
        """
        known, began, roomiest = 0, 0, self._pool.roomiest()
        for i, job in enumerate(jobs):
            found = self._begun(job, _scope(jobs), (roomiest + i) % self._pool.shards)
            if found is None:
                break
            known, began = found, began + 1
        fewer = began if began in (0, len(jobs)) else self._shapes.together(began)
        for job in jobs[fewer:began]:
            self._pool.release(job.table)
        jobs = jobs[:fewer]
        if not jobs:
            return None
        self._waiting = deque(job for job in self._waiting if job not in jobs)
        served = max(job.start for job in jobs)
        self._now = max(self._now, min(served, self._waiting[0].start if self._waiting else served))
        group = PrefillGroup(jobs, at_least(self._shapes.rows, len(jobs)), _scope(jobs))
        each, used = group.rows // self._pool.shards, [0] * self._pool.shards
        for job in jobs:
            job.row = job.table.shard * each + used[job.table.shard]
            used[job.table.shard] += 1
        group.begin(known)
        return group

    def _begun(self, job: PrefillJob, scope: PrefixScope | None, shard: int) -> int | None:
        """Give a job its pages; how many of its tokens they hold already. None when too few pages are free.

        shard: where they are taken, unless pages of another shard hold its first tokens. A group's jobs take turns.
        """
        known, pool, ends = 0, self._pool, [0]
        if scope is None:
            job.table = PageTable(shard)
        else:
            job.table = pool.find(job.keys(scope))
            pages = len(job.table.pages)
            covered = job.length if pages == len(job.digests) else pages * pool.page
            ends = [min(border, job.length) for border in job.borders]
            ends = [end for end in ends if end <= covered and not job.wants(0, end)]
            if pool.states:
                job.branch = ends[-1]
                ends = [end for end in ends if not end or pool.find_state(Key(scope, job.states[end]), job.table)]
            known = max(ends)
            pool.cut(job.table, known)
        spare = sum(self._grows(one) for one in self.decoding if one.table.shard == job.table.shard)
        spare += len(job.sequences) if self.decoding and job.positions == job.length else 0
        if not pool.extend(job.table, known, job.positions, spare=spare) and known % pool.page:
            # Perhaps there is only no page to copy the last one to: it is computed again.
            known = max(end for end in ends if end <= known // pool.page * pool.page)
            if pool.states and not (known and scope and pool.find_state(Key(scope, job.states[known]), job.table)):
                pool.release_state(job.table)
            pool.cut(job.table, known)
        if not pool.extend(job.table, known, job.positions, spare=spare):
            pool.release(job.table)
            return None
        return known

    def _grows(self, sequence: ActiveSequence) -> bool:
        """Whether it may need more pages than it has."""
        return len(sequence.table.pages) < self._pool.pages_for(sequence.most_cached)

    def keep_state(self) -> None:
        """Remember the state that the group's prompt has now, if other prompts may go on from it."""
        group = self.group
        if self._pool.states and group is not None and group.scope is not None and group.remaining > 0:
            (job,) = group.jobs
            if job.keeps_state(group.start):
                job.past.append((group.start, self._pool.fork_state(job.table)))

    def join(self, alive: Callable[[PrefixScope], bool]) -> None:
        """Give free slots to the sequences of the prefilled group; when all have one, the group is gone.

        alive: whether requests of a scope may still come. Its prompt is then kept for them.
        """
        group, pool = self.group, self._pool
        assert group is not None, "no group is in prefill"
        scope, group.scope = group.scope, None
        if scope is not None and scope == _scope(group.jobs) and alive(scope):
            (job,) = group.jobs
            keys = job.keys(scope)
            if job.sequences[0].preempted:  # it keeps all of its pages to itself but those that it never writes
                keys = keys[: job.length // pool.page]
            pool.keep(keys, job.table)
            for border, past in [*job.past, (job.length, job.table)]:
                pool.keep_state(Key(scope, job.states[border]), past)
        for job in group.jobs:
            self._forget_past(job)
            free = self._max_slots - self.busy
            while job.sequences and free > 0 and (table := self._forked(job)) is not None:
                self._start(job.sequences.popleft(), job, table)
                free -= 1
            if not job.sequences:
                pool.release(job.table)
        self._end_group_without_sequences()

    def join_beside(self, group: PrefillGroup) -> list[ActiveSequence]:
        """Let the sequences of a short group decode, for a chunk in which they end. Those without pages wait again."""
        pool, joined = self._pool, []
        for job in group.jobs:
            known = self._parents.get(job.parent.request.request_id) is job.parent
            for sequence in job.sequences if known else ():
                table = pool.fork(job.table, job.table.shard)
                assert table is not None, "a fork in one shard takes no page"
                self._start(sequence, job, table)
                joined.append(sequence)
            pool.release(job.table, spoiled=None if known else 0)
        for sequence in tuple(joined):
            if not pool.extend(sequence.table, sequence.cached, sequence.cached + sequence.remaining):
                self._preempt(sequence)
                joined.remove(sequence)
        return joined

    def _start(self, sequence: ActiveSequence, job: PrefillJob, table: PageTable) -> None:
        """Let a sequence of the job decode in `table`, which is a fork of the job's."""
        sequence.table, sequence.unproven = table, job.known // self._pool.page
        if table.shard != job.table.shard or self._pool.kept(job.table):
            source = self._pool.fork(job.table, job.table.shard)
            assert source is not None, "a fork in one shard takes no page"
            self._pool.release_state(source)
            sequence.source = source
            if table.shard != source.shard:
                sequence.unproven = 0
        self.decoding.append(sequence)

    def _forked(self, job: PrefillJob) -> PageTable | None:
        """A table for one of a job's sequences, in the shard where the fewest decode and a slot is free."""
        counts = [0] * self._pool.shards
        for sequence in self.running:
            counts[sequence.table.shard] += 1
        shards = sorted(range(len(counts)), key=lambda shard: (counts[shard], shard != job.table.shard))
        tables = (self._pool.fork(job.table, shard) for shard in shards if counts[shard] < self._slots_of_a_shard)
        return next((table for table in tables if table is not None), None)

    def _forget_past(self, job: PrefillJob) -> None:
        for _, table in job.past:
            self._pool.release_state(table)
        job.past.clear()

    def _end_group_without_sequences(self) -> None:
        if self.group is not None and not any(job.sequences for job in self.group.jobs):
            self.group = None

    # ------------------------------------------------------------------ slots
    def make_room(self, steps: int) -> bool:
        """Give each sequence pages for `steps` more tokens; the youngest wait again where there are too few.

        False when tokens are not read yet: they are to be read, which shows who has ended, and room made again.
        """
        for sequence in self.decoding:
            if sequence.unproven is None:
                self._pool.release(sequence.source)
                self._pool.slide(sequence.table, sequence.cached)
        order = {parent: place for place, parent in enumerate(self._parents.values())}
        oldest = sorted(self.running, key=lambda one: (not one.preempted, order[one.parent], one.index))
        for shard in range(self._pool.shards):
            mine, served = [one for one in oldest if one.table.shard == shard], 0
            while served < len(mine):
                sequence = mine[served]
                end = sequence.cached + min(steps, sequence.remaining)
                if self._pool.extend(sequence.table, sequence.cached, end):
                    served += 1
                elif any(one.ahead for one in self.decoding):
                    return False
                else:
                    self._preempt(mine.pop())
        return True

    def end(self, sequence: ActiveSequence, *, finite: bool) -> None:
        """The sequence has ended: its slot and its pages are free. finite: and so is what was decoded after its end."""
        self.decoding.remove(sequence)
        self._release(sequence, failed=not finite)

    def _preempt(self, sequence: ActiveSequence) -> None:
        """Take a sequence's slot; it goes to the head of the queue."""
        self.decoding.remove(sequence)
        self._release(sequence)
        sequence.preempted = True
        self._waiting.appendleft(self._job(sequence.parent, sequence.prefix(), deque([sequence]), score=False, start=0))

    def _release(self, sequence: ActiveSequence, *, failed: bool = False) -> None:
        """Free its pages. What was decoded shows that they are finite; nobody knows of pages nobody decoded from.

        Nor of those which a chunk writes that is not read yet. It is computed before anything that they are taken for.
        """
        unproven = sequence.unproven
        if sequence.ahead and unproven is None:
            unproven = (sequence.cached - sequence.ahead) // self._pool.page
        self._pool.release(sequence.source, spoiled=0 if failed else sequence.unproven)
        self._pool.release(sequence.table, spoiled=0 if failed else unproven)


def _widths(jobs: list[PrefillJob]) -> Widths:
    scores = jobs[0].parent.scores
    return scores.widths if scores is not None and jobs[0].score else PLAIN


def _scope(jobs: list[PrefillJob]) -> PrefixScope | None:
    return jobs[0].parent.scope if len(jobs) == 1 and _widths(jobs) == PLAIN else None
