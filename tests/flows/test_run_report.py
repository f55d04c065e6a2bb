"""The report of a training run: one log line per second, events for automations, and drawings."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from tests.manual_clock import ManualClock

from tinkerflow.backend.journal import (
    CheckpointKind,
    CheckpointSaved,
    Effect,
    LossMeasured,
    ModelLive,
    Outcome,
    StepMeasured,
    Trained,
)
from tinkerflow.backend.spec.drift import DriftLimits
from tinkerflow.backend.spec.outliers import BlamedRow
from tinkerflow.flows.prefect.drawing import Drawing
from tinkerflow.flows.run_report import LINE_SECONDS, RunReport

RUN = "sess-ab12:train:0"


class Told:
    """A report that records its lines and events."""

    def __init__(self, trained: Trained = Trained(), budget: int = 0) -> None:  # noqa: B008  it is frozen
        self.clock = ManualClock()
        self.lines: list[tuple[int, str]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.report = RunReport(
            self.clock,
            lambda text, level: self.lines.append((level, text)),
            lambda event, **payload: self.events.append((event, payload)),
            trained,
            budget,
            drift_limits=DriftLimits(kl=0.1, agreement=0.8),
        )

    def step(self, number: int, loss: float = 6.0, *, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        assert not self.answered(LossMeasured(RUN, 4, 3.0, loss / 2))
        assert not self.answered(LossMeasured(RUN, 4, 3.0, loss / 2))
        assert self.answered(StepMeasured(RUN, 2 * number, number, 0.5, 1e-4))

    def answered(self, *effects: Effect) -> bool:
        return self.report.answered(Outcome(f"req-{id(effects)}", b"", "json", effects=effects))


def test_steps_share_one_log_line_per_second() -> None:
    told = Told()
    told.step(1)
    told.step(2)
    told.step(3)
    assert told.lines == [(logging.INFO, "step 1: loss 1, gradient norm 0.5, learning rate 0.0001, 8 tokens")]
    told.step(4, 12.0, seconds=LINE_SECONDS)
    assert told.lines[1][1].startswith("steps 2 to 4, the last one: loss 2,")
    told.step(5)
    told.report.close()
    assert [text.split(":")[0] for _, text in told.lines[2:]] == ["step 5"]
    told.report.close()
    assert len(told.lines) == 3
    assert told.events == []


def test_non_finite_loss_is_reported_once_until_it_is_finite_again() -> None:
    told = Told()
    for loss in (6.0, math.nan, math.inf, 6.0, math.inf):
        told.answered(LossMeasured(RUN, 4, 3.0, loss))
    assert told.events == [("tinkerflow.run.nan", {"loss": "nan"}), ("tinkerflow.run.nan", {"loss": "inf"})]
    assert [text for level, text in told.lines if level == logging.ERROR] == [
        "the loss is nan, not a finite number",
        "the loss is inf, not a finite number",
    ]


@pytest.mark.parametrize(
    ("column", "event", "bound", "values", "alarms", "line"),
    [
        ("kl", "tinkerflow.run.drift", {"most": 0.1}, (0.05, 0.2, 0.3, None, 0.01, 0.5), (0.2, 0.5),
         "kl_sample_train is {}, above 0.1: the samples are of older weights or computed differently"),
        ("agreement", "tinkerflow.run.routing", {"least": 0.8}, (1.0, 0.75, 0.5, None, 0.8, 0.25), (0.75, 0.25),
         "routing_agreement is {}, below 0.8: the trainer's routers choose different experts than the sampler's did"),
    ],
)  # fmt: skip
def test_figure_beyond_its_limit_is_reported_once_until_it_recovers(
    column: str, event: str, bound: Any, values: Any, alarms: Any, line: str
) -> None:
    told = Told()
    for value in values:
        told.answered(LossMeasured(RUN, 4, 3.0, 6.0, **{column: value}))
    assert told.events == [(event, {column: value, **bound}) for value in alarms]
    assert [text for level, text in told.lines if level == logging.WARNING] == [line.format(one) for one in alarms]


def test_a_sudden_rise_of_drift_below_the_limit_is_an_alarm() -> None:
    """The first steps have no usual range yet, and a rise within rounding is no alarm."""
    told = Told()
    for value in (1e-3, *(4e-5 + 1e-5 * (number % 3) for number in range(12)), 2.9e-4, 1e-3, 2e-3, 5e-5, 0.0, 0.05):
        told.answered(LossMeasured(RUN, 4, 3.0, 6.0, kl=value))
    assert [payload["kl"] for _, payload in told.events] == [1e-3, 0.05]
    assert told.lines[0][1].startswith("kl_sample_train is 0.001, and the median of the steps before is 5e-05: the ")
    off = RunReport(
        ManualClock(), lambda *_: None, lambda *_, **__: pytest.fail("an event"), Trained(), 0, DriftLimits()
    )
    for value in (*[5e-5] * 12, 0.05):
        off.answered(Outcome("r", b"", "json", effects=(LossMeasured(RUN, 4, 3.0, 6.0, kl=value),)))


def test_a_mixture_of_experts_is_watched_by_its_routing() -> None:
    """In clean steps its divergence is sometimes ten times the usual one, but the routers' agreement barely changes."""
    told = Told()
    clean = [(2e-4 if number % 7 else 2e-3, 0.97 if number % 7 else 0.92) for number in range(21)]
    for kl, agreement in (*clean, (4e-3, 0.84), (2e-4, 0.97), (0.03, 0.95)):
        told.answered(LossMeasured(RUN, 4, 3.0, 6.0, kl=kl, agreement=agreement))
    assert [(event, payload.get("kl", payload.get("agreement"))) for event, payload in told.events] == [
        ("tinkerflow.run.routing", 0.84),
        ("tinkerflow.run.drift", 0.03),
    ]
    assert told.lines[0][1].startswith("routing_agreement is 0.84, and the median of the steps before is 0.97: the ")


def test_first_expert_layer_shows_faults_that_the_average_hides() -> None:
    told = Told()
    for number in range(21):
        told.answered(LossMeasured(RUN, 4, 3.0, 6.0, agreement=0.95, first_agreement=0.98 + 0.002 * (number % 7)))
    for first in (0.96, 0.91):
        told.answered(LossMeasured(RUN, 4, 3.0, 6.0, agreement=0.90, first_agreement=first))
    assert told.events == [("tinkerflow.run.routing", {"first_agreement": 0.91, "least": 0.8})]
    assert told.lines[0][1].startswith(
        "first_routing_agreement is 0.91, and the median of the steps before is 0.99: the "
    )


def test_saved_checkpoint_is_logged_and_emitted() -> None:
    told = Told()
    path = f"tinker://{RUN}/weights/seen"
    saved = CheckpointSaved(path, RUN, CheckpointKind.WEIGHTS, "seen", "local", "tiny", 8, True, True, True, 3, 2**20)
    assert told.answered(saved)
    assert told.lines == [(logging.INFO, f"step 3: saved {path} (weights, 1.05 MB)")]
    assert told.events == [
        ("tinkerflow.checkpoint.saved", {"path": path, "kind": "weights", "step": 3, "bytes": 2**20})
    ]


def test_reaching_the_token_budget_is_reported_once() -> None:
    told = Told(budget=16)
    told.step(1)
    assert told.events == []
    told.step(2)
    told.step(3)
    assert told.events == [("tinkerflow.budget.reached", {"once": "16", "tokens": 16, "budget": 16})]
    assert [text for level, text in told.lines if level == logging.WARNING] == [
        "trained on 16 tokens: the budget of 16 is spent"
    ]


@pytest.mark.parametrize(
    ("trained", "budget", "steps"),
    [
        (Trained(made=8, last=8, begun=0), 20, {2}),
        (Trained(made=8, last=8, begun=4), 20, {1}),  # includes the earlier tokens of its step
        (Trained(made=24, last=8, begun=0), 20, {0}),  # sent again: the engine may have ended before
        (Trained(made=32, last=8, begun=0), 20, set()),
        (Trained(made=32, last=8, begun=0), 0, set()),
    ],
)
def test_next_engine_continues_the_token_budget(trained: Trained, budget: int, steps: set[int]) -> None:
    told = Told(trained, budget)
    found = {0} if told.events else set()
    for number in (1, 2, 3):
        before = len(told.events)
        told.step(number)
        found |= {number} if len(told.events) > before else set()
    assert found == steps


def test_discarded_gradients_do_not_count_against_the_token_budget() -> None:
    told = Told(budget=16)
    told.answered(LossMeasured(RUN, 100, 3.0, 1.0))
    told.answered(ModelLive(RUN))
    told.step(1)
    assert told.events == []


def test_a_step_without_gradients_is_reported() -> None:
    told = Told()
    told.step(1)
    told.answered(StepMeasured(RUN, 2, 2, 0.0, 1e-4))  # its forward_backward was refused
    told.step(3)
    warnings = [text for level, text in told.lines if level == logging.WARNING]
    assert [line.split(":")[0] for line in warnings] == ["step 2 has no gradients"]


def test_an_unusual_step_is_reported() -> None:
    told = Told()

    def step(number: int, norm: float, loss: float = 16.0) -> None:
        told.answered(LossMeasured(RUN, 8, 8.0, loss))
        told.answered(StepMeasured(RUN, number, number, norm, 1e-4))

    step(1, 100.0)  # the first steps have no usual norm yet
    for number in range(2, 12):
        step(number, 2.0 + number % 3 / 4)
    assert told.events == []
    step(12, 7.9)
    for number, norm in ((13, 15.1), (14, 1e6), (15, math.nan), (16, 2.0)):
        step(number, norm)
    step(17, 2.0, loss=80.0)
    assert [(event, payload["step"]) for event, payload in told.events] == [
        ("tinkerflow.run.outlier", 13),
        ("tinkerflow.run.outlier", 14),
        ("tinkerflow.run.outlier", 15),
        ("tinkerflow.run.outlier", 17),
    ]
    warnings = [text for level, text in told.lines if level == logging.WARNING]
    assert warnings[0].startswith("step 13: the gradient norm is 15.1, and the median of the steps before is 2.372; ")
    assert f"`tinkerflow blame {RUN} --step 13`" in warnings[0]
    assert warnings[-1].startswith("step 17: the loss is 10, and the median of the steps before is 2; ")


async def test_steps_with_negative_weights_have_no_mean_loss(
    journal: Any, connect: Any, make_runner: Any, running: Any
) -> None:
    client = await connect(journal)
    model, created = client.submit_create()
    runner = make_runner(model)
    async with running(runner.serve()), running(client.ring("model:", runner)):
        assert (await client.result(created)).error is None
        for weights in ((1.0,), (-1.0,), (1.0, -1.0)):
            for weight in weights:
                client.forward_backward(model, [5, 6], weight=weight)
            await client.result(client.optim_step(model, 0.0))
    first, second, third = journal.curves.of_run(model, None).points
    assert first.loss and first.loss > 0 and second.loss is None
    assert third.loss == first.loss, "the loss of the call with a mean"
    told = Told()
    told.answered(LossMeasured(RUN, 4, 0.0, 0.0))
    told.answered(StepMeasured(RUN, 1, 1, 0.5, 1e-4))
    assert told.lines[0][1] == "step 1: gradient norm 0.5, learning rate 0.0001, 4 tokens"


def test_the_rows_of_examined_steps_are_an_artifact_of_runs_with_a_history(client: Any, context: Any) -> None:
    (run, _), (plain, _) = (client.submit_create(number, history=not number) for number in (0, 1))

    def drawn(run_id: str, store: Any) -> list[str]:
        return [one.data for one in Drawing(client.journal, run_id, "a run", "http://here", store).draw()[1:]]

    assert drawn(run, context.store) == []
    weighted = BlamedRow(1, 5, 10.0, 2.5, weight=80.0, share=0.99, reason="weight", score=9.0)
    for step in (12, 40):
        context.store.histories.write_blame(run, step, [BlamedRow(3, 7, None, None), weighted])
    (page,) = drawn(run, context.store)
    assert page.startswith("## Step 40\n\n| row | tokens |") and "| 1 | 5 | 2 | 2.5 | weight 80, 99.0% of" in page
    assert f"`tinkerflow rerun {run} --from 12 --without 12:3`" in page
    assert drawn(run, None) == drawn(plain, context.store) == []
