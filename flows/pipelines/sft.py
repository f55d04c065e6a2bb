"""The pipeline `sft`: supervised fine-tuning on answers."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from prefect import flow

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines.fine_tuning import TrainingResult, cancellable, train
from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.tasks.pipelines.forwards import mean_loss
from tinkerflow.tasks.pipelines.outliers import OutlierWatch
from tinkerflow.tasks.pipelines.parameters import SftParameters
from tinkerflow.tasks.pipelines.preparation import PreparedRun, prepare
from tinkerflow.tasks.pipelines.render import TokenizedExample
from tinkerflow.tasks.pipelines.trainer import Trainer, Values, grad_norm

if TYPE_CHECKING:
    import tinker


@dataclass(frozen=True)
class SftRecipe:
    """Learn the answers' tokens by cross entropy, averaged over the batch; see `trainer.Recipe`.

    examples: the training data, in the order of the rows. held_out_examples: their loss is measured after each segment.
    left_out: indices of the examples that no step learns from.
    """

    run: PreparedRun
    examples: Sequence[TokenizedExample]
    held_out_examples: Sequence[TokenizedExample] = ()
    left_out: set[int] = field(default_factory=set)
    ahead: ClassVar[int] = 1

    async def prepare(self, trainer: Trainer) -> None:
        """Do nothing: the first step needs no measurement."""

    def begin(self, step: int) -> None:
        """Do nothing: a step depends on no other step."""

    def batch(self, step: int) -> list[int]:
        """The indices of the examples of a step. UserError: all of them are left out."""
        rows = [row for row in self.run.batch(step, len(self.examples)) if row not in self.left_out]
        if not rows:
            raise UserError(f"step {step + 1}: on_outlier 'skip' has left out all of its rows")
        return rows

    def lessons(self, rows: Sequence[int]) -> list[TokenizedExample]:
        """The examples with these indices, weighted so that their loss is the mean over their answers' tokens."""
        learned = self._learned(rows)
        return [self.examples[row].scaled(1 / learned) for row in rows]

    def _learned(self, rows: Sequence[int]) -> float:
        """The number of the answers' tokens in these examples, by their weights."""
        return sum(self.examples[row].learned for row in rows)

    def submit(self, client: tinker.TrainingClient, step: int, params: tinker.AdamParams) -> Awaitable[Values]:
        """Learn from the batch of step `step`, without waiting for the step before it."""
        rows = self.batch(step)
        learned = self._learned(rows)
        forward = client.forward_backward([lesson.datum() for lesson in self.lessons(rows)], "cross_entropy")
        update = client.optim_step(params)

        async def metrics() -> Values:
            loss = (await forward).metrics.get("loss:sum", math.nan)
            return {"loss": loss, "grad_norm": await grad_norm(update), "trained_tokens": learned}

        return metrics()

    async def held_out(self, client: tinker.TrainingClient) -> Values:
        """Measure the mean loss per token of the held-out answers."""
        return {"held_out_loss": await mean_loss(client, self.held_out_examples)} if self.held_out_examples else {}


@flow(name="sft", flow_run_name="sft {parameters.name}", log_prints=False)
@cancellable
async def sft(parameters: SftParameters) -> TrainingResult:
    """Check the data, render it, train in segments, and save the weights. A request to stop ends it as Cancelled."""
    return await fine_tune(parameters)


async def fine_tune(parameters: SftParameters) -> TrainingResult:
    """Train as the flow `sft` does, for the pipeline of the parameters. StoppedError: a stop was requested."""
    async with prepare(parameters) as run:
        key, examples = run.examples("data")
        _, held_out = run.examples("held_out")
        recipe = SftRecipe(run, examples, held_out)
        return await train(run, key, recipe, OutlierWatch(run, recipe) if parameters.on_outlier == "skip" else None)


PIPELINE = Pipeline(sft, SftParameters)
