"""The points of a sweep."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tinkerflow.flows.pipelines.sweep import SweepParameters, points


def parameters(**grid: Any) -> SweepParameters:
    rows = {"url": "rows.jsonl"}
    return SweepParameters.model_validate({"data": rows, "held_out": rows, "grid": grid})


def test_every_combination_is_a_point_and_knows_its_place_in_the_picture() -> None:
    found = points(parameters(learning_rate=[0.001, 0.01, 0.001], rank=[8, 16]))
    assert [point.label for point in found] == [
        "learning_rate 0.001, rank 8", "learning_rate 0.001, rank 16",
        "learning_rate 0.01, rank 8", "learning_rate 0.01, rank 16",
    ]  # fmt: skip
    assert found[1].changes == {"training": {"learning_rate": 0.001}, "model": {"rank": 16}}
    assert (found[1].axis, found[1].x, found[1].line) == ("log10(learning_rate)", pytest.approx(-3), "rank 16")
    assert found[1].slug == "0-001-16"


def test_what_does_not_vary_is_no_axis() -> None:
    found = points(parameters(learning_rate=[0.001], steps=[4, 8]))
    assert [(point.axis, point.x, point.line) for point in found] == [("steps", 4.0, "all"), ("steps", 8.0, "all")]
    assert all(point.changes["training"]["learning_rate"] == 0.001 for point in found)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "list values for at least one parameter"),
        ({"rank": [0]}, "grid.rank.0\n  Input should be greater than or equal to 1"),
        ({"rank": list(range(1, 102)), "steps": [1, 2, 3]}, "303 combinations, must be 256 at most"),
        ({"momentum": [0.9]}, "grid.momentum\n  Extra inputs are not permitted"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(grid: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        parameters(**grid)
    assert message in str(error.value)
