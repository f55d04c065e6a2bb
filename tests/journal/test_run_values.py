"""The values of runs, read in order and in parts, and their number."""

from __future__ import annotations

import pytest

from tinkerflow.backend.journal import Extent, LossMeasured, ModelState, StepMeasured


def train(scene, run, seq, step, loss=2.0):
    measured = LossMeasured(run, 10, 4.0, loss, kl=5.0, agreement=0.5, first_agreement=0.75, supported=1.0)
    for number, effect in ((seq, measured), (seq + 1, None)):
        pending = scene.taken(run, number)
        made = effect or StepMeasured(run, number, step, grad_norm=0.5, learning_rate=0.25)
        scene.journal.results.finish([pending.done(b"", "proto", made)])


def test_an_extent_grows_with_steps_and_with_values_of_clients(scene, as_owner):
    run, values = scene.model(), scene.journal.run_values
    assert values.extents((), live_only=False) == [Extent(run, ModelState.LIVE, -1, 0)]
    train(scene, run, 1, step=1)
    scene.journal.run_metrics.record(run, "local", {1: {"a": 1.0, "b": 1.0}, 2: {"a": 1.0}})
    other = as_owner("other").model()
    scene.journal.models.end(other, ModelState.UNLOADED, "the end")
    mine, ended = Extent(run, ModelState.LIVE, 2, 3), Extent(other, ModelState.UNLOADED, -1, 0)
    assert set(values.extents((), live_only=False)) == {mine, ended}
    assert values.extents((), live_only=True) == [mine]
    assert values.extents(["other"], live_only=False) == [ended]


def test_steps_and_metrics_are_read_in_parts(scene):
    run, values = scene.model(), scene.journal.run_values
    for step in (1, 2, 3):
        train(scene, run, 2 * step - 1, step)
    scene.submit(run, 7)
    first = values.steps(run, -1, 2)
    assert [(one.seq_id, one.step) for one in first] == [(2, 1), (4, 2)]
    figures = {"grad_norm": 0.5, "learning_rate": 0.25, "training_tokens": 10.0}
    drift = {"kl_sample_train": 5.0, "routing_agreement": 0.5, "first_routing_agreement": 0.75, "support_replay": 1.0}
    assert first[0].values == pytest.approx({"loss": 0.5, **drift, **figures})
    assert [one.step for one in values.steps(run, 4, 2)] == [3] and values.steps(run, 6, 2) == []
    scene.journal.run_metrics.record(run, "local", {step: {"a": float(step)} for step in (0, 3, 9)})
    assert values.metrics(run) == {"a": 3}
    assert values.metric(run, "a", -1, 2) == [(0, 0.0), (3, 3.0)] and values.metric(run, "a", 3, 2) == [(9, 9.0)]
