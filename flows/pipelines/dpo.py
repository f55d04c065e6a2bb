"""The pipeline `dpo`: direct preference optimization on pairs of a better and a worse answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from prefect import flow

from tinkerflow.flows.pipelines.fine_tuning import TrainingResult, cancellable, train
from tinkerflow.flows.pipelines.registry import Pipeline
from tinkerflow.tasks.pipelines.advantages import Floats
from tinkerflow.tasks.pipelines.forwards import answer_logprobs
from tinkerflow.tasks.pipelines.parameters import DpoParameters
from tinkerflow.tasks.pipelines.preparation import PreparedRun, prepare
from tinkerflow.tasks.pipelines.render import TokenizedExample
from tinkerflow.tasks.pipelines.trainer import Trainer, Values, grad_norm
from tinkerflow.tasks.pipelines.work import digest

if TYPE_CHECKING:
    import tinker

Examples = Sequence[TokenizedExample]


@dataclass(frozen=True)
class DpoLoss:
    """The mean loss of B pairs, and its derivatives [B] with respect to each answer's log probability.

    metrics: `loss`; `accuracy`, the share of pairs whose chosen answer gained more; `margin`, the mean difference of
    the rewards. `chosen_reward` and `rejected_reward` are beta times the gain of the log probability.
    """

    loss: float
    by_chosen_B: Floats
    by_rejected_B: Floats
    metrics: dict[str, float]


def dpo_loss(chosen_B: Floats, rejected_B: Floats, beta: float) -> DpoLoss:
    """The loss of direct preference optimization (Rafailov et al., 2023, equation 7).

    chosen_B, rejected_B: how much the log probabilities [B] of the answers have gained, policy minus reference model.
    The loss of a pair is -log sigmoid(beta * (chosen - rejected)).
    """
    margin_B = beta * (chosen_B - rejected_B)
    slope_B = beta * np.exp(-np.logaddexp(0.0, margin_B)) / len(margin_B)  # sigmoid(-margin)
    loss = float(np.logaddexp(0.0, -margin_B).mean())
    metrics = {
        "loss": loss,
        "accuracy": float((margin_B > 0).mean()),
        "margin": float(margin_B.mean()),
        "chosen_reward": float(beta * chosen_B.mean()),
        "rejected_reward": float(beta * rejected_B.mean()),
    }
    return DpoLoss(loss, -slope_B, slope_B, metrics)


@dataclass
class DpoRecipe:
    """Learn preferences; see `trainer.Recipe`. Each chosen answer in `examples` is followed by its rejected answer.

    A step first requests the log probabilities, then the gradient of a cross entropy whose weights are minus the
    derivatives of the loss with respect to them. The SDK's `forward_backward_custom` does the same with PyTorch.
    """

    run: PreparedRun
    examples: Examples
    beta: float
    held_out_examples: Examples = ()
    ahead: ClassVar[int] = 0
    _reference: Floats = field(default_factory=lambda: np.zeros(0), init=False)
    _held_out_reference: Floats = field(default_factory=lambda: np.zeros(0), init=False)

    async def prepare(self, trainer: Trainer) -> None:
        """Measure with the reference, the model before the first step.

        A resumed run uses the same values, unless its held-out rows are others.
        """
        self._reference = await _reference(trainer, "reference", self.examples)
        rows = digest(*(part.tobytes() for one in self.held_out_examples for part in (one.tokens, one.weights)))
        self._held_out_reference = await _reference(trainer, f"reference-held-out-{rows}", self.held_out_examples)

    def begin(self, step: int) -> None:
        """Do nothing: a step depends on no other step."""

    async def submit(self, client: tinker.TrainingClient, step: int, params: tinker.AdamParams) -> Values:
        """Learn from the pairs of step `step`."""
        picked = [i for pair in self.run.batch(step, len(self.examples) // 2) for i in (2 * pair, 2 * pair + 1)]
        examples = [self.examples[i] for i in picked]
        gained = await answer_logprobs(client, examples) - self._reference[picked]
        loss = dpo_loss(gained[0::2], gained[1::2], self.beta)
        slopes = np.stack([loss.by_chosen_B, loss.by_rejected_B], axis=1).reshape(-1)
        data = [example.scaled(-slope).datum() for example, slope in zip(examples, slopes, strict=True)]
        forward, update = client.forward_backward(data, "cross_entropy"), client.optim_step(params)
        await forward
        return loss.metrics | {"grad_norm": await grad_norm(update)}

    async def held_out(self, client: tinker.TrainingClient) -> Values:
        """Measure loss, accuracy and margin of the held-out pairs."""
        if not self.held_out_examples:
            return {}
        gained = await answer_logprobs(client, self.held_out_examples) - self._held_out_reference
        metrics = dpo_loss(gained[0::2], gained[1::2], self.beta).metrics
        return {f"held_out_{name}": metrics[name] for name in ("loss", "accuracy", "margin")}


async def _reference(trainer: Trainer, name: str, examples: Examples) -> Floats:
    """The log probability of each answer before the first step, measured once per run."""
    kept = trainer.progress.kept(name)
    if kept is None and examples:
        kept = trainer.progress.keep(name, (await answer_logprobs(await trainer.at(0), examples)).tobytes())
    return np.frombuffer(kept or b"", np.float64)


@flow(name="dpo", flow_run_name="dpo {parameters.name}")
@cancellable
async def dpo(parameters: DpoParameters) -> TrainingResult:
    """Train like `sft`, on preferences; the reference is the model that the run begins with."""
    async with prepare(parameters) as run:
        key, examples = run.examples("data")
        _, held_out = run.examples("held_out")
        return await train(run, key, DpoRecipe(run, examples, parameters.beta, held_out))


PIPELINE = Pipeline(dpo, DpoParameters)
