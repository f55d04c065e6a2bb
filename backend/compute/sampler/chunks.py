"""Chunks of decoded tokens: dispatched, read, and distributed to their sequences.

On GPUs and TPUs, a chunk is dispatched before the previous chunk is read (`batch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tinkerflow.backend.compute.sampler.answers import Answers
from tinkerflow.backend.compute.sampler.decode import Decoded
from tinkerflow.backend.compute.sampler.drafts import Drafts
from tinkerflow.backend.compute.sampler.model import Chunk, SamplerModel
from tinkerflow.backend.compute.sampler.pages import PagePool
from tinkerflow.backend.compute.sampler.prefill_jobs import PrefillGroup
from tinkerflow.backend.compute.sampler.requests import ActiveRequest, ActiveSequence, PrefixScope, bytes_of
from tinkerflow.backend.compute.sampler.scheduler import Scheduler
from tinkerflow.backend.compute.sampler.shapes import Shapes
from tinkerflow.backend.spec.commands import Candidates, Int16, NewTokens, SampleResult
from tinkerflow.backend.spec.limits import MAX_RECORDED_BYTES
from tinkerflow.backend.spec.supports import Supports


class TokensOf(NamedTuple):
    """N decoded tokens of one sequence on the host. finite: the number of leading logprobs that are finite.

    where: their place in `decoded`, which contains the most likely tokens, if they are listed. The methods return
    copies, because a part of an array would keep the arrays of all sequences in memory.
    """

    tokens_N: list[int]
    logprobs_N: list[float]
    finite: int
    decoded: Decoded
    where: tuple[int | slice, int | list[int]]

    def top(self, count: int, k: int) -> Candidates:
        """The `k` most likely tokens at the first `count` positions."""
        top_CSk, logprobs_CSk = self.decoded.top_CSk, self.decoded.top_logprobs_CSk
        assert top_CSk is not None and logprobs_CSk is not None
        tokens_Nk, logprobs_Nk = (np.asarray(array)[self.where][:count, :k] for array in (top_CSk, logprobs_CSk))
        return Candidates(tokens_Nk.copy(), logprobs_Nk.copy())

    def routes(self, count: int) -> Int16 | None:
        """The experts of the first `count` tokens, [N, L * k]; None in a model without experts."""
        if self.decoded.routes_CSLk is None:
            return None
        return np.asarray(self.decoded.routes_CSLk)[self.where][:count].reshape(count, -1).copy()

    def supports(self, count: int) -> Supports:
        """The supports of the first `count` tokens."""
        rows = self.decoded.supports
        assert rows is not None
        tokens_Ns, log_mass_N = (np.asarray(array)[self.where][:count] for array in (rows.tokens_Ss, rows.log_mass_S))
        return Supports.of(tokens_Ns, log_mass_N.copy())


class ChunkPipeline:
    """Dispatches chunks, and gives each sequence its tokens. failed, streamed: results that the caller collects."""

    def __init__(
        self,
        scheduler: Scheduler,
        model: SamplerModel,
        pool: PagePool,
        shapes: Shapes,
        answers: Answers,
        drafts: Drafts | None,
        *,
        runs_ahead: bool,
        host_decides: bool,
        weights: str,
    ) -> None:
        """Start with no chunk in flight. For the arguments see `DecodeBatch`.

        answers: gets the sequences that end. weights: names the base weights in errors.
        """
        self._scheduler, self._model, self._pool, self._shapes = scheduler, model, pool, shapes
        self._answers, self._drafts = answers, drafts
        self._runs_ahead, self._host_decides, self._weights = runs_ahead, host_decides, weights
        self._in_flight: Chunk[ActiveSequence] | None = None  # dispatched, but not read yet
        self.failed: list[SampleResult] = []
        self.streamed: list[NewTokens] = []

    def clear(self) -> None:
        """Forget all results, and the chunk in flight."""
        self.failed, self.streamed = [], []
        self.forget_in_flight()

    def forget_in_flight(self) -> None:
        """Drop the unread chunk."""
        self._in_flight = None

    def dispatch(self, sequences: Sequence[ActiveSequence], steps: int) -> None:
        """Dispatch `steps` tokens of every sequence, and read the previous chunk.

        If the batch does not run ahead, the new chunk is also read immediately.
        """
        alone = self._host_decides and steps < self._model.chunk
        sizes = self._shapes.slots_of_one_token if alone else self._shapes.slots
        slots, assigned = self._scheduler.slots.assign(sequences, sizes)
        before = self._in_flight
        self._in_flight = self._model.decode_chunk(slots, assigned, steps, before)
        for sequence in sequences:
            sequence.in_flight += steps
        if before is not None:
            self._distribute(before)
        if not self._runs_ahead:
            self.read_in_flight()

    def read_in_flight(self) -> None:
        """Read the chunk in flight, if there is one. No sequence then has unread tokens."""
        chunk, self._in_flight = self._in_flight, None
        if chunk is not None:
            self._distribute(chunk)

    def _distribute(self, chunk: Chunk[ActiveSequence]) -> None:
        """Give each sequence its decoded tokens, as soon as they are computed. Sequences that end free their slots."""
        decoded, steps = self._model.read_chunk(chunk), chunk.steps
        finite_CS = np.isfinite(np.asarray(decoded.logprobs_CS)[:steps])
        finite_S = np.where(finite_CS.all(axis=0), steps, finite_CS.argmin(axis=0)).tolist()  # finite tokens
        tokens_SC = np.asarray(decoded.tokens_CS[:steps]).T.tolist()
        logprobs_SC = np.asarray(decoded.logprobs_CS[:steps]).T.tolist()
        for slot, sequence in chunk.slots:
            sequence.in_flight -= steps
            if self._scheduler.is_active(sequence):  # otherwise it ended in the previous chunk, or its request is gone
                where = slice(steps), slot
                new = TokensOf(tokens_SC[slot], logprobs_SC[slot], finite_S[slot], decoded, where)
                self.append(sequence, new, steps)

    def append(self, sequence: ActiveSequence, new: TokensOf, right: int) -> None:
        """Append the first `right` tokens to a sequence, which may end at any of them."""
        count = min(right, sequence.parent.max_tokens - len(sequence.tokens))
        if new.finite < count:
            self._fail(sequence.parent)
            return
        start, tainted = len(sequence.tokens), new.finite < len(new.tokens_N)
        top = new.top(count, k) if (k := sequence.parent.request.topk_sample) else None
        routes_Nn = new.routes(count) if sequence.parent.request.routes else None
        supports = new.supports(count) if sequence.parent.request.supports else None
        sequence.parent.recorded += bytes_of(top, routes_Nn, supports)
        if sequence.parent.recorded > MAX_RECORDED_BYTES:
            self._refuse_large(sequence.parent, tainted=tainted)
            return
        if sequence.append(new.tokens_N[:right], new.logprobs_N[:right], top, routes_Nn, supports):
            # Tokens after the end may be NaN, although all tokens of the sequence are finite.
            self._scheduler.slots.remove(sequence, tainted=tainted)
            if self.scope_is_alive(sequence.parent.scope):
                self._answers.add(sequence)
        if sequence.parent.request.stream:
            self.streamed.append(sequence.new_tokens(start, top))
        if self._drafts is not None:
            self._drafts.note(sequence, len(sequence.tokens) - start)
        if tainted and not sequence.ended:
            self._scheduler.restart(sequence)  # a wrong draft left NaN at positions that it will attend to

    def fail_unscored(self, group: PrefillGroup) -> None:
        """Fail the requests of a prefilled group whose scores are not finite."""
        for parent in dict.fromkeys(job.parent for job in group.jobs if job.sequences):  # else it is gone, or running
            if parent.scores is not None and not parent.scores.finite:
                self._fail(parent)

    def _fail(self, parent: ActiveRequest) -> None:
        """Answer a request with the error that its weights gave NaN or infinity, and drop their cached prompts."""
        name = self._weights if parent.snapshot is None else f"snapshot {parent.snapshot.snapshot_id!r}"
        text = f"{name} gave logits that are not finite for this prompt; its weights may have diverged"
        self._scheduler.remove_request(parent.id, tainted=True)
        self._pool.drop_keys(lambda scope: scope == parent.scope, tainted=True)
        self.failed.append(SampleResult(parent.id, error=text))

    def _refuse_large(self, parent: ActiveRequest, *, tainted: bool) -> None:
        """Answer a request with the error that its samples record too much. tainted: its pages may contain NaN."""
        asked, most = parent.request, MAX_RECORDED_BYTES // 10**6
        text = (
            f"topk_sample_logprobs {asked.topk_sample} with num_samples {asked.num_samples} and max_tokens "
            f"{parent.max_tokens}: the answer's lists of tokens, experts and supports must take at most {most} MB; "
            "lower one of the three"
        )
        self._scheduler.remove_request(parent.id, tainted=tainted)
        self.failed.append(SampleResult(parent.id, error=text))

    def scope_is_alive(self, scope: PrefixScope) -> bool:
        """Whether requests of a scope may still arrive, because its snapshot is not dropped."""
        return self._model.snapshots.alive(scope.snapshot)
