"""Conversations of the trained model with environments, in groups that begin from the same row."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.artifacts import log_line
from tinkerflow.tasks.pipelines.control import refuse_after_interruption
from tinkerflow.tasks.pipelines.environments import (
    UNAVAILABLE,
    Asked,
    Environment,
    EnvironmentMaker,
    EnvironmentUnavailableError,
    Reply,
    check_methods,
    checked_messages,
    checked_reward,
    facts_of,
    is_unavailable,
)
from tinkerflow.tasks.pipelines.parameters import JudgeParameters
from tinkerflow.tasks.pipelines.render import Renderer
from tinkerflow.tasks.pipelines.row_errors import left_out, shorten, show, too_many_wrong
from tinkerflow.tasks.pipelines.rows import Message, Row
from tinkerflow.tasks.pipelines.user_code import blocking_reported, call_in_loop, described, user_frames

if TYPE_CHECKING:
    import tinker
    from tinker.types import ProvenanceSpans

log = logging.getLogger(__name__)

HELD_OUT = 2**32 - 1  # replaces the number of a training step in the seeds of held-out samples
_BLOCKED_SECONDS = 60.0  # after this time, code that blocks the event loop is logged, unless its limit is shorter
_ADVICE = "call blocking code with `await asyncio.to_thread(…)`"
_RAREST = -80.0  # a log probability; the threshold of a rarer token would exceed float32
_REPEATED = 2**31  # plus the attempt's number, in the seeds of conversations that are begun again


class FailedRowError(Exception):
    """The environment or the reward of a row failed, or the row's messages cannot be rendered."""


@dataclass(frozen=True)
class SampledTurn:
    """One sampled answer: its prompt's tokens, its own tokens [N], and their log probabilities [N] when sampled.

    sequence_id: the server's name for the answer and for the record of its sampling.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    logprobs: npt.NDArray[np.float64]
    sequence_id: str

    @property
    def tokens(self) -> list[int]:
        """The prompt and the answer."""
        return [*self.prompt, *self.answer]


@dataclass(frozen=True)
class Trajectory:
    """Consecutive turns of an episode as one sequence: the prompt of each turn begins with all earlier tokens.

    A conversation of many turns is therefore computed and trained once, not once for each turn. N is the number of
    sampled tokens of all turns.
    """

    turns: Sequence[SampledTurn]

    @property
    def tokens(self) -> list[int]:
        """All tokens. The last prompt contains those of earlier turns."""
        return self.turns[-1].tokens

    @property
    def logprobs(self) -> npt.NDArray[np.float64]:
        """The log probabilities [N] of the sampled tokens when they were sampled."""
        return np.concatenate([turn.logprobs for turn in self.turns])

    @property
    def answers(self) -> npt.NDArray[np.intp]:
        """The indices [N] of the sampled tokens among all tokens."""
        return np.concatenate([len(turn.prompt) + np.arange(len(turn.answer)) for turn in self.turns])

    async def logprobs_by(
        self, sampler: tinker.SamplingClient, prompt: Sequence[int] | None = None
    ) -> npt.NDArray[np.float64]:
        """The log probabilities [N] of the sampled tokens under another model.

        prompt: the tokens that this model sees instead of the first turn's prompt; None: the same tokens.
        """
        import tinker

        tokens, places_N, first = self.tokens, self.answers, self.turns[0].prompt
        last = len(tokens) - len(first)
        seen = tinker.ModelInput.from_ints([*(first if prompt is None else prompt), *tokens[len(first) :]])
        logprobs = await sampler.compute_logprobs(seen, prompt_logprobs_last_n=last)
        return np.array([logprobs[place - len(tokens)] for place in places_N], np.float64)

    def datum(
        self, advantages_N: npt.NDArray[np.float64], weight: float | None = None, trust_region: float = 0.0
    ) -> tinker.Datum:
        """The input for a policy's loss, with its provenance. Only sampled tokens are learned.

        advantages_N: the sampled tokens' advantages. weight: each sampled token's weight; None = not sent.
        trust_region: how far a token's probability may move, sent as thresholds of its ratio (Qi et al., 2026,
        "DPPO-Binary-TV"); 0 = not sent.
        """
        import tinker

        tokens, places_N = self.tokens, self.answers

        def placed(values_N: npt.NDArray[np.float64]) -> tinker.TensorData:
            values_T = np.zeros(len(tokens) - 1, np.float32)
            values_T[places_N - 1] = values_N
            return tinker.TensorData.from_numpy(values_T)

        optional: dict[str, npt.NDArray[np.float64]] = {}
        if weight is not None:
            optional["weights"] = np.full(len(places_N), weight)
        if trust_region:
            reach_N = trust_region / np.exp(np.maximum(self.logprobs, _RAREST))
            optional |= {"clip_low_threshold": np.maximum(1 - reach_N, 0), "clip_high_threshold": 1 + reach_N}
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:], np.int64)),
                "logprobs": placed(self.logprobs),
                "advantages": placed(advantages_N),
                **{name: placed(values_N) for name, values_N in optional.items()},
            },
        )
        first, *between, last = self._spans()
        inputs = [first, *between, replace(last, length=last.length - 1)]
        targets = [replace(first, offset=1, length=first.length - 1), *between, last]
        return datum.with_provenance(inputs, targets)

    def _spans(self) -> ProvenanceSpans:
        """The origin of all tokens: for each turn the new part of its prompt, and its answer."""
        from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

        spans: ProvenanceSpans = []
        known = 0
        for turn in self.turns:
            of_prompt, of_answer = len(turn.prompt) - known, len(turn.answer)
            spans.append(PromptProvenanceSpan(sequence_id=turn.sequence_id, offset=known, length=of_prompt))
            spans.append(SampledProvenanceSpan(sequence_id=turn.sequence_id, length=of_answer))
            known += of_prompt + of_answer
        return spans


@dataclass
class Episode:
    """One conversation: the messages so far, the model's answers, and the sum of the rewards.

    row: the beginning of the row's prompt. environment: None until it is made. answered: the indices of the model's
    answers among the messages. parts: sums of the parts of the rewards. attempt: how many earlier attempts at this
    conversation were interrupted. interrupted: why the environment became unavailable; "" while it is available.
    """

    row: str = ""
    environment: Environment | None = None
    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Mapping[str, Any]] = ()
    turns: list[SampledTurn] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    ended: bool = False
    attempt: int = 0
    interrupted: str = ""

    def add_reward(self, reply: Reply) -> None:
        """Add a reply's reward and its parts. UserError: one of them is not a finite number."""
        self.reward += checked_reward(reply.reward)
        for name, part in reply.parts.items():
            shown = str(name)  # a record has texts as names
            self.parts[shown] = self.parts.get(shown, 0.0) + checked_reward(part, f"part {name!r} of the reward")

    def trajectories(self) -> list[Trajectory]:
        """The turns in order, as few sequences as possible.

        A turn begins a new sequence if its prompt does not begin with all earlier tokens, for example because the
        chat template drops the reasoning of earlier answers.
        """
        found: list[list[SampledTurn]] = []
        for turn in self.turns:
            before = found[-1][-1].tokens if found else []
            if before and list(turn.prompt[: len(before)]) == before:
                found[-1].append(turn)
            else:
                found.append([turn])
        return [Trajectory(turns) for turns in found]


@dataclass(frozen=True)
class Lost:
    """A conversation, or all conversations of a row, that a step does not learn from. repeated: it was begun again."""

    prompt: str
    reason: str
    repeated: bool = False


def is_varied(group: Sequence[Episode]) -> bool:
    """Whether a group's rewards differ. Equal rewards give no advantages (Yu et al., 2025, "DAPO", section 3.2)."""
    return len({episode.reward for episode in group}) > 1


@dataclass(frozen=True)
class Rollouts:
    """Holds conversations: `group_size` for each row, with at most `max_turns` answers of at most `max_tokens` tokens.

    Tokens are sampled at temperature 1 from the model's whole distribution, as the losses assume. A conversation ends
    when its next prompt and answer may exceed `max_context` tokens.

    judge: name of the reward or environment for errors. max_bad_fraction: share of rows with an environment or reward
    that may fail; `failures` contains their prompts and errors, by the ids of the `Row` objects. parameter: the data
    set of the rows, for errors. environment_seconds: limit for each call of an environment or reward.
    environment_retries: how many times a conversation is begun again if its environment was unavailable. After that it
    is left out of its group. A group that is left with too few conversations to compare is also left out.
    warned: the lines that were logged. plain_calls: makes plain functions run one after another, in the order of
    samples. A function with state therefore gives the same rewards again. places: limits the rows that may have
    conversations at the same time; None = no limit.
    """

    renderer: Renderer
    make: EnvironmentMaker
    group_size: int
    max_tokens: int
    max_turns: int = 1
    max_context: int = 2**31
    max_bad_fraction: float = 0.0
    parameter: str = "data"
    environment_seconds: float = 600.0
    environment_retries: int = 2
    judge: str = "environment"
    failures: dict[int, str] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    plain_calls: asyncio.Lock = field(default_factory=asyncio.Lock)
    places: asyncio.Semaphore | None = None

    @classmethod
    def judged(cls, parameters: JudgeParameters, make: EnvironmentMaker, renderer: Renderer, **others: Any) -> Rollouts:
        """Rollouts that a reward or environment judges.

        parameters: the reward or environment, and its limits. make: its `environment_maker`. others: fields of this
        class.
        """
        return cls(
            renderer,
            make,
            parameters.group_size,
            max_turns=parameters.max_turns,
            environment_seconds=parameters.environment_seconds,
            environment_retries=parameters.environment_retries,
            judge=parameters.judge,
            **others,
        )

    async def groups(
        self,
        sampler: tinker.SamplingClient,
        rows: Sequence[Row],
        seed: Sequence[int],
        lost: list[Lost] | None = None,
        *,
        needed: bool = True,
    ) -> list[list[Episode]]:
        """Hold a group of conversations for each row, all concurrently. Equal seeds give equal samples of a model.

        A row whose environment fails gets no group.

        sampler: the model's. rows: the beginnings of the conversations. seed: for their samples. lost: a list that gets
        the conversations that are begun again or left out. needed: whether it is an error if no row gets a group.
        UserError: no row got a group. EnvironmentUnavailableError: no row got a group, because no environment was
        available within `environment_seconds`.
        """
        lost = [] if lost is None else lost
        conversations = [self._group(sampler, row, [*seed, i], lost) for i, row in enumerate(rows)]
        with blocking_reported(min(self.environment_seconds, _BLOCKED_SECONDS), self._warn_of_blocking):
            results = await asyncio.gather(*conversations, return_exceptions=True)
        failed = [(row, result) for row, result in zip(rows, results, strict=True)
                  if isinstance(result, FailedRowError)]  # fmt: skip
        for row, error in failed:
            self._note_failure(row, error)
            lost.append(Lost(_begin_of(row), str(error)))
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, FailedRowError):
                raise result
        groups = [result for result in results if isinstance(result, list) and len(result) >= min(2, self.group_size)]
        if groups or not needed:
            return groups
        if failed:
            row, error = failed[0]
            raise UserError(f"all {len(rows)} rows of this step failed; the first one: {_begin_of(row)!r}: {error}")
        reason = lost[-1].reason
        raise EnvironmentUnavailableError(f"all conversations of this step were interrupted; the last one: {reason}")

    def refuse_failures(self, rows: int) -> None:
        """Raise UserError if more of the `rows` rows have failed than max_bad_fraction allows."""
        if len(self.failures) > self.max_bad_fraction * rows:
            refused = too_many_wrong(len(self.failures), rows, self.max_bad_fraction, self.parameter)
            raise UserError(f"{refused}; first: {left_out([*self.failures.values()], 'the log of the run')}")

    def _note_failure(self, row: Row, error: FailedRowError) -> None:
        if id(row) not in self.failures:
            self.failures[id(row)] = f"{_begin_of(row)!r}: {error}"
            line = f"row {_begin_of(row)!r} is left out: {error}"
            log.warning(line)
            frames = traceback.format_list(user_frames(error.__cause__)) if error.__cause__ else []
            log_line("\n".join([line, *frames]), logging.WARNING)

    def _warn_of_blocking(self, place: str) -> None:
        self._warn(f"{self.judge}: {place} blocks the event loop, and the whole run waits: {_ADVICE}")

    def _warn(self, line: str) -> None:
        """Log a line once."""
        if line not in self.warned:
            self.warned.add(line)
            log.warning(line)
            log_line(line, logging.WARNING)

    async def _group(
        self, sampler: tinker.SamplingClient, row: Row, seed: Sequence[int], lost: list[Lost]
    ) -> list[Episode]:
        episodes: list[Episode] = []
        async with self.places or nullcontext():
            for attempt in range(self.environment_retries + 1):
                if not (missing := self.group_size - len(episodes)):
                    break
                seed_now = [*seed, _REPEATED + attempt] if attempt else seed
                for episode in await self._conversations(sampler, row, seed_now, missing):
                    episode.attempt = attempt
                    if not episode.interrupted:
                        episodes.append(episode)
                        continue
                    lost.append(Lost(episode.row, episode.interrupted, attempt < self.environment_retries))
        return episodes

    async def _conversations(
        self, sampler: tinker.SamplingClient, row: Row, seed: Sequence[int], count: int
    ) -> list[Episode]:
        """Hold `count` conversations that begin with a row. Some may be interrupted."""
        episodes = [Episode(_begin_of(row), tools=row.tools) for _ in range(count)]
        try:
            await _all(self._begin(episode, row) for episode in episodes)
            for turn in range(self.max_turns):
                going = self._continuing(episodes)
                if not going:
                    break
                answers = await self._answers(sampler, [prompt for _, prompt in going], [*seed, turn])
                await _all(self._take(episode, answer) for (episode, _), answer in zip(going, answers, strict=True))
            await _all(map(self._stop, episodes))
        finally:
            await asyncio.gather(*(self._close(episode.environment) for episode in episodes))
        return episodes

    async def _answers(
        self, sampler: tinker.SamplingClient, prompts: Sequence[tuple[int, ...]], seed: Sequence[int]
    ) -> list[SampledTurn]:
        """Sample one answer to each prompt. Equal prompts share one request."""
        import tinker

        waiting = {}
        for number, prompt in enumerate(dict.fromkeys(prompts)):
            params = tinker.SamplingParams(
                max_tokens=self.max_tokens,
                temperature=1.0,
                stop=self.renderer.stop,
                seed=int(np.random.SeedSequence([*seed, number]).generate_state(1)[0]),
            )
            waiting[prompt] = sampler.sample(tinker.ModelInput.from_ints(list(prompt)), prompts.count(prompt), params)
        sequences = {prompt: iter((await future).sequences) for prompt, future in waiting.items()}
        return [
            SampledTurn(prompt, sampled.tokens, np.array(sampled.logprobs, np.float64), sampled.sequence_id)
            for prompt, sampled in ((prompt, next(sequences[prompt])) for prompt in prompts)
        ]

    def _continuing(self, episodes: Sequence[Episode]) -> list[tuple[Episode, tuple[int, ...]]]:
        """The conversations of a row that continue, with their prompts. Equal conversations are tokenized once."""
        prompts: dict[str, tuple[int, ...]] = {}
        going = []
        for episode in episodes:
            if episode.ended or episode.interrupted:
                continue
            if (said := repr(episode.messages)) not in prompts:
                with _of_row("messages"):
                    prompts[said] = tuple(self.renderer.prompt(episode.messages, episode.tools))
            if self._has_space(episode, prompts[said]):
                going.append((episode, prompts[said]))
        return going

    def _has_space(self, episode: Episode, prompt: Sequence[int]) -> bool:
        """Whether the context has space for another answer. FailedRowError: it has no space for the first answer."""
        fits = len(prompt) + self.max_tokens <= self.max_context
        if not fits and not episode.turns:
            tokens = f"{len(prompt)} tokens, and an answer may have {self.max_tokens}"
            raise FailedRowError(f"the prompt has {tokens}: the context has {self.max_context}")
        return fits

    async def _begin(self, episode: Episode, row: Row) -> None:
        async with self._asking(episode):
            episode.environment = await call_in_loop(self.make, facts_of(row))
            check_methods(episode.environment, type(episode.environment).__qualname__)
            episode.messages += checked_messages(await call_in_loop(episode.environment.begin))

    async def _take(self, episode: Episode, turn: SampledTurn) -> None:
        assert episode.environment is not None, "only conversations that have begun have turns"
        text = self.renderer.text(turn.answer)
        async with self._asking(episode, text):
            reply = await call_in_loop(episode.environment.answered, text)
            if not isinstance(reply, Reply):
                raise UserError(f"`answered` must return a Reply, got {type(reply).__name__} {shorten(show(reply))}")
            episode.add_reward(reply)
            episode.turns.append(turn)
            episode.answered.append(len(episode.messages))
            episode.messages += [Message(role="assistant", content=text), *(more := checked_messages(reply.messages))]
            episode.ended = not more

    async def _stop(self, episode: Episode) -> None:
        """Add the last reward of an environment that did not end the conversation."""
        stopped = getattr(episode.environment, "stopped", None)
        if stopped is not None and not (episode.ended or episode.interrupted):
            async with self._asking(episode):
                episode.add_reward(await call_in_loop(stopped))

    @asynccontextmanager
    async def _asking(self, episode: Episode, answer: str | None = None) -> AsyncIterator[None]:
        """Limit calls of the environment in the block to `environment_seconds`, and note if it is unavailable.

        answer: the answer to reward, if any.
        """
        refuse_after_interruption()
        plain = isinstance(episode.environment, Asked) and episode.environment.plain and answer is not None
        async with self.plain_calls if plain else nullcontext():
            limit, now = asyncio.timeout(self.environment_seconds), asyncio.get_running_loop().time
            ends = now() + self.environment_seconds
            try:
                async with limit:
                    with _of_row(self.judge, answer):
                        yield
                if now() > ends:
                    raise TimeoutError  # the code blocked the event loop, so nothing interrupted the code
            except UNAVAILABLE as error:
                late = f"took longer than environment_seconds, {self.environment_seconds:g} s"
                if limit.expired():
                    reason = f"{late}: raise it, or make the code faster"
                else:
                    reason = f"{late}, and blocked the event loop: {_ADVICE}" if now() > ends else described(error)
                episode.interrupted = f"{self.judge}: {reason}"
                self._warn(f"row {episode.row!r}: a conversation is interrupted: {episode.interrupted}")

    async def _close(self, environment: Environment | None) -> None:
        if (close := getattr(environment, "close", None)) is not None:
            try:
                async with asyncio.timeout(self.environment_seconds):
                    await call_in_loop(close)
            except (Exception, SystemExit):
                log.warning("an environment could not be closed", exc_info=True)


def _begin_of(row: Row) -> str:
    """The beginning of the row's prompt, for people. Rows may have the same beginning."""
    return shorten(row.prompt[-1]["content"])


@contextmanager
def _of_row(part: str, answer: str | None = None) -> Iterator[None]:
    """Convert errors of user code on one row, which runs in the block, to FailedRowError, or to one of UNAVAILABLE.

    part: name of the code for the error. answer: the model's answer that the code was given.
    """
    try:
        yield
    except UNAVAILABLE:
        raise
    except (Exception, SystemExit) as error:  # a reward may execute a program of the model, which may call exit()
        if is_unavailable(error):
            raise EnvironmentUnavailableError(described(error)) from error
        reason = error.message if isinstance(error, UserError) else described(error)
        raise FailedRowError(f"{part}: {reason}{'' if answer is None else f'; answer: {shorten(answer)!r}'}") from error


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Wait until all calls have ended, then raise the first error, so that no call continues after its row failed."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if result is not None:
            raise result
