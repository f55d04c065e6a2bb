"""Forward passes of a model in training: log probabilities of given answers, without learning from them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tinkerflow.tasks.pipelines.render import TokenizedExample

if TYPE_CHECKING:
    import tinker

BATCH = 64  # examples in one request


async def mean_loss(client: tinker.TrainingClient, examples: Sequence[TokenizedExample]) -> float:
    """Mean negative log probability of the examples' learned tokens."""
    total = sum([output.metrics["loss:sum"] async for _, output in _forward(client, examples)])
    return float(total / sum(example.learned for example in examples))


async def answer_logprobs(
    client: tinker.TrainingClient, examples: Sequence[TokenizedExample]
) -> npt.NDArray[np.float64]:
    """The summed log probability of each example's learned tokens [len(examples)]."""
    return np.array(
        [
            np.dot(output["logprobs"].to_numpy().astype(np.float64), example.weights[1:])
            async for part, answer in _forward(client, examples)
            for example, output in zip(part, answer.loss_fn_outputs, strict=True)
        ]
    )


async def _forward(
    client: tinker.TrainingClient, examples: Sequence[TokenizedExample]
) -> AsyncIterator[tuple[Sequence[TokenizedExample], tinker.ForwardBackwardOutput]]:
    """Compute the cross entropy of parts of BATCH examples concurrently. Yields each part with its output."""
    parts = [examples[i : i + BATCH] for i in range(0, len(examples), BATCH)]
    futures = [client.forward([example.datum() for example in part], "cross_entropy") for part in parts]
    for part, future in zip(parts, futures, strict=True):
        yield part, await future
