"""The loss of direct preference optimization (Rafailov et al., 2023, equation 7), and its derivative."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Preferred:
    """The loss of B pairs, a mean; its derivatives [B] by the log probability of each answer; and what people look at.

    metrics: `loss`; `accuracy`, the share of pairs whose chosen answer gained more than the rejected one; `margin`, by
    how much, in rewards; `chosen_reward` and `rejected_reward`: beta times what an answer's log probability gained.
    """

    loss: float
    by_chosen_B: Floats
    by_rejected_B: Floats
    metrics: dict[str, float]


def preferred(chosen_B: Floats, rejected_B: Floats, beta: float) -> Preferred:
    """Of what the log probabilities [B] of the answers have gained over the reference model's: policy - reference.

    The loss of a pair is -log sigmoid(beta * (chosen - rejected)).
    """
    margin_B = beta * (chosen_B - rejected_B)
    slope_B = beta * _sigmoid(-margin_B) / len(margin_B)
    loss = float(np.logaddexp(0.0, -margin_B).mean())
    metrics = {
        "loss": loss,
        "accuracy": float((margin_B > 0).mean()),
        "margin": float(margin_B.mean()),
        "chosen_reward": float(beta * chosen_B.mean()),
        "rejected_reward": float(beta * rejected_B.mean()),
    }
    return Preferred(loss, -slope_B, slope_B, metrics)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(np.exp(-np.logaddexp(0.0, -x)), np.float64)
