"""Rows and learning rates of steps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkerflow.tasks.pipelines.parameters import TrainingParameters
from tinkerflow.tasks.pipelines.schedule import batch_of, learning_rate


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.integers(1, 12), size=st.integers(1, 12), seed=st.integers(0, 3))
def test_every_epoch_takes_every_row_once(rows: int, size: int, seed: int) -> None:
    steps = [batch_of(step, size=size, rows=rows, seed=seed) for step in range(rows)]  # `size` whole epochs
    assert all(len(batch) == size for batch in steps)
    taken = [row for batch in steps for row in batch]
    for epoch in range(size):
        assert Counter(taken[epoch * rows : (epoch + 1) * rows]) == dict.fromkeys(range(rows), 1)


def test_orders_differ_by_epoch_and_seed() -> None:
    first, second = (batch_of(step, size=20, rows=20, seed=1) for step in (0, 1))
    assert first != second
    assert batch_of(0, size=20, rows=20, seed=2) != first
    assert batch_of(0, size=20, rows=20, seed=1) == first


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.05, 0.1, 0.1, 0.1, 0.1, 0.1]),
        ("linear", [0.05, 0.1, 0.1, 0.075, 0.05, 0.025]),
        ("cosine", [0.05, 0.1, 0.1, 0.0853553, 0.05, 0.0146447]),
    ],
)
def test_rates_rise_and_fall(schedule: str, rates: list[float]) -> None:
    training = TrainingParameters.model_validate(
        {"steps": 6, "warmup_steps": 2, "learning_rate": 0.1, "schedule": schedule}
    )
    assert [learning_rate(step, training) for step in range(6)] == pytest.approx(rates, rel=1e-5)
