"""The loss of direct preference optimization, against the paper's formula and finite differences."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinkerflow.flows.pipelines.dpo import DpoRecipe, dpo_loss
from tinkerflow.tasks.pipelines.progress import RunProgress
from tinkerflow.tasks.pipelines.render import TokenizedExample


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


async def test_resumed_run_measures_the_reference_of_other_held_out_rows(tmp_path: Path) -> None:
    class Client:
        """Each log probability is minus the number of its token."""

        async def forward(self, data: list[Any], loss: str) -> Any:
            outputs = [-datum.loss_fn_inputs["target_tokens"].to_numpy().astype(float) for datum in data]
            return SimpleNamespace(
                loss_fn_outputs=[{"logprobs": SimpleNamespace(to_numpy=lambda x=x: x)} for x in outputs]
            )

    async def at(step: int) -> Client:
        asked.append(step)
        return Client()

    async def references(*tokens: int) -> list[float]:
        rows = [TokenizedExample(np.array([1, token], np.int32), np.array([0, 1], np.float32)) for token in tokens]
        recipe = DpoRecipe(None, (), 0.1, rows)  # type: ignore[arg-type]
        await recipe.prepare(SimpleNamespace(progress=RunProgress(tmp_path.as_uri(), "run", "plan"), at=at))  # type: ignore[arg-type]
        return recipe._held_out_reference.tolist()

    asked: list[int] = []
    assert await references(5, 6) == await references(5, 6) == [-5.0, -6.0]
    assert await references(7, 8, 9, 10) == [-7.0, -8.0, -9.0, -10.0]
    assert asked == [0, 0], "once for each of the sets of rows"
