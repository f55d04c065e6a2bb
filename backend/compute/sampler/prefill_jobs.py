"""Prefill on the host: jobs (a prompt and the sequences that continue it), and groups of jobs in one dispatch."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from tinkerflow.backend.compute.sampler.pages import Key, PageTable, pages_for
from tinkerflow.backend.compute.sampler.prompt_scores import PLAIN, PieceScores, Widths
from tinkerflow.backend.compute.sampler.requests import ActiveRequest, ActiveSequence, PrefixScope
from tinkerflow.backend.compute.sampler.shapes import SHORT_PROMPT, prefill_piece, prefill_pieces
from tinkerflow.backend.spec.commands import Int32


@dataclass(eq=False)
class PrefillJob:
    """Sequences that continue the same tokens. All but the last token are prefilled; the last is decode's first input.

    score: whether the request wants prompt scores that have yet to be computed. page: positions of a page. sizes: the
    allowed sizes of the job's pieces. table, row: its pages and its row in a group, once it is in a group.
    cached_tokens: how many tokens these pages already contained. state_branch: how many tokens have cached pages, but
    possibly no state. A state is kept there for the next prompt. kept_states: by number of tokens, the states that
    other prompts may continue.
    """

    parent: ActiveRequest
    tokens_T: Int32
    sequences: deque[ActiveSequence]
    score: bool
    page: int
    sizes: tuple[int, ...]
    table: PageTable = field(default_factory=lambda: PageTable(0))
    row: int = 0
    cached_tokens: int = 0
    state_branch: int = 0
    kept_states: list[tuple[int, PageTable]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """The number of tokens to prefill."""
        return len(self.tokens_T) - 1

    @property
    def positions(self) -> int:
        """How many positions need pages when the job begins: after a preemption, twice as many as at the preemption."""
        return max([self.length, *(min(each.most_cached, 2 * each.preempted_at) for each in self.sequences)])

    @property
    def alone(self) -> bool:
        """Whether the job needs its own group. Other jobs would wait for a long prompt, images or prompt scores."""
        parent, long = self.parent, self.length > SHORT_PROMPT
        return long or bool(parent.request.images) or (self.score and widths_for([self]) != PLAIN)

    @property
    def capacity(self) -> int:
        """The positions in the pages of its prompt."""
        return pages_for(self.length, self.page) * self.page

    @cached_property
    def borders(self) -> list[int]:
        """Where its pieces begin and end if it is prefilled alone: from 0 to its length, or a little beyond."""
        return [0, *accumulate(prefill_pieces(self.sizes, self.length, self.capacity))]

    @cached_property
    def digests(self) -> list[bytes]:
        """For each page of a prompt that is prefilled alone: a digest of the previous page, tokens, images, and pieces.

        Together with the weights, these determine the content of a page: every token up to the page's end, and the
        pieces in which the tokens are computed. A cached page has exactly the bits that would be computed, and the
        remaining tokens are computed in the same pieces. So a result does not depend on the content of the cache.
        """
        tokens_T: Int32 = self.tokens_T[: self.length]
        digests, digest = [], b""
        for begin in range(0, self.length, self.page):
            end = begin + self.page
            pieces = [(start, stop) for start, stop in pairwise(self.borders) if start < end and stop > begin]
            content = repr(pieces).encode() + self.parent.image_key(begin, end, pieces) + tokens_T[begin:end].tobytes()
            digests.append(digest := hashlib.sha256(digest + content).digest())
        return digests

    @cached_property
    def state_digests(self) -> Mapping[int, bytes]:
        """For each border: a digest of all earlier tokens and their pieces, which determine the state there."""
        digests, digest = {0: b""}, b"state"
        for start, stop in pairwise(self.borders):
            piece, here_T = [(start, stop)], self.tokens_T[start : min(stop, self.length)]
            content = repr((start, stop)).encode() + self.parent.image_key(start, stop, piece) + here_T.tobytes()
            digests[min(stop, self.length)] = digest = hashlib.sha256(digest + content).digest()
        return digests

    def keeps_state(self, border: int) -> bool:
        """Whether to keep the state at a border for other prompts.

        Two states are kept: at the last border that a longer prompt with this beginning shares, and where prompts seem
        to branch.
        """
        longer = {0, *accumulate(prefill_pieces(self.sizes, 2 * self.length + self.sizes[-2], 4 * self.capacity))}
        return border in (self.state_branch, max(set(self.borders) & longer & set(range(self.length + 1))))

    def keys(self, scope: PrefixScope) -> list[Key]:
        """The keys of its prompt's pages for the requests of `scope`."""
        return [Key(scope, digest) for digest in self.digests]

    def ends_within(self, tokens: int) -> bool:
        """Whether its sequences end within this number of tokens in one dispatch."""
        return all(each.remaining <= tokens and each.matcher is None for each in self.sequences)

    def wants_scores(self, start: int, end: int) -> bool:
        """Whether the request wants scores of the tokens after the prompt's tokens [start, end)."""
        scores = self.parent.scores
        return self.score and scores is not None and scores.wants(start, min(end, self.length))


@dataclass(eq=False)
class PrefillGroup:
    """Jobs that are prefilled together. rows: the number of rows of the dispatch.

    scope: the requests that may share the prompt's pages, as of the group's start; None if the shapes of the
    computation depend on other jobs.
    """

    jobs: list[PrefillJob]
    rows: int
    scope: PrefixScope | None
    start: int = 0  # computed tokens of every row

    @property
    def remaining(self) -> int:
        """The number of tokens that the longest row still needs."""
        return max((job.length for job in self.jobs), default=0) - self.start

    @property
    def widths(self) -> Widths:
        """The scores that its program computes besides logprobs; none unless a job is prefilled alone."""
        return widths_for(self.jobs)

    @property
    def piece(self) -> int:
        """How many tokens of each row the next dispatch computes."""
        first, alone = self.jobs[0], len(self.jobs) == 1
        capacity = first.capacity - self.start
        return prefill_piece(first.sizes, alone=alone, start=self.start, remaining=self.remaining, capacity=capacity)

    def begin(self, cached_tokens: int) -> None:
        """Begin the group. The first tokens of each prompt are already in its pages."""
        self.start = cached_tokens
        for job in self.jobs:
            job.cached_tokens = cached_tokens
            if job.parent.cache_hit_tokens is None:  # otherwise it was preempted, and is being prefilled again
                job.parent.cache_hit_tokens = cached_tokens

    def advance(self, tokens: int, scored: PieceScores | None) -> None:
        """Record a computed piece of this size. scored: its scores on the host; None if no job wants any."""
        for job in self.jobs:
            end = min(self.start + tokens, job.length)
            if scored is not None and job.wants_scores(self.start, end):
                assert job.parent.scores is not None
                job.parent.scores.add(self.start, end, job.row, scored)
        self.start += tokens


def widths_for(jobs: list[PrefillJob]) -> Widths:
    """The scores, besides logprobs, of the program that computes these jobs together."""
    scores = jobs[0].parent.scores
    return scores.widths if scores is not None and jobs[0].score else PLAIN


def scope_for(jobs: list[PrefillJob]) -> PrefixScope | None:
    """The requests that may share the pages of these jobs; None if the jobs are computed in special shapes."""
    return jobs[0].parent.scope if len(jobs) == 1 and widths_for(jobs) == PLAIN else None
