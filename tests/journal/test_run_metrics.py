"""Metrics of a run: stored once per step and name, within limits, and averaged if there are many."""

from __future__ import annotations

import pytest

from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.journal import Metric
from tinkerflow.backend.journal.run_metrics import MOST_NAMES


def test_a_value_is_stored_once_and_never_changes(scene, as_owner):
    metrics, run = scene.journal.run_metrics, scene.model()
    assert (metrics.of_run(run, "local"), metrics.number(run)) == ([], 0)
    assert metrics.record(run, "local", {2: {"reward": 0.5, "kl": 1}, 1: {"reward": 0.25}}) == 3
    assert metrics.record(run, "local", {2: {"reward": 0.5}, 3: {"reward": 0.75}}) == 1, "one of the two is new"
    assert metrics.record(run, "local", {2: {"reward": 0.5}}) == 0
    with pytest.raises(UserError, match=r"values.reward 0.6: step 2 of this run already has 0.5"):
        metrics.record(run, "local", {2: {"reward": 0.6}, 4: {"reward": 1.0}})
    wanted = [Metric("kl", ((2, 1.0),)), Metric("reward", ((1, 0.25), (2, 0.5), (3, 0.75)))]
    assert (metrics.of_run(run, "local"), metrics.number(run)) == (wanted, 4)
    other = as_owner("other").model()
    for read in (metrics.of_run, lambda *of: metrics.record(*of, {1: {"a": 1.0}})):
        with pytest.raises(NotFoundError, match=f"model '{other}' does not exist"):
            read(other, "local")


def test_a_run_has_a_limited_number_of_names(scene):
    metrics, run = scene.journal.run_metrics, scene.model()
    metrics.record(run, "local", {1: {f"n{n}": 0.0 for n in range(MOST_NAMES)}})
    for step in (1, 2):
        with pytest.raises(UserError, match=f"would have {MOST_NAMES + 1} names, and must have at most {MOST_NAMES}"):
            metrics.record(run, "local", {step: {"n0": 0.0, "more": 1.0}})
    with pytest.raises(UserError, match=f"values has {MOST_NAMES + 1} names: must have at most {MOST_NAMES}"):
        metrics.record(scene.model(), "local", {1: {f"n{n}": 0.0 for n in range(MOST_NAMES + 1)}})
    assert metrics.number(run) == MOST_NAMES


def test_many_steps_are_shown_as_means_of_neighbors(scene):
    metrics, run = scene.journal.run_metrics, scene.model()
    for first in (5000, 0):  # also in descending order
        metrics.record(run, "local", {step: {"reward": float(step)} for step in range(first, first + 5000)})
    (metric,) = metrics.of_run(run, "local", most=100)
    assert metric.points[0] == (99, 49.5) and metric.points[-1] == (9999, 9949.5)
    assert len(metric.points) == 100
