"""Greedy answers of a model to the prompts of rows, and scores of weights: on rows with answers, or by a reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel, Field

from tinkerflow.backend.catalog.rollouts import StepRollouts
from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.environments import EnvironmentUnavailableError
from tinkerflow.tasks.pipelines.parameters import Metric
from tinkerflow.tasks.pipelines.progress import Sample
from tinkerflow.tasks.pipelines.render import Renderer, TokenizedExample
from tinkerflow.tasks.pipelines.rollout_record import dropped_of, group_of
from tinkerflow.tasks.pipelines.rollouts import HELD_OUT, Episode, Lost, Rollouts
from tinkerflow.tasks.pipelines.rows import Row

if TYPE_CHECKING:
    import tinker


async def greedy_answers(
    sampler: tinker.SamplingClient, renderer: Renderer, rows: Sequence[Row], *, max_tokens: int, max_context: int
) -> list[Sample]:
    """Sample the greedy answer to each row's prompt. All are requested together.

    max_tokens: limit of an answer. max_context: limit of a prompt with its answer.
    """
    import tinker

    futures = []
    for row in rows:
        prompt = renderer.prompt(row.prompt, row.tools)
        longest = max(1, min(max_tokens, max_context - len(prompt)))
        greedy = tinker.SamplingParams(max_tokens=longest, temperature=0.0, stop=renderer.stop)
        futures.append(sampler.sample(tinker.ModelInput.from_ints(prompt), num_samples=1, sampling_params=greedy))
    answers = [(await future).sequences[0].tokens for future in futures]
    return [
        Sample(prompt=row.prompt[-1]["content"], answer=renderer.text(tokens), wanted=expected_answer(row, renderer))
        for row, tokens in zip(rows, answers, strict=True)
    ]


def expected_answer(row: Row, renderer: Renderer) -> str:
    """The answer in the row, or an empty text."""
    return renderer.answer_text(row) if row.chosen else str(row.extra.get("answer", ""))


class Scores(BaseModel):
    """Scores of one set of weights on one data set: loss and exact match, or a reward.

    reward: mean over rows of the mean over a row's answers. reward_error: its standard error, from the means of rows;
    None for a single row. parts: means of the parts of the reward, over the answers that have them. answers: number of
    rewarded answers.
    """

    rows: int
    loss: float | None = Field(None, description="mean negative log probability of a token of the answers")
    exact_match: float | None = Field(None, description="share of rows whose answer the model gives in greedy sampling")
    reward: float | None = None
    reward_error: float | None = None
    parts: dict[str, float] = {}
    answers: int | None = None
    samples: list[Sample] = Field(description="the first few answers")
    weights: str = Field("", description="path of the weights; empty = those of the base model")

    def value(self, metric: Metric) -> float:
        """The score `metric`. UserError: it was not measured."""
        found: float | None = getattr(self, metric)
        if found is None:
            raise UserError(f"metric {metric}: these scores have none")
        return found

    def worse(self, metric: Metric) -> float:
        """A number that is smaller for better scores, and infinite for a loss that is not a number."""
        value = self.value(metric)
        return math.inf if math.isnan(value) else value if metric == "loss" else -value

    def beats(self, other: Scores, metric: Metric, margin: float) -> bool:
        """Whether these scores are better than `other` by more than `margin`."""
        return self.worse(metric) < other.worse(metric) - margin


@task(name="score", task_run_name="score {name}", cache_policy=NO_CACHE)
async def score(
    name: str,
    sampler: tinker.SamplingClient,
    renderer: Renderer,
    rows: Sequence[Row],
    examples: Sequence[TokenizedExample],
    *,
    max_tokens: int,
    max_context: int,
    shown: int,
) -> Scores:
    """Score the weights of `sampler`.

    name: the weights' name in the task run's name. renderer: tokenizes prompts. rows, examples: the same data, as rows
    and as tokens. max_tokens: limit of an answer. max_context: limit of a prompt with its answer. shown: number of
    answers to keep in the scores.
    """
    import tinker

    futures = [sampler.compute_logprobs(tinker.ModelInput.from_ints(example.tokens.tolist())) for example in examples]
    answers = await greedy_answers(sampler, renderer, rows, max_tokens=max_tokens, max_context=max_context)
    total, learned = 0.0, 0.0
    for example, future in zip(examples, futures, strict=True):
        for logprob, weight in zip(await future, example.weights.tolist(), strict=True):
            if weight and logprob is not None:  # the first token has no log probability
                total -= weight * logprob
                learned += weight
    right = sum(sample.answer == sample.wanted for sample in answers)
    return Scores(rows=len(rows), loss=total / learned, exact_match=right / len(answers), samples=answers[:shown])


@task(name="score", task_run_name="score {name}", cache_policy=NO_CACHE)
async def score_reward(
    name: str, sampler: tinker.SamplingClient, rollouts: Rollouts, rows: Sequence[Row], seed: int, *, shown: int
) -> tuple[Scores, StepRollouts]:
    """Score the weights of `sampler` by a reward. Returns the scores, and the conversations for people.

    With the same seed, `rl` draws the same samples on held-out rows. name: the weights' name in the task run's name.
    rollouts: holds the conversations. rows: the prompts. shown: number of answers to keep in the scores. UserError:
    more rows failed than `rollouts` allows. EnvironmentUnavailableError: with the rows whose environment was
    unavailable, more rows have no reward.
    """
    lost: list[Lost] = []
    groups = await rollouts.groups(sampler, rows, [seed, HELD_OUT], lost)
    rollouts.refuse_failures(len(rows))
    missing = len(rows) - len(groups)
    if missing > rollouts.max_bad_fraction * len(rows):  # the mean of the other rows would not be comparable
        last = next(one.reason for one in reversed(lost) if not one.repeated)
        raise EnvironmentUnavailableError(f"{name}: {missing} of {len(rows)} rows have no reward; the last one: {last}")
    found = StepRollouts(
        step=0,
        groups=[group_of(group, np.zeros(len(group)), rewarded=True) for group in groups],
        dropped=dropped_of(lost, ()),
    )
    return reward_score(groups, shown), found


def reward_score(groups: Sequence[Sequence[Episode]], shown: int) -> Scores:
    """The mean reward of conversations, one group for each row, and the first `shown` answers.

    Answers to the same prompt resemble each other, so the error comes from the means of rows (Miller, 2024, "Adding
    Error Bars to Evals", section 2.2).
    """
    means = [float(np.mean([episode.reward for episode in group])) for group in groups]
    episodes = [episode for group in groups for episode in group]
    names = dict.fromkeys(name for episode in episodes for name in episode.parts)
    return Scores(
        rows=len(groups),
        reward=float(np.mean(means)),
        reward_error=float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else None,
        parts={name: float(np.mean([one.parts[name] for one in episodes if name in one.parts])) for name in names},
        answers=len(episodes),
        samples=[_sample(group[0]) for group in groups[:shown]],
    )


def _sample(episode: Episode) -> Sample:
    """The prompt and the last answer of a conversation."""
    first, last = episode.answered[0], episode.answered[-1]
    prompt, answer = episode.messages[first - 1]["content"], episode.messages[last]["content"]
    return Sample(prompt=str(prompt), answer=answer, reward=episode.reward)  # some templates take lists of parts
