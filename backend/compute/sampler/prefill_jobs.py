"""What is prefilled: jobs, each a prompt and the sequences that continue it, and groups of jobs that go together."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from tinkerflow.backend.compute.sampler.pages import Key, PageTable, pages_for
from tinkerflow.backend.compute.sampler.prompt_scores import PLAIN, PieceScores, Widths
from tinkerflow.backend.compute.sampler.requests import ActiveSequence, ParentRequest, PrefixScope
from tinkerflow.backend.compute.sampler.shapes import SHORT_PROMPT, prefill_piece, prefill_pieces
from tinkerflow.backend.spec.commands import Int32


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
        return long or bool(parent.request.images) or (self.score and widths_for([self]) != PLAIN)

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
        return widths_for(self.jobs)

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


def widths_for(jobs: list[PrefillJob]) -> Widths:
    """What the program that computes these jobs together gives beside logprobs."""
    scores = jobs[0].parent.scores
    return scores.widths if scores is not None and jobs[0].score else PLAIN


def scope_for(jobs: list[PrefillJob]) -> PrefixScope | None:
    """The requests that may share the pages of these jobs; None when they are computed in shapes of their own."""
    return jobs[0].parent.scope if len(jobs) == 1 and widths_for(jobs) == PLAIN else None
