"""The figures of each step are stored once with the step's answer, and averaged if there are many steps."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import sqlalchemy as sa

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.journal import LossMeasured, ModelLive, StepMeasured, Trained
from tinkerflow.backend.journal.curves import Parting
from tinkerflow.backend.journal.database import driver_url
from tinkerflow.backend.journal.tables import TrainingStep


def answer(scene, model, seq, effect):
    pending = scene.taken(model, seq)
    outcome = pending.done(b"", "proto", effect)
    scene.journal.results.finish([outcome])
    return outcome


def test_step_has_the_losses_of_its_gradients(scene, clock):
    model = scene.model()
    assert scene.journal.curves.of_run(model, "local").points == ()
    answer(scene, model, 1, LossMeasured(model, 10, 5.0, 20.0, kl=0.5, agreement=1.0, supported=1.0))
    answer(scene, model, 2, LossMeasured(model, 30, 5.0, 10.0, kl=0.1, agreement=0.5, supported=0.0))
    assert scene.journal.curves.last_seq(model, "local") == -1, "no step is made yet"
    answer(scene, model, 3, StepMeasured(model, 3, 1, grad_norm=2.5, learning_rate=1e-4))
    answer(scene, model, 4, LossMeasured(model, 8, 4.0, 2.0))
    clock.advance(2)
    answer(scene, model, 5, StepMeasured(model, 5, 2, grad_norm=1.5, learning_rate=1e-5))
    curve = scene.journal.curves.of_run(model, "local")
    one, two = curve.points
    assert (one.step, one.tokens, one.loss, one.grad_norm, one.learning_rate) == (1, 40, 3.0, 2.5, 1e-4)
    assert (one.kl, one.agreement, one.supported) == pytest.approx((0.2, 0.625, 0.25)) and one.tokens_per_second is None
    assert (two.step, two.tokens, two.loss, two.kl, two.tokens_per_second) == (2, 8, 0.5, None, 4.0)
    assert two.at - one.at == timedelta(seconds=2)
    assert (curve.steps, scene.journal.curves.last_seq(model, "local")) == (2, 5)


def test_trained_tokens_include_steps_and_pending_gradients(scene):
    model = scene.model()
    assert scene.journal.curves.trained(model) == Trained()
    answer(scene, model, 1, LossMeasured(model, 10, 5.0, 20.0))
    assert scene.journal.curves.trained(model) == Trained(0, 0, 10)
    answer(scene, model, 2, StepMeasured(model, 2, 1, 1.0, 1.0))
    answer(scene, model, 3, LossMeasured(model, 7, 5.0, 20.0))
    answer(scene, model, 4, StepMeasured(model, 4, 2, 1.0, 1.0))
    answer(scene, model, 5, LossMeasured(model, 3, 5.0, 20.0))
    assert scene.journal.curves.trained(model) == Trained(17, 7, 3)
    assert scene.journal.curves.trained(scene.model()) == Trained()


def test_discarded_gradients_belong_to_no_step(scene):
    model = scene.model()
    answer(scene, model, 1, LossMeasured(model, 10, 5.0, 20.0))
    answer(scene, model, 2, ModelLive(model, 0, 8, True, True, True))
    answer(scene, model, 3, LossMeasured(model, 2, 1.0, 3.0))
    answer(scene, model, 4, StepMeasured(model, 4, 1, 1.0, 1.0))
    (point,) = scene.journal.curves.of_run(model, "local").points
    assert (point.tokens, point.loss) == (2, 3.0)


def test_mean_covers_steps_with_a_figure(scene):
    model = scene.model()
    for seq, kl in ((1, 0.5), (3, None), (5, 0.5), (7, None)):
        answer(scene, model, seq, LossMeasured(model, 10, 1.0, 1.0, kl=kl))
        answer(scene, model, seq + 1, StepMeasured(model, seq + 1, seq, 1.0, 1.0))
    points = scene.journal.curves.of_run(model, "local", most=2).points
    assert [point.kl for point in points] == [0.5, 0.5]


def test_duplicate_answer_counts_once(scene):
    model = scene.model()
    outcome = answer(scene, model, 1, LossMeasured(model, 10, 5.0, 20.0))
    assert scene.journal.results.finish([outcome]) == []
    outcome = answer(scene, model, 2, StepMeasured(model, 2, 1, 1.0, 1.0))
    assert scene.journal.results.finish([outcome]) == []
    (point,) = scene.journal.curves.of_run(model, "local").points
    assert (point.tokens, point.loss) == (10, 4.0)


def test_figures_that_are_not_finite_are_left_out_and_a_step_may_have_no_loss(scene):
    model = scene.model()
    answer(scene, model, 1, LossMeasured(model, 10, 5.0, math.nan))
    answer(scene, model, 2, StepMeasured(model, 2, 1, math.inf, 1.0))
    answer(scene, model, 3, StepMeasured(model, 3, 2, 1.0, 1.0))
    answer(scene, model, 4, LossMeasured(model, 10, 0.0, 3.0))
    answer(scene, model, 5, StepMeasured(model, 5, 3, 1.0, 1.0))
    points = scene.journal.curves.of_run(model, "local").points
    assert [(point.loss, point.grad_norm, point.tokens) for point in points] == [
        (None, None, 10), (None, 1.0, 0), (None, 1.0, 10),
    ]  # fmt: skip


def test_step_and_loss_figures_cost_one_statement_each(scene, statements):
    model = scene.model()
    for seq, effect in ((1, LossMeasured(model, 1, 1.0, 1.0)), (2, StepMeasured(model, 2, 1, 1.0, 1.0))):
        pending = scene.taken(model, seq)
        with statements() as made:
            scene.journal.results.finish([pending.done(b"", "json", effect)])
        assert len(made) == 4, "three to answer, and one for the figures"


def test_a_run_of_many_steps_is_averaged_with_its_peaks(scene, url, statements, clock):
    model, steps = scene.model(), 100_000
    engine = sa.create_engine(driver_url(url))
    at = clock.now()
    rows = [
        {"model_id": model, "seq_id": 2 * n, "step": n, "at": at + timedelta(seconds=n), "tokens": 100, "weight": 10.0}
        | {"loss": 20.0 if n != 5_000 else 990.0, "kl": 0.0, "grad_norm": 1.0, "learning_rate": 1e-4}
        for n in range(1, steps + 1)
    ]
    with engine.begin() as connection:
        connection.execute(sa.insert(TrainingStep), rows)
    engine.dispose()
    with statements() as made:
        curve = scene.journal.curves.of_run(model, "local")
    assert len(made) == 3
    assert (curve.steps, scene.journal.curves.last_seq(model, "local")) == (steps, 2 * steps)
    assert 400 <= len(curve.points) <= 500
    assert sum(point.tokens for point in curve.points) == 100 * steps
    assert max(point.loss_high for point in curve.points) == 99.0, "a peak of one step is still seen"
    assert {point.loss_low for point in curve.points} == {2.0}
    assert curve.points[7].tokens_per_second == pytest.approx(100.0)
    assert curve.points[-1].step == steps
    part = scene.journal.curves.of_run(model, "local", steps=(4_801, 5_200))
    assert [point.step for point in part.points] == list(range(4_801, 5_201)), "a part has every step of its own"
    assert (part.steps, part.tokens_before, part.points[199].loss) == (400, 480_000, 99.0)
    assert scene.journal.curves.of_run(model, "local", steps=(steps + 1, steps + 9)).points == ()


def test_curve_of_a_foreign_run_does_not_exist(scene, as_owner):
    model = scene.model()
    with pytest.raises(NotFoundError):
        scene.journal.curves.of_run(model, "other")
    with pytest.raises(NotFoundError):
        scene.journal.curves.last_seq(model, "other")
    assert scene.journal.curves.of_run(model, None).points == ()


def test_runs_diverge_at_the_first_step_with_different_figures(scene, statements):
    runs = [scene.model() for _ in range(3)]
    rates = {runs[0]: [1e-3] * 4, runs[1]: [1e-3] * 5, runs[2]: [1e-3, 1e-3, 5e-4]}
    for run in runs:
        for step, rate in enumerate(rates[run], start=1):
            answer(scene, run, 2 * step - 1, LossMeasured(run, 10, 5.0, math.nan if step == 2 else 20.0 / step))
            answer(scene, run, 2 * step, StepMeasured(run, 2 * step, step, grad_norm=2.5, learning_rate=rate))
    parting = scene.journal.curves.parting
    with statements() as made:
        assert parting(runs[1], runs[0]) == parting(runs[0], runs[1]) == Parting(4, None)
    assert len(made) == 4
    assert parting(runs[2], runs[0]) == Parting(3, 3)
    assert parting(scene.model(), runs[0]) == Parting(0, None)
