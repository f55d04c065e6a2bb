"""Advantage estimators, compared with the formulas of their papers."""

from __future__ import annotations

import numpy as np
import pytest

from tinkerflow.tasks.pipelines.advantages import ESTIMATORS, kl_advantages, overlong_penalty
from tinkerflow.tasks.pipelines.parameters import RlParameters

ONE_OF_FOUR, HALF = np.array([1.0, 0, 0, 0]), np.array([1.0, 0, 0, 1.0])
BATCH = np.array([*ONE_OF_FOUR, *HALF])


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("group_mean", [0.75, -0.25, -0.25, -0.25], [0.5, -0.5, -0.5, 0.5]),
        ("group_deviation", np.array([0.75, -0.25, -0.25, -0.25]) / ONE_OF_FOUR.std(), [1, -1, -1, 1]),
        ("leave_one_out", [1, -1 / 3, -1 / 3, -1 / 3], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("batch_deviation", (ONE_OF_FOUR - 0.375) / BATCH.std(), (HALF - 0.375) / BATCH.std()),
        (
            "group_mean_batch_deviation",
            np.array([0.75, -0.25, -0.25, -0.25]) / np.array([0.75, -0.25, -0.25, -0.25, 0.5, -0.5, -0.5, 0.5]).std(),
            np.array([0.5, -0.5, -0.5, 0.5]) / np.array([0.75, -0.25, -0.25, -0.25, 0.5, -0.5, -0.5, 0.5]).std(),
        ),
    ],
)
def test_estimators(name: str, first: list[float], second: list[float]) -> None:
    found = ESTIMATORS[name]([ONE_OF_FOUR, HALF])
    np.testing.assert_allclose(found[0], first, rtol=1e-5)
    np.testing.assert_allclose(found[1], second, rtol=1e-5)
    (equal,) = ESTIMATORS[name]([np.ones(3)])
    assert equal.tolist() == [0.0] * 3


def test_the_parameters_name_all_estimators() -> None:
    assert set(RlParameters.model_json_schema()["properties"]["advantage"]["enum"]) == set(ESTIMATORS)


def test_gaps_to_another_model_are_centred() -> None:
    first, second = kl_advantages([np.array([1.0, 3.0]), np.array([2.0])], 0.5)
    assert (first.tolist(), second.tolist()) == ([0.5, -0.5], [0.0])


def test_long_answers_are_penalized_towards_the_limit() -> None:
    assert [overlong_penalty(length, 10, 4) for length in (3, 6, 7, 10)] == [0.0, 0.0, 0.25, 1.0]
    assert overlong_penalty(10, 10, 0) == 0.0
