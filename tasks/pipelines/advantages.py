"""Advantages: by how much a sampled token is better than what was to be expected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def group_centred(rewards_G: Sequence[float], *, by_deviation: bool = False) -> Floats:
    """Rewards [G] of one group less their mean.

    by_deviation: divided by their standard deviation, as in GRPO (Shao et al., 2024, section 4.1.2). Without it, as
    Liu et al. (2025, "Dr. GRPO") recommend: groups that are all right or all wrong but for one do not weigh more.
    """
    centred = np.asarray(rewards_G, np.float64) - np.mean(rewards_G)
    return centred / (centred.std() + 1e-6) if by_deviation else centred


def nearness(gaps: Sequence[Floats], coefficient: float) -> list[Floats]:
    """Advantages of sampled tokens for staying near another model, like `gaps`: coefficient * (mean gap - gap).

    gaps: of each sequence [N], own less other log probabilities. Their mean estimates the reverse Kullback-Leibler
    divergence from samples; less it, as a baseline, they are the per-token reward of on-policy distillation (Agarwal et
    al., 2023, "GKD"; Thinking Machines, 2025, "On-Policy Distillation") and RL's penalty for leaving the base model.
    """
    mean = np.concatenate(gaps).mean()
    return [coefficient * (mean - gap_N) for gap_N in gaps]
