"""Greedy answers of a model to the prompts of rows, and how good weights are on rows with answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel, Field

from tinkerflow.tasks.pipelines.parameters import Metric
from tinkerflow.tasks.pipelines.progress import Sample
from tinkerflow.tasks.pipelines.render import Renderer, TokenizedExample
from tinkerflow.tasks.pipelines.rows import Row

if TYPE_CHECKING:
    import tinker


async def greedy_answers(
    sampler: tinker.SamplingClient, renderer: Renderer, rows: Sequence[Row], *, max_tokens: int, max_context: int
) -> list[Sample]:
    """The greedy answer to each row's prompt, all requested together.

    max_tokens: of an answer. max_context: of a prompt with its answer.
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
    """The answer that the row gives; empty when it gives none."""
    return renderer.answer_text(row) if row.chosen else str(row.extra.get("answer", ""))


class Scores(BaseModel):
    """Scores of one set of weights on one data set."""

    rows: int
    loss: float = Field(description="mean negative log probability of a token of the answers: less is better")
    exact_match: float = Field(description="share of rows whose answer the model says, greedily: more is better")
    samples: list[Sample] = Field(description="the first few answers")
    weights: str = Field("", description="path of the weights; empty = those of the base model")

    def worse(self, metric: Metric) -> float:
        """A number that is smaller for better scores."""
        return self.loss if metric == "loss" else -self.exact_match

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

    name: of the weights, for the task run's name. renderer: makes tokens of prompts. rows, examples: the same data, as
    it is and as tokens. max_tokens: of an answer. max_context: of a prompt with its answer. shown: how many answers the
    scores keep.
    """
    import tinker

    futures = [sampler.compute_logprobs(tinker.ModelInput.from_ints(example.tokens.tolist())) for example in examples]
    answers = await greedy_answers(sampler, renderer, rows, max_tokens=max_tokens, max_context=max_context)
    total, learnt = 0.0, 0.0
    for example, future in zip(examples, futures, strict=True):
        for logprob, weight in zip(await future, example.weights.tolist(), strict=True):
            if weight and logprob is not None:  # the first token has no log probability
                total -= weight * logprob
                learnt += weight
    right = sum(sample.answer == sample.wanted for sample in answers)
    return Scores(rows=len(rows), loss=total / learnt, exact_match=right / len(answers), samples=answers[:shown])
