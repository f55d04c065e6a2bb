"""Answers for the prefix cache: the next turn of a conversation begins with the last prompt and its answer.

The keys and values of decoded tokens are not kept. Decode rounds differently from prefill: 97 % of the keys and values
differ in their last bits (small-qwen3 on a CPU). A cache hit must not change a bit of a result. Answers are therefore
prefilled like prompts, in steps in which the group has no other work. The next turn then prefills only its new tokens.

    decoding --end--> waiting --next_piece, keep--> in the prefix cache
                         '--turn: the next prompt came first, or there was no time

A step computes one piece, up to the last border shared by all longer prompts. Most answers are never continued.
Therefore a project may have `_FREE` answers prefilled, and `_EARNED` more for each answer that a later prompt
continues. All decisions depend only on commands and on tokens that were read, so all processes of a group decide alike.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from tinkerflow.backend.compute.sampler.pages import Key, PagePool
from tinkerflow.backend.compute.sampler.prefill_jobs import PrefillGroup, PrefillJob
from tinkerflow.backend.compute.sampler.requests import ActiveRequest, ActiveSequence, PrefixScope
from tinkerflow.backend.compute.sampler.shapes import Shapes, at_least, prefill_pieces
from tinkerflow.backend.spec.commands import Int32

_MOST = 64  # answers that are remembered
_MOST_PIXELS = 2**25  # in the images of their prompts
_FREE = 8
_EARNED = 8


def shared_border(sizes: tuple[int, ...], tokens: int) -> int:
    """The end of the last piece shared by all prompts with the same first `tokens` tokens. sizes: of pieces, rising."""
    borders = accumulate(prefill_pieces(sizes, tokens + 2 * sizes[-1], tokens + 4 * sizes[-1]))
    return max((border for border in borders if border <= tokens), default=0)


@dataclass(eq=False)
class FinishedAnswer:
    """A finished sequence. tokens_T: its prompt and its tokens, up to the last border. begin: the prompt's last border.

    waiting: whether the answer has yet to be prefilled.
    """

    parent: ActiveRequest
    tokens_T: Int32
    begin: int
    waiting: bool = True


class Answers:
    """The last answers of one sampler, newest last."""

    def __init__(self, pool: PagePool, shapes: Shapes) -> None:
        """Start without answers. pool: the pages. shapes: the sizes of pieces and rows."""
        self._pool, self._shapes = pool, shapes
        self._answers: deque[FinishedAnswer] = deque()
        self._credit: dict[str, int] = defaultdict(lambda: _FREE)  # by project

    @property
    def waiting(self) -> bool:
        """Whether any answer has yet to be prefilled."""
        return any(self._may_prefill(answer) for answer in self._answers)

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()

    def drop(self, dead: Callable[[PrefixScope], bool]) -> None:
        """Forget the answers of dead scopes."""
        self._answers = deque(answer for answer in self._answers if not dead(answer.parent.scope))

    def add(self, sequence: ActiveSequence) -> None:
        """Remember a finished sequence, unless its prompt's pages already contain all that a next turn can share."""
        sizes, tokens_T = self._shapes.pieces, sequence.all_tokens()
        begin = shared_border(sizes, len(sequence.parent.request.prompt_T) - 1)
        border = shared_border(sizes, len(tokens_T))
        if border == begin:
            return
        parent = copy(sequence.parent)  # with the digests of its images, and without large lists
        parent.request, parent.done, parent.scores = replace(parent.request, prompt=None), {}, None
        self._answers.append(FinishedAnswer(parent, tokens_T[:border], begin))
        while len(self._answers) > _MOST or sum(map(_pixels, self._answers)) > _MOST_PIXELS:
            self._answers.popleft()

    def turn(self, parent: ActiveRequest) -> None:
        """Note an admitted request. If it continues an answer, its project may have more answers prefilled."""
        prompt_T, scope, owner = parent.request.prompt_T, parent.scope, parent.request.owner
        for answer in reversed(self._answers):
            length = len(answer.tokens_T)
            if answer.parent.scope == scope and np.array_equal(prompt_T[:length], answer.tokens_T):
                self._credit[owner] += _EARNED
                self._answers.remove(answer)
                return

    def next_piece(self, alive: Callable[[PrefixScope], bool]) -> PrefillGroup | None:
        """The next piece of the newest waiting answer, with its pages; None if no answer needs one.

        alive: whether requests of a scope may still come.
        """
        self.drop(lambda scope: not alive(scope))
        for answer in reversed(self._answers):
            if self._may_prefill(answer) and (group := self._begin(answer)) is not None:
                return group
        return None

    def keep(self, group: PrefillGroup) -> None:
        """Keep the pages of a computed piece, and all pages before it, for later prompts.

        No sequence has decoded after these tokens, so the pages may contain NaN. Other prompts never read it.
        """
        (job,) = group.jobs
        scope, border, page = job.parent.scope, group.start, self._pool.page
        self._pool.keep_prefix(job.keys(scope)[: border // page], job.table, unverified=True)
        self._pool.keep_state(Key(scope, job.state_digests[border]), job.table)
        self._pool.release(job.table, tainted_from=border // page)

    def _may_prefill(self, answer: FinishedAnswer) -> bool:
        return answer.waiting and self._credit[answer.parent.request.owner] > 0

    def _begin(self, answer: FinishedAnswer) -> PrefillGroup | None:
        """Begin a piece of an answer. None: the answer is already cached, its prompt is not, or pages are missing."""
        pool, parent, scope = self._pool, answer.parent, answer.parent.scope
        last_T = np.zeros(1, np.int32)  # a job prefills all tokens but the last
        tokens_T = np.concatenate([answer.tokens_T, last_T])
        job = PrefillJob(parent, tokens_T, deque(), score=False, page=pool.page, sizes=self._shapes.pieces)
        table = job.table = pool.find_prefix(job.keys(scope))
        covered = len(table.pages) * pool.page
        ends = [end for end in reversed(job.borders) if end <= covered]
        start = next(end for end in ends if not end or not pool.states or self._find_state(job, scope, end))
        pool.truncate(table, start)
        group = PrefillGroup([job], at_least(self._shapes.rows, 1), scope, start)
        if answer.begin <= start < job.length and pool.reserve(table, start, start + group.piece):
            job.row = table.shard * (group.rows // pool.shards)
            return group
        pool.release(table)
        answer.waiting = False
        if start == job.length:
            self._credit[parent.request.owner] -= 1
        return None

    def _find_state(self, job: PrefillJob, scope: PrefixScope, end: int) -> bool:
        return self._pool.find_state(Key(scope, job.state_digests[end]), job.table)


def _pixels(answer: FinishedAnswer) -> int:
    return sum(image.pixels_HWC.size for image in answer.parent.request.images)
