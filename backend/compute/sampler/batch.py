"""The steps of the decode batch: the next work for the devices.

A step prefills a bounded number of prompt tokens, or decodes one chunk for every slot; if there is little to prefill,
it does both. So all steps take about the same time, and training commands and short requests between steps never wait
long.

On GPUs and TPUs, the batch runs ahead: a step dispatches its chunk, and then reads the chunk of the previous step. The
devices compute while the host distributes tokens, answers, and waits for the next command. Last tokens stay on the
devices. The host finds the end of a sequence one chunk later, and drops tokens after the end. If the host must read
tokens first, because of penalties, a constraint, or a preemption, a chunk is read before the next one is dispatched.
Constrained sequences decode token by token within a step, and on CPUs the others still decode whole chunks. This order
depends only on commands and on chunks that were read, and a chunk is always read in the same step. So all processes of
a group agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from tinkerflow.backend.compute.sampler.answers import Answers
from tinkerflow.backend.compute.sampler.chunks import ChunkPipeline, TokensOf
from tinkerflow.backend.compute.sampler.drafts import DraftedStep, Drafts
from tinkerflow.backend.compute.sampler.model import SamplerModel
from tinkerflow.backend.compute.sampler.pages import PagePool
from tinkerflow.backend.compute.sampler.prompt_scores import PieceScores
from tinkerflow.backend.compute.sampler.requests import ActiveRequest, ActiveSequence
from tinkerflow.backend.compute.sampler.scheduler import Scheduler
from tinkerflow.backend.compute.sampler.shapes import Shapes
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import SampleResult

_SHORT = 4  # sequences of short requests that are decoded together
_PREFILL_STEPS = 3  # the most consecutive steps that only prefill, while running sequences wait
_WORTH = 4  # the batch waits only if at least one sequence joins for every `_WORTH` in it


class DecodeBatch:
    """Runs the steps of one sampler."""

    def __init__(
        self,
        scheduler: Scheduler,
        model: SamplerModel,
        pool: PagePool,
        shapes: Shapes,
        chunks: ChunkPipeline,
        answers: Answers,
        drafts: Drafts | None,
        *,
        prefill_budget: int,
        runs_ahead: bool,
        host_decides: bool,
    ) -> None:
        """Create an idle batch.

        scheduler: its requests. model: the devices. pool: the pages. shapes: the sizes of dispatches. chunks: gives
        sequences their tokens. answers: prefilled for the prefix cache. drafts: None if each token is decoded by
        itself. prefill_budget: the prompt tokens, including padding, that one step prefills. runs_ahead: a chunk is
        dispatched before the last one is read. host_decides: as in `Platform`; if true, a dispatch decodes one token or
        a whole chunk.
        """
        self._chunks, self._answers, self._drafts = chunks, answers, drafts
        self._scheduler, self._model = scheduler, model
        self._pool, self._shapes = pool, shapes
        self._prefill_budget, self._runs_ahead, self._host_decides = prefill_budget, runs_ahead, host_decides
        self._last_prefill: PieceScores | jax.Array | None = None  # of the last step that only prefilled
        self._prefill_steps = 0  # consecutive steps that only prefilled
        self._served_short = False  # in the last step
        self.dispatched: list[ActiveRequest] = []  # the requests of the last dispatch, newest last

    def clear(self) -> None:
        """Forget everything about earlier steps."""
        self._served_short = False
        self._chunks.clear()
        self._answers.clear()
        self.forget_dispatches()

    def forget_dispatches(self) -> None:
        """Make the next step independent of all earlier steps. Unread chunks are dropped."""
        self._prefill_steps, self._last_prefill, self.dispatched = 0, None, []
        self._chunks.forget_in_flight()

    def run_step(self, *, wait: bool) -> None:
        """Run one step. wait: return after the devices have computed it."""
        # Short requests are answered immediately, and the batch continues in the next step.
        self._served_short = not self._served_short and self._serve_short()
        if not self._served_short:
            self._prefill_or_decode()
        if wait:
            self._chunks.read_in_flight()
            jax.block_until_ready(self._model.last_piece)

    def prefill_answer(self) -> None:
        """Compute the next piece of an answer for the prefix cache. There must be no requests."""
        if (group := self._answers.next_piece(self._chunks.scope_is_alive)) is not None:
            (job,) = group.jobs
            self._model.snapshots.use([job.parent.snapshot])
            self._model.prefill_piece(group)
            self._answers.keep(group)
            jax.block_until_ready(self._model.last_piece)  # a command that arrives meanwhile waits for only one piece

    # ------------------------------------------------------------------ prefill, or a chunk of the batch
    def _prefill_or_decode(self) -> None:
        waited = self._prefill_steps > 0 and not self._may_prefill_again()
        if waited or self._prefill() < self._prefill_budget:
            self._prefill_steps = 0
            self._decode()
        else:
            self._prefill_steps += 1
            self._chunks.read_in_flight()
            before, self._last_prefill = self._last_prefill, self._model.last_piece
            # A command between steps must not wait for several of them.
            jax.block_until_ready(before if self._runs_ahead else self._last_prefill)

    def _may_prefill_again(self) -> bool:
        """Whether one more step may only prefill, because many sequences join soon, or no sequence decodes."""
        busy, group, steps = self._scheduler.slots.busy, self._scheduler.group, _PREFILL_STEPS - self._prefill_steps
        if not busy:
            return True
        if group is not None and group.rows * group.remaining > steps * self._prefill_budget:
            return False
        joining = self._scheduler.wanted_slots() - busy
        return steps > 0 and joining * _WORTH >= busy

    def _prefill(self) -> int:
        """Compute as much of the waiting prompts as a step may. Returns the number of tokens, with padding."""
        spent, scheduler = 0, self._scheduler
        while spent < self._prefill_budget and (group := scheduler.next_group()) is not None:
            self.dispatched = [job.parent for job in group.jobs]
            self._model.snapshots.use(scheduler.snapshots())
            while group.remaining > 0 and spent < self._prefill_budget:
                spent += self._model.prefill_piece(group)
                scheduler.keep_state()
            if group.remaining > 0:
                break
            self._chunks.fail_unscored(group)
            if scheduler.group is not None:
                scheduler.start_group(self._chunks.scope_is_alive)
            if scheduler.group is not None:
                break  # no free slots are left, so the rest of the group waits
        return spent

    def _decode(self) -> None:
        """Decode one chunk of every sequence; token by token if a sequence needs the host."""
        scheduler = self._scheduler
        self.dispatched = [sequence.parent for sequence in scheduler.slots.sequences] or self.dispatched
        if any(sequence.needs_host for sequence in scheduler.slots.running):
            self._chunks.read_in_flight()
        while not scheduler.reserve_pages(steps := self._steps(scheduler.slots.running)):
            self._chunks.read_in_flight()
        running = scheduler.slots.running
        if not running:  # a group in prefill occupies the pages; preempted sequences start after it
            self._chunks.read_in_flight()
            return
        self._model.snapshots.use(scheduler.snapshots())  # prefill may have given their columns to other snapshots
        stepwise = self._stepwise(running)
        self._decode_stepwise(stepwise, steps)
        served = set(stepwise)
        others = [sequence for sequence in running if sequence not in served]
        if others and self._drafts is not None:
            others, steps = self._decode_drafted(self._drafts, others, steps)
        if others:
            self._chunks.dispatch(others, steps)

    def _decode_drafted(
        self, drafts: Drafts, sequences: list[ActiveSequence], steps: int
    ) -> tuple[list[ActiveSequence], int]:
        """Decode with drafts, step by step, while there are any. Returns the remaining sequences and steps."""
        for left in range(steps, 0, -1):
            if (step := drafts.next_step(sequences)) is None:
                return sequences, left
            self._verify(drafts, step)
            running = set(self._scheduler.slots.running)
            sequences = [
                sequence
                for sequence in sequences
                if sequence in running
                and self._pool.reserve(
                    sequence.table, sequence.cached, sequence.cached + min(left - 1, sequence.remaining)
                )
            ]
            if not sequences:
                break
        return [], 0

    def _verify(self, drafts: Drafts, step: DraftedStep) -> None:
        """Decode one token in each row of a step, and give each sequence its verified tokens."""
        decoded = self._model.read_chunk(self._model.decode_chunk(step.slots, step.rows, 1, None))
        for sequence in step.drafts:
            where = 0, step.places[sequence]
            logprobs_N = np.asarray(decoded.logprobs_CS)[where]
            finite = int(np.append(np.isfinite(logprobs_N), False).argmin())
            tokens_N = np.asarray(decoded.tokens_CS)[where].tolist()
            new = TokensOf(tokens_N, logprobs_N.tolist(), finite, decoded, where)
            right = drafts.accept(step, sequence, tokens_N)
            sequence.uniforms.give_back(step.numbers[sequence][right:])
            if self._scheduler.is_active(sequence):  # otherwise another sample of its request has failed
                self._chunks.append(sequence, new, right)

    def _stepwise(self, running: list[ActiveSequence]) -> list[ActiveSequence]:
        """The sequences that decode token by token: constrained sequences, because each token decides which may be
        next.

        If a step takes as long for few rows as for many, the other sequences join. Otherwise they would need another
        step.
        """
        constrained = [sequence for sequence in running if sequence.matcher is not None]
        alone = self._shapes.rows_are_dear or self._shapes.invariant
        return running if constrained and not alone else constrained

    def _decode_stepwise(self, sequences: list[ActiveSequence], steps: int) -> None:
        """Decode `steps` tokens of each sequence, and read every token before the next one."""
        for _ in range(steps):
            self._advance_matchers(sequences)
            sequences = [sequence for sequence in sequences if self._scheduler.is_active(sequence)]
            if not sequences:
                return
            self._chunks.dispatch(sequences, 1)
            self._chunks.read_in_flight()

    def _advance_matchers(self, sequences: list[ActiveSequence]) -> None:
        """Compute the allowed next tokens of constrained sequences. If there are none, the request fails."""
        for sequence in sequences:
            if sequence.matcher is None or not self._scheduler.is_active(sequence):
                continue
            try:
                sequence.matcher.advance(sequence.tokens)
            except UserError as error:
                self._scheduler.remove_request(sequence.parent.id)
                self._chunks.failed.append(SampleResult(sequence.parent.id, error=error.message))

    def _steps(self, running: Sequence[ActiveSequence]) -> int:
        """How many tokens to decode: until the first sequence reaches its limit, within half a chunk to a chunk."""
        chunk = self._model.chunk
        if not running:
            return 1
        remaining = [sequence.remaining for sequence in running]
        if self._host_decides:
            return self._compiled_steps(max(remaining))
        return min(chunk, max(remaining), max(min(remaining), -(-chunk // 2)))

    def _compiled_steps(self, steps: int) -> int:
        """The smallest number of steps, at least `steps`, for a compiled program."""
        return self._model.chunk if self._host_decides and (steps > 1 or self._shapes.invariant) else steps

    def _serve_short(self) -> bool:
        """Decode up to `_SHORT` sequences that end within a chunk separately from the batch, if there is a batch.

        In the batch they would wait for a free slot, and then for a chunk of every sequence.
        """
        scheduler = self._scheduler
        group = scheduler.next_short_group(_SHORT, self._model.chunk)
        if group is None:
            return False
        self.dispatched = [job.parent for job in group.jobs]
        self._model.snapshots.use([*scheduler.snapshots(), *(job.parent.snapshot for job in group.jobs)])
        while group.remaining > 0:
            self._model.prefill_piece(group)
        self._chunks.fail_unscored(group)
        if sequences := scheduler.start_short_group(group):
            self._chunks.dispatch(sequences, self._compiled_steps(max(sequence.remaining for sequence in sequences)))
        return True
