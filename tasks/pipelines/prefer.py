"""The recipe of direct preference optimization: chosen answers gain on rejected ones, measured from the first model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tinkerflow.tasks.pipelines.imitate import forward_in_parts, scaled
from tinkerflow.tasks.pipelines.preference import Floats, preferred
from tinkerflow.tasks.pipelines.render import Example
from tinkerflow.tasks.pipelines.sampling import Shown
from tinkerflow.tasks.pipelines.schedule import batch_of
from tinkerflow.tasks.pipelines.trainer import Trainer, Values, grad_norm

if TYPE_CHECKING:
    import tinker

Examples = Sequence[Example]


class Prefer:
    """Preferences are learnt; see `tinkerflow.tasks.pipelines.trainer.Recipe`.

    examples: pairs, chosen and rejected in turn. A step asks for the log probabilities first and then for the gradient
    of a cross entropy whose weights are minus the derivative of the loss by them: the SDK's `forward_backward_custom`
    does the same, with PyTorch.
    """

    ahead = 0

    def __init__(
        self, examples: Examples, *, beta: float, batch_size: int, seed: int, shown: Shown, held_out: Examples = ()
    ) -> None:
        """held_out: pairs that are measured after each segment."""
        self._examples = examples
        self._beta = beta
        self._batch_size = batch_size
        self._seed = seed
        self.shown = shown
        self._held_out = held_out
        self._reference: Floats = np.zeros(0)
        self._held_out_reference: Floats = np.zeros(0)

    async def prepare(self, trainer: Trainer) -> None:
        """Measure with the reference: the model before the first step. A process that goes on uses the same values."""
        self._reference = await _reference(trainer, "reference", self._examples)
        self._held_out_reference = await _reference(trainer, "reference-held-out", self._held_out)

    async def submit(self, client: tinker.TrainingClient, step: int, params: tinker.AdamParams) -> Values:
        """A step on the pairs of its number."""
        pairs = batch_of(step, size=self._batch_size, rows=len(self._examples) // 2, seed=self._seed)
        picked = [i for pair in pairs for i in (2 * pair, 2 * pair + 1)]
        examples = [self._examples[i] for i in picked]
        gained = await _logprobs(client, examples) - self._reference[picked]
        found = preferred(gained[0::2], gained[1::2], self._beta)
        slopes = np.stack([found.by_chosen_B, found.by_rejected_B], axis=1).reshape(-1)
        data = [scaled(example, -slope).datum() for example, slope in zip(examples, slopes, strict=True)]
        forward, update = client.forward_backward(data, "cross_entropy"), client.optim_step(params)
        await forward
        return found.metrics | {"grad_norm": await grad_norm(update)}

    async def held_out(self, client: tinker.TrainingClient) -> Values:
        """Loss, accuracy and margin of the held-out pairs."""
        if not self._held_out:
            return {}
        gained = await _logprobs(client, self._held_out) - self._held_out_reference
        found = preferred(gained[0::2], gained[1::2], self._beta)
        return {f"held_out_{name}": found.metrics[name] for name in ("loss", "accuracy", "margin")}


async def _reference(trainer: Trainer, name: str, examples: Examples) -> Floats:
    """The log probability of each answer before the first step; measured once in a run."""
    kept = trainer.progress.kept(name)
    if kept is None and examples:
        kept = trainer.progress.keep(name, (await _logprobs(await trainer.at(0), examples)).tobytes())
    return np.frombuffer(kept or b"", np.float64)


async def _logprobs(client: tinker.TrainingClient, examples: Examples) -> Floats:
    """The log probability of each example's learnt tokens together; nothing is learnt from them."""
    return np.array(
        [
            np.dot(output["logprobs"].to_numpy().astype(np.float64), example.weights[1:])
            async for part, answer in forward_in_parts(client, examples)
            for example, output in zip(part, answer.loss_fn_outputs, strict=True)
        ]
    )
