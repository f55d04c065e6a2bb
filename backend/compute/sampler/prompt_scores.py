"""The scores that a request wants of its prompt: logprobs, most likely tokens, given tokens' logprobs, alternatives.

This file is the part on the host; `prefill.score_piece` computes the scores on the devices. The number of each is
padded to one of a few widths (`Widths`), so that few programs are compiled. Requests that want only logprobs share one
program.

Letters: B rows, Q tokens of a piece, k top tokens, K given tokens, A alternatives, N rows of a result (all prompt
tokens but the first).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import flax.struct
import numpy as np

from tinkerflow.backend.compute.mesh import Array
from tinkerflow.backend.compute.sampler.sampling import ALTERNATIVES, UniformStream, normal_temperature, width_for
from tinkerflow.backend.spec.commands import NO_LOGPROB, Candidates, Float32, PromptWishes, SampleRequest, SampleResult


@dataclass(frozen=True)
class Widths:
    """How many of each kind of score a program computes, padded; 0: none."""

    top: int = 0
    targets: int = 0
    alternatives: int = 0


PLAIN = Widths()


@flax.struct.dataclass
class PieceQueries:
    """The tokens to score at every position: the next token, given tokens, and alternatives drawn by random numbers.

    next_BQ int32; targets_BQK int32, uniform_BQA float32 and temperature_B float32 (0: greedy), or None if not wanted.
    """

    next_BQ: Array
    targets_BQK: Array | None = None
    uniform_BQA: Array | None = None
    temperature_B: Array | None = None


@flax.struct.dataclass
class PieceScores:
    """Logprobs float32 and token ids int32 by position. Fields outside the program's widths are None."""

    logprobs_BQ: Array
    top: tuple[Array, Array] | None = None  # tokens_BQk, logprobs_BQk
    targets_BQK: Array | None = None
    alternatives: tuple[Array, Array] | None = None  # tokens_BQA, logprobs_BQA


class PromptScores:
    """The scores that one request wants of its prompt, as far as computed."""

    def __init__(self, request: SampleRequest, vocab: int) -> None:
        """Start without scores. vocab: of the base model; the longest possible list of top tokens."""
        wishes = request.prompt or PromptWishes()
        rows = len(request.prompt_T) - 1
        self._request, self._wishes = request, wishes
        self._first = 0 if wishes.last_n is None else rows - wishes.last_n  # the first row whose logprob is wanted
        # For every token of the prompt. The first token has no logprob, because no row scores it.
        self._logprobs_T = np.full(rows + 1, np.nan, np.float32)
        lists = (rows + 1, wishes.top)
        self._top = Candidates(np.zeros(lists, np.int32), np.full(lists, NO_LOGPROB, np.float32))
        targets = 0 if wishes.targets_TK is None else wishes.targets_TK.shape[1]
        self._targets_NK = np.zeros((rows, targets), np.float32)
        self._alternatives = Candidates(
            np.zeros((rows, wishes.alternatives), np.int32), np.zeros((rows, wishes.alternatives), np.float32)
        )
        self._uniforms = UniformStream(request.seed, ALTERNATIVES)
        self.finite = True  # whether every wanted logprob so far is a finite number
        self.widths = Widths(
            top=min(width_for(wishes.top), vocab),
            targets=width_for(targets),
            alternatives=width_for(wishes.alternatives),
        )

    def reset(self) -> None:
        """Start again, because all rows will be recomputed."""
        self._uniforms = UniformStream(self._request.seed, ALTERNATIVES)

    def wants(self, start: int, end: int) -> bool:
        """Whether any score of rows [start, end) is wanted."""
        return end > start and (end > self._first or self.widths.targets + self.widths.alternatives > 0)

    def fill(self, start: int, end: int, row: int, queries: PieceQueries) -> None:
        """Write the queries of rows [start, end) into row `row` of `queries` (on the host). Call this in order."""
        count = end - start
        if (targets_NK := self._wishes.targets_TK) is not None and queries.targets_BQK is not None:
            queries.targets_BQK[row, :count, : targets_NK.shape[1]] = np.maximum(targets_NK[start:end], 0)
        if (k := self._wishes.alternatives) and queries.uniform_BQA is not None and queries.temperature_B is not None:
            queries.uniform_BQA[row, :count, :k] = self._uniforms.draw(count * k).reshape(count, k)
            queries.temperature_B[row] = normal_temperature(self._request.temperature)

    def add(self, start: int, end: int, row: int, scored: PieceScores) -> None:
        """Store the computed scores of rows [start, end), which begin at position 0 of row `row` of `scored`."""
        rows, count = slice(start, end), end - start
        wanted = slice(max(start, self._first), end)  # without the rows that last_n excludes
        tokens, shift = slice(wanted.start + 1, end + 1), slice(wanted.start - start, count)
        self._logprobs_T[tokens] = scored.logprobs_BQ[row, shift]
        added: list[Float32] = [self._logprobs_T[tokens]]
        if scored.top is not None:
            k = self._wishes.top
            self._top.tokens_Nk[tokens] = scored.top[0][row, shift, :k]
            self._top.logprobs_Nk[tokens] = scored.top[1][row, shift, :k]
        if scored.targets_BQK is not None and self._wishes.targets_TK is not None:
            targets = self._wishes.targets_TK[rows]
            self._targets_NK[rows] = np.where(targets >= 0, scored.targets_BQK[row, :count, : targets.shape[1]], 0)
            added.append(self._targets_NK[rows])
        if scored.alternatives is not None:
            k = self._wishes.alternatives
            self._alternatives.tokens_Nk[rows] = scored.alternatives[0][row, :count, :k]
            self._alternatives.logprobs_Nk[rows] = scored.alternatives[1][row, :count, :k]
            added.append(self._alternatives.logprobs_Nk[rows])
        self.finite = self.finite and all(bool(np.isfinite(part).all()) for part in added)

    def add_to(self, result: SampleResult) -> SampleResult:
        """`result` with the wanted scores."""
        wishes = self._wishes
        return replace(
            result,
            prompt_logprobs_T=self._logprobs_T if self._request.prompt_logprobs else None,
            top=self._top if wishes.top else None,
            targets_TK=None if wishes.targets_TK is None else self._targets_NK,
            alternatives=self._alternatives if wishes.alternatives else None,
        )


def empty_queries(widths: Widths, rows: int, tokens: int) -> PieceQueries:
    """Host arrays for a piece of `rows` by `tokens`, with the fields that a program of `widths` needs."""
    cells = (rows, tokens)
    return PieceQueries(
        next_BQ=np.zeros(cells, np.int32),
        targets_BQK=np.zeros((*cells, widths.targets), np.int32) if widths.targets else None,
        uniform_BQA=np.full((*cells, widths.alternatives), 0.5, np.float32) if widths.alternatives else None,
        temperature_B=np.zeros(rows, np.float32) if widths.alternatives else None,
    )


def prompt_scores(request: SampleRequest, vocab: int) -> PromptScores | None:
    """The collector of the scores of a request's prompt; None if the request wants no scores."""
    return PromptScores(request, vocab) if request.prompt_logprobs or request.prompt is not None else None
