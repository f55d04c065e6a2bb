"""The rows and the learning rate of a step: pure functions of the step's number, so that a resumed run repeats them."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tinkerflow.tasks.pipelines.parameters import TrainingParameters


def batch_of(step: int, *, size: int, rows: int, seed: int) -> list[int]:
    """The indices of the rows [size] of step `step` (from 0).

    Each epoch takes every row once, in a new order. rows: number of all rows. seed: determines the orders.
    """
    picked = []
    for position in range(step * size, (step + 1) * size):
        epoch, index = divmod(position, rows)
        picked.append(int(_order(rows, seed, epoch)[index]))
    return picked


@lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def learning_rate(step: int, training: TrainingParameters) -> float:
    """The learning rate of step `step` (from 0): a linear rise, then constant, linear or half a cosine down to zero."""
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    done = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    falls = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return training.learning_rate * falls[training.schedule]
