"""Answers of a model to the prompts of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkerflow.tasks.pipelines.progress import Sample
from tinkerflow.tasks.pipelines.render import Renderer
from tinkerflow.tasks.pipelines.rows import Row

if TYPE_CHECKING:
    import tinker


@dataclass(frozen=True)
class Shown:
    """What is asked after each segment, to look at: the prompts of `rows`, for answers of at most `max_tokens`."""

    renderer: Renderer
    rows: Sequence[Row]
    max_tokens: int

    async def answers(self, client: tinker.TrainingClient) -> list[Sample]:
        """The greedy answers of the model as it is now."""
        if not self.rows:
            return []
        sampler = await client.save_weights_and_get_sampling_client()
        return await answer(sampler, self.renderer, self.rows, max_tokens=self.max_tokens)


async def answer(
    sampler: tinker.SamplingClient, renderer: Renderer, rows: Sequence[Row], *, max_tokens: int
) -> list[Sample]:
    """The greedy answer to each row's prompt, all asked at once."""
    import tinker

    greedy = tinker.SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=renderer.stop)
    futures = [
        sampler.sample(tinker.ModelInput.from_ints(renderer.prompt(row.prompt)), num_samples=1, sampling_params=greedy)
        for row in rows
    ]
    answers = [(await future).sequences[0].tokens for future in futures]
    return [
        Sample(prompt=row.prompt[-1]["content"], answer=renderer.text(tokens), wanted=wanted(row))
        for row, tokens in zip(rows, answers, strict=True)
    ]


def wanted(row: Row) -> str:
    """What the row says that the answer is; empty when it does not."""
    return row.chosen[0]["content"].strip() if row.chosen else str(row.extra.get("answer", ""))
