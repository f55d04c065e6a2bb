"""The loss of direct preference optimization, against the paper's formula and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tinkerflow.flows.pipelines.dpo import dpo_loss


def test_dpo_loss_equals_the_formula_of_the_paper() -> None:
    chosen, rejected, beta = np.array([1.5, -2.0]), np.array([-0.5, 1.0]), 0.3
    found = dpo_loss(chosen, rejected, beta)
    wanted = [-math.log(1 / (1 + math.exp(-beta * margin))) for margin in (2.0, -3.0)]
    assert found.loss == pytest.approx(sum(wanted) / 2)
    assert found.metrics["accuracy"] == 0.5
    assert found.metrics["margin"] == pytest.approx(beta * (2.0 - 3.0) / 2)
    assert found.metrics["chosen_reward"] == pytest.approx(beta * -0.25)
    assert found.metrics["rejected_reward"] == pytest.approx(beta * 0.25)
    untrained = dpo_loss(np.zeros(3), np.zeros(3), beta)
    assert (untrained.loss, untrained.metrics["accuracy"]) == (pytest.approx(math.log(2)), 0.0)


def test_dpo_gradient_matches_finite_differences() -> None:
    rng = np.random.default_rng(0)
    both, beta, step = rng.normal(size=(2, 5)) * 4, 0.7, 1e-6
    found = dpo_loss(both[0], both[1], beta)
    for row, slopes in ((0, found.by_chosen_B), (1, found.by_rejected_B)):
        for i in range(5):
            up, down = both.copy(), both.copy()
            up[row, i] += step
            down[row, i] -= step
            numeric = (dpo_loss(*up, beta).loss - dpo_loss(*down, beta).loss) / (2 * step)
            assert slopes[i] == pytest.approx(numeric, rel=1e-5, abs=1e-9)


def test_dpo_loss_does_not_overflow_far_from_the_reference() -> None:
    found = dpo_loss(np.array([1e6, -1e6]), np.array([-1e6, 1e6]), 1.0)
    assert found.loss == pytest.approx(1e6)
    assert found.by_chosen_B.tolist() == pytest.approx([0.0, -0.5])
