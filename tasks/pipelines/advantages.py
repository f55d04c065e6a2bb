"""Advantages of sampled answers, from rewards and log probabilities.

Letters: G answers of a group, N sampled tokens of a sequence. A new estimator is a function in `ESTIMATORS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_SMALL = 1e-6  # added to standard deviations, which are 0 in groups with equal rewards


def group_mean(rewards: Sequence[Floats]) -> list[Floats]:
    """Rewards minus the mean of their group (Liu et al., 2025, "Dr. GRPO").

    Groups in which all answers but one are right (or wrong) do not weigh more than others.
    """
    return [rewards_G - rewards_G.mean() for rewards_G in rewards]


def group_deviation(rewards: Sequence[Floats]) -> list[Floats]:
    """`group_mean`, divided by the standard deviation of the group (Shao et al., 2024, "GRPO", section 4.1.2)."""
    return [centred_G / (centred_G.std() + _SMALL) for centred_G in group_mean(rewards)]


def leave_one_out(rewards: Sequence[Floats]) -> list[Floats]:
    """Rewards minus the mean of the other rewards of their group (Ahmadian et al., 2024, "RLOO", section 3.3)."""
    return [centred_G * len(centred_G) / max(len(centred_G) - 1, 1) for centred_G in group_mean(rewards)]


def batch_deviation(rewards: Sequence[Floats]) -> list[Floats]:
    """Rewards minus the mean of the batch, divided by the batch's standard deviation (Hu, 2025, "REINFORCE++")."""
    batch = np.concatenate(rewards)
    return [(rewards_G - batch.mean()) / (batch.std() + _SMALL) for rewards_G in rewards]


def group_mean_batch_deviation(rewards: Sequence[Floats]) -> list[Floats]:
    """Rewards minus the mean of their group, divided by the batch's deviation (Hu, 2025, "REINFORCE++-baseline")."""
    centred = group_mean(rewards)
    return [centred_G / (np.concatenate(centred).std() + _SMALL) for centred_G in centred]


# The rewards [G] of each group -> the advantages [G] of each group's answers.
ESTIMATORS: Mapping[str, Callable[[Sequence[Floats]], list[Floats]]] = {
    estimator.__name__: estimator
    for estimator in (group_mean, group_deviation, leave_one_out, batch_deviation, group_mean_batch_deviation)
}


def kl_advantages(gaps: Sequence[Floats], coefficient: float) -> list[Floats]:
    """Advantages that keep sampled tokens near another model, shaped like `gaps`: coefficient * (mean gap - gap).

    gaps: for each sequence [N], the model's own log probabilities minus those of the other model. Their mean estimates
    the reverse Kullback-Leibler divergence. With that mean as the baseline, they are the per-token reward of on-policy
    distillation (Agarwal et al., 2023, "GKD"; Thinking Machines, 2025, "On-Policy Distillation"), and the penalty in RL
    for diverging from the base model.
    """
    mean = np.concatenate(gaps).mean()
    return [coefficient * (mean - gap_N) for gap_N in gaps]


def overlong_penalty(length: int, most: int, soft: int) -> float:
    """The penalty from 0 to 1 for an answer of `length` tokens out of at most `most` (Yu et al., 2025, "DAPO", eq. 13).

    It grows over the last `soft` tokens, and is 1 for an answer of `most` tokens. soft = 0: no penalty.
    """
    return min(max((length - (most - soft)) / soft, 0.0), 1.0) if soft else 0.0
