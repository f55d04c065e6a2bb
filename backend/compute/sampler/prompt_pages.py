"""The pages and states of prompts in prefill: reserved for a group, and kept for prompts with the same beginning."""

from __future__ import annotations

from tinkerflow.backend.compute.sampler.pages import Key, PagePool, PageTable
from tinkerflow.backend.compute.sampler.prefill_jobs import PrefillGroup, PrefillJob, scope_for
from tinkerflow.backend.compute.sampler.requests import PrefixScope
from tinkerflow.backend.compute.sampler.shapes import Shapes, at_least
from tinkerflow.backend.compute.sampler.slots import DecodeSlots


class PromptPages:
    """Gives the prompts of a group their pages, and keeps prompts in the prefix cache."""

    def __init__(self, shapes: Shapes, pool: PagePool, slots: DecodeSlots) -> None:
        """shapes: the sizes of dispatches. pool: the pages. slots: the sequences that decode, which may need pages."""
        self._shapes, self._pool, self._slots = shapes, pool, slots

    def begin_group(self, jobs: list[PrefillJob]) -> PrefillGroup | None:
        """Form a group of the first waiting jobs, as many as there are pages for; None if no job gets its pages."""
        cached, begun, emptiest = 0, 0, self._pool.emptiest_shard()
        for number, job in enumerate(jobs):
            tokens = self._reserve_prompt(job, scope_for(jobs), (emptiest + number) % self._pool.shards)
            if tokens is None:
                break
            cached, begun = tokens, begun + 1
        fewer = begun if begun in (0, len(jobs)) else self._shapes.together(begun)
        for job in jobs[fewer:begun]:
            self._pool.release(job.table)
        jobs = jobs[:fewer]
        if not jobs:
            return None
        group = PrefillGroup(jobs, at_least(self._shapes.rows, len(jobs)), scope_for(jobs))
        rows, used = group.rows // self._pool.shards, [0] * self._pool.shards
        for job in jobs:
            job.row = job.table.shard * rows + used[job.table.shard]
            used[job.table.shard] += 1
        group.begin(cached)
        return group

    def _reserve_prompt(self, job: PrefillJob, scope: PrefixScope | None, shard: int) -> int | None:
        """Give a job its pages. Returns how many of its tokens they already contain; None: too few pages are free.

        shard: for new pages, unless the pages of its first tokens are cached in another shard.
        """
        pool, cached, ends = self._pool, 0, [0]
        if scope is None:
            job.table = PageTable(shard)
        else:
            job.table = pool.find_prefix(job.keys(scope))
            pages = len(job.table.pages)
            covered = job.length if pages == len(job.digests) else pages * pool.page
            ends = [min(border, job.length) for border in job.borders]
            ends = [end for end in ends if end <= covered and not job.wants_scores(0, end)]
            if pool.states:
                job.state_branch = ends[-1]
                ends = [end for end in ends if not end or self._find_state(job, scope, end)]
            cached = max(ends)
            pool.truncate(job.table, cached)
        spare = self._slots.pages_to_spare(job.table.shard)
        spare += len(job.sequences) if self._slots.sequences and job.positions == job.length else 0
        if not pool.reserve(job.table, cached, job.positions, spare=spare) and cached % pool.page:
            # If only the copy of the last cached page lacks a page, that cached page is computed again.
            cached = max(end for end in ends if end <= cached // pool.page * pool.page)
            if pool.states and not (cached and scope and self._find_state(job, scope, cached)):
                pool.release_state(job.table)
            pool.truncate(job.table, cached)
        if not pool.reserve(job.table, cached, job.positions, spare=spare):
            pool.release(job.table)
            return None
        return cached

    def _find_state(self, job: PrefillJob, scope: PrefixScope, end: int) -> bool:
        return self._pool.find_state(Key(scope, job.state_digests[end]), job.table)

    def keep_state(self, group: PrefillGroup) -> None:
        """Remember the current state of a group's prompt, if other prompts may continue it."""
        if self._pool.states and group.scope is not None and group.remaining > 0:
            (job,) = group.jobs
            if job.keeps_state(group.start):
                job.kept_states.append((group.start, self._pool.fork_state(job.table)))

    def keep_prompt(self, job: PrefillJob, scope: PrefixScope) -> None:
        """Keep the pages and states of a prefilled prompt for other requests of `scope`."""
        keys = job.keys(scope)
        if job.sequences[0].preempted_at:  # the sequence shares only pages that it never writes to
            keys = keys[: job.length // self._pool.page]
        self._pool.keep_prefix(keys, job.table)
        for border, table in [*job.kept_states, (job.length, job.table)]:
            self._pool.keep_state(Key(scope, job.state_digests[border]), table)

    def leave_group(self, job: PrefillJob, *, tainted: bool = False) -> None:
        """Free a job in prefill. Its row stays until the group is computed, with no request and no pages.

        tainted: its pages contain NaN or infinity. Otherwise only pages that were not cached before may contain them.
        """
        job.sequences.clear()
        job.score = False
        self.release_states(job)
        self._pool.release(job.table, tainted_from=0 if tainted else job.cached_tokens // self._pool.page)

    def release_states(self, job: PrefillJob) -> None:
        """Release the states that were kept for other prompts."""
        for _, table in job.kept_states:
            self._pool.release_state(table)
        job.kept_states.clear()
