"""The recipe of supervised fine-tuning: cross entropy of the answers' tokens, a mean over the batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tinkerflow.tasks.pipelines.render import Example
from tinkerflow.tasks.pipelines.sampling import Shown
from tinkerflow.tasks.pipelines.schedule import batch_of
from tinkerflow.tasks.pipelines.trainer import Trainer, Values, grad_norm

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import tinker

HELD_OUT_BATCH = 64


class Imitate:
    """Answers of data are learnt; see `tinkerflow.tasks.pipelines.trainer.Recipe`."""

    ahead = 1

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        batch_size: int,
        seed: int,
        shown: Shown,
        held_out: Sequence[Example] = (),
    ) -> None:
        """held_out: examples whose loss is measured after each segment."""
        self._examples = examples
        self._batch_size = batch_size
        self._seed = seed
        self.shown = shown
        self._held_out = held_out

    async def prepare(self, trainer: Trainer) -> None:
        """There is nothing to know before the first step."""

    def submit(self, client: tinker.TrainingClient, step: int, params: tinker.AdamParams) -> Awaitable[Values]:
        """A step on the batch of its number."""
        picked = batch_of(step, size=self._batch_size, rows=len(self._examples), seed=self._seed)
        batch = [self._examples[i] for i in picked]
        learnt = sum(float(example.weights.sum()) for example in batch)
        forward = client.forward_backward([scaled(example, 1 / learnt).datum() for example in batch], "cross_entropy")
        update = client.optim_step(params)

        async def metrics() -> Values:
            loss = (await forward).metrics["loss:sum"]
            return {"loss": loss, "grad_norm": await grad_norm(update), "tokens": learnt}

        return metrics()

    async def held_out(self, client: tinker.TrainingClient) -> Values:
        """The mean loss of a token of the held-out answers."""
        if not self._held_out:
            return {}
        return {"held_out_loss": await mean_loss(client, self._held_out)}


async def mean_loss(client: tinker.TrainingClient, examples: Sequence[Example]) -> float:
    """Mean negative log probability of the learnt tokens; nothing is learnt from them."""
    total = sum([output.metrics["loss:sum"] async for _, output in forward_in_parts(client, examples)])
    return float(total / sum(float(example.weights.sum()) for example in examples))


async def forward_in_parts(
    client: tinker.TrainingClient, examples: Sequence[Example]
) -> AsyncIterator[tuple[Sequence[Example], tinker.ForwardBackwardOutput]]:
    """Cross entropy of HELD_OUT_BATCH examples at a time, all asked at once; each part beside its answer, in order."""
    parts = [examples[i : i + HELD_OUT_BATCH] for i in range(0, len(examples), HELD_OUT_BATCH)]
    futures = [client.forward([example.datum() for example in part], "cross_entropy") for part in parts]
    for part, future in zip(parts, futures, strict=True):
        yield part, await future


def scaled(example: Example, factor: float) -> Example:
    """The example with its weights times `factor`."""
    return Example(example.tokens, (example.weights * np.float32(factor)).astype(np.float32))
