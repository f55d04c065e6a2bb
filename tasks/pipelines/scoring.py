"""How good weights are on rows with answers: the loss of the answers, and how many the model says itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel, Field

from tinkerflow.tasks.pipelines.progress import Sample
from tinkerflow.tasks.pipelines.render import Example, Renderer
from tinkerflow.tasks.pipelines.rows import Row
from tinkerflow.tasks.pipelines.sampling import answer

if TYPE_CHECKING:
    import tinker

Metric = Literal["loss", "exact_match"]


class Scores(BaseModel):
    """Of one set of weights on one data set."""

    rows: int
    loss: float = Field(description="mean negative log probability of a token of the answers: less is better")
    exact_match: float = Field(description="share of rows whose answer the model says, greedily: more is better")
    samples: list[Sample] = Field(description="the first few answers")

    def worse(self, metric: Metric) -> float:
        """A number that is smaller for better scores."""
        return self.loss if metric == "loss" else -self.exact_match

    def beats(self, other: Scores, metric: Metric, margin: float) -> bool:
        """Whether these are better than others by more than `margin`."""
        return self.worse(metric) < other.worse(metric) - margin


@task(name="score", task_run_name="score {name}", cache_policy=NO_CACHE)
async def score(
    name: str,
    sampler: tinker.SamplingClient,
    renderer: Renderer,
    rows: Sequence[Row],
    examples: Sequence[Example],
    *,
    max_tokens: int,
    shown: int,
) -> Scores:
    """Scores of the weights of `sampler`, called `name`. rows, examples: the same data, as it is and as tokens.

    max_tokens: of an answer. shown: how many answers are kept to look at.
    """
    import tinker

    futures = [sampler.compute_logprobs(tinker.ModelInput.from_ints(one.tokens.tolist())) for one in examples]
    told = await answer(sampler, renderer, rows, max_tokens=max_tokens)
    total, learnt = 0.0, 0.0
    for one, future in zip(examples, futures, strict=True):
        for logprob, weight in zip(await future, one.weights.tolist(), strict=True):
            if weight and logprob is not None:  # of the first token nobody can say anything
                total -= weight * logprob
                learnt += weight
    right = sum(one.answer == one.wanted for one in told)
    return Scores(rows=len(rows), loss=total / learnt, exact_match=right / len(told), samples=told[:shown])
