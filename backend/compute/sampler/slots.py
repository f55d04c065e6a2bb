"""The sequences that decode, their slots and pages, and the choice of sequences that wait again when pages run out."""

from __future__ import annotations

from collections.abc import Sequence

from tinkerflow.backend.compute.sampler.pages import PagePool, PageTable
from tinkerflow.backend.compute.sampler.prefill_jobs import PrefillJob
from tinkerflow.backend.compute.sampler.requests import ActiveRequest, ActiveSequence, SlotAssignment
from tinkerflow.backend.compute.sampler.shapes import Shapes, at_least


class DecodeSlots:
    """The sequences that decode, in the order in which they joined."""

    def __init__(self, shapes: Shapes, max_slots: int, pool: PagePool) -> None:
        """Start without sequences.

        shapes: the sizes of dispatches. max_slots: the most sequences that decode together. pool: the pages.
        """
        self._shapes, self._max_slots, self._pool = shapes, max_slots, pool
        self.sequences: list[ActiveSequence] = []

    @property
    def running(self) -> list[ActiveSequence]:
        """The sequences of the next chunk, which need more tokens than were requested from the devices."""
        return [sequence for sequence in self.sequences if sequence.remaining > 0]

    @property
    def busy(self) -> int:
        """The number of slots that the next chunk needs."""
        return len(self.running)

    @property
    def free(self) -> int:
        """The number of further sequences that may decode."""
        return self._max_slots - self.busy

    @property
    def each_shard(self) -> int:
        """The number of slots of each shard of the cache."""
        return self._shapes.slots[-1] // self._pool.shards

    def assign(
        self, sequences: Sequence[ActiveSequence], sizes: Sequence[int] | None = None
    ) -> tuple[int, SlotAssignment]:
        """Assign slots for a dispatch of these sequences. Returns the number of slots, and the slot of each sequence.

        sizes: the possible numbers of slots; None: as in any dispatch. The slots of a shard are contiguous. The longest
        sequences come first, because CPUs attend to a few neighbors at a time.
        """
        longest = sorted(sequences, key=lambda sequence: -sequence.cached)
        shards = [[each for each in longest if each.table.shard == shard] for shard in range(self._pool.shards)]
        slots = at_least(sizes or self._shapes.slots, len(shards) * max(map(len, shards)))
        size = slots // len(shards)
        return slots, [(shard * size + i, each) for shard, here in enumerate(shards) for i, each in enumerate(here)]

    def pages_to_spare(self, shard: int) -> int:
        """The number of sequences of a shard that may need another page before their end."""
        here = [each for each in self.sequences if each.table.shard == shard]
        return sum(len(each.table.pages) < self._pool.pages_for(each.most_cached) for each in here)

    def add(self, sequence: ActiveSequence, job: PrefillJob, table: PageTable) -> None:
        """Let a sequence decode. job: its prefilled prompt. table: a fork of the job's table."""
        pool = self._pool
        sequence.table, sequence.unverified_from = table, job.cached_tokens // pool.page
        if table.shard != job.table.shard or pool.last_page_is_kept(job.table):
            prompt_pages = pool.fork(job.table, job.table.shard)
            assert prompt_pages is not None, "a fork in one shard takes no page"
            pool.release_state(prompt_pages)
            sequence.prompt_pages = prompt_pages
            if table.shard != prompt_pages.shard:
                sequence.unverified_from = 0
        self.sequences.append(sequence)

    def fork_table(self, job: PrefillJob) -> PageTable | None:
        """A table for one of a job's sequences, in the shard with a free slot in which the fewest sequences decode."""
        counts = [0] * self._pool.shards
        for sequence in self.running:
            counts[sequence.table.shard] += 1
        shards = sorted(range(len(counts)), key=lambda shard: (counts[shard], shard != job.table.shard))
        tables = (self._pool.fork(job.table, shard) for shard in shards if counts[shard] < self.each_shard)
        return next((table for table in tables if table is not None), None)

    def reserve_pages(self, steps: int, order: Sequence[ActiveRequest]) -> list[ActiveSequence] | None:
        """Give each sequence pages for `steps` more tokens. Returns the sequences that had to leave for lack of pages.

        The youngest sequences leave first, and sequences that left before leave last. Returns None if tokens must be
        read first, because they may show that a sequence has ended. order: the requests, oldest first.
        """
        for sequence in self.sequences:
            if sequence.unverified_from is None:
                self._pool.release(sequence.prompt_pages)
                self._pool.release_outside_window(sequence.table, sequence.cached)
        place = {request: number for number, request in enumerate(order)}
        oldest = sorted(self.running, key=lambda each: (not each.preempted_at, place[each.parent], each.index))
        preempted: list[ActiveSequence] = []
        for shard in range(self._pool.shards):
            here, served = [each for each in oldest if each.table.shard == shard], 0
            while served < len(here):
                sequence = here[served]
                end = sequence.cached + min(steps, sequence.remaining)
                if self._pool.reserve(sequence.table, sequence.cached, end):
                    served += 1
                elif any(each.in_flight for each in self.sequences):
                    return None
                else:
                    preempted.append(here.pop())
                    self.remove(preempted[-1])
        return preempted

    def remove(self, sequence: ActiveSequence, *, tainted: bool = False) -> None:
        """Free the slot and the pages of a sequence. tainted: its pages contain NaN or infinity.

        Otherwise only pages without a decoded chunk, and pages that a chunk in flight writes, may contain them. The
        chunk in flight is computed before any dispatch that reuses the pages.
        """
        self.sequences.remove(sequence)
        unverified = sequence.unverified_from
        if sequence.in_flight and unverified is None:
            unverified = (sequence.cached - sequence.in_flight) // self._pool.page
        self._pool.release(sequence.prompt_pages, tainted_from=0 if tainted else sequence.unverified_from)
        self._pool.release(sequence.table, tainted_from=0 if tainted else unverified)
