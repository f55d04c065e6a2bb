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
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from tinkerflow.backend.compute.sampler.pages import Key, PagePool, PageTable
from tinkerflow.backend.compute.sampler.prefill_jobs import PrefillGroup, PrefillJob, scope_for
from tinkerflow.backend.compute.sampler.requests import ActiveSequence, ParentRequest, PrefixScope, SlotAssignment
from tinkerflow.backend.compute.sampler.shapes import Shapes, at_least
from tinkerflow.backend.compute.sampler.snapshot_cache import AdapterSnapshot
from tinkerflow.backend.spec.commands import Int32, SampleResult

_MOST_OVERTAKING = 256  # sequences that go before a batch request that came earlier


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
        self._beside: PrefillGroup | None = None  # of short requests, until they join
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

    @property
    def requests(self) -> list[str]:
        """The ids of all requests that are on their way."""
        return list(self._parents)

    def holds(self, request_id: str) -> bool:
        """Whether a request of that id is on its way."""
        return request_id in self._parents

    def expects(self, sequence: ActiveSequence) -> bool:
        """Whether what was decoded for the sequence is its own: it has not ended, and its request is not gone."""
        return self._parents.get(sequence.parent.request.request_id) is sequence.parent and not sequence.ended

    def held(self, sequences: Sequence[ActiveSequence]) -> tuple[int, SlotAssignment]:
        """How many slots a dispatch for these sequences has, and the slot of each.

        Those of a shard lie together, the longest first: CPUs attend to a few neighbours at a time.
        """
        longest = sorted(sequences, key=lambda one: -one.cached)
        shards = [[one for one in longest if one.table.shard == shard] for shard in range(self._pool.shards)]
        slots = at_least(self._shapes.slots, len(shards) * max(map(len, shards)))
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
        start = max(self._now, self._next_start.get(request.owner, 0))
        self._next_start[request.owner] = start + len(sequences)
        score = parent.scores is not None and not sequences[0].tokens
        job = self._job(parent, sequences[0].prefix(), deque(sequences), score=score, start=start)
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
        requests = self.requests
        self._parents.clear()
        self._waiting.clear()
        self._next_start.clear()
        self._now = 0
        self.group, self._beside, self.decoding = None, None, []
        self._pool.clear()
        return requests

    def restart(self) -> None:
        """All requests wait again, in the order in which they came, with their tokens so far; pages hold nothing."""
        jobs = [*self._waiting, *(job for group in (self.group, self._beside) if group for job in group.jobs)]
        sequences = [*self.decoding, *(one for job in jobs for one in job.sequences)]
        parents = dict(self._parents)
        self.clear()
        self._parents = parents
        for parent in parents.values():
            fresh: list[ActiveSequence] = []
            for sequence in [one for one in sequences if one.parent is parent]:
                sequence.restart()
                if sequence.tokens:
                    self.admit(parent, [sequence])
                else:
                    fresh.append(sequence)
            if fresh:
                if parent.scores is not None:
                    parent.scores.restart()
                self.admit(parent, fresh)

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
        self._beside = self._formed(jobs) if jobs else None
        return self._beside

    def _formed(self, jobs: list[PrefillJob]) -> PrefillGroup | None:
        """The group of the first of these waiting jobs, as many as there are pages for; None without pages for one.

        Later requests start behind them, not behind jobs that still wait.
        """
        known, began, roomiest = 0, 0, self._pool.roomiest()
        for i, job in enumerate(jobs):
            found = self._begun(job, scope_for(jobs), (roomiest + i) % self._pool.shards)
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
        group = PrefillGroup(jobs, at_least(self._shapes.rows, len(jobs)), scope_for(jobs))
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
        if scope is not None and scope == scope_for(group.jobs) and alive(scope):
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
        self._beside = None
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
