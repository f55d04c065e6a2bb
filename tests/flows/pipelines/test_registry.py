"""The registry of pipelines, their cancellation, and their refusal of invalid parameters."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Any

import pytest
from pydantic import ValidationError

from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines import fine_tuning, pipelines
from tinkerflow.flows.pipelines.distill import DistillParameters
from tinkerflow.flows.pipelines.dpo import DpoParameters
from tinkerflow.flows.pipelines.fine_tuning import cancellable
from tinkerflow.flows.pipelines.rl import RlParameters
from tinkerflow.tasks.pipelines.control import StoppedError
from tinkerflow.tasks.pipelines.parameters import EvaluateParameters, NightlyParameters

DATA: dict[str, Any] = {"data": {"url": "rows.jsonl"}}


def test_pipelines_are_registered_under_their_module_names() -> None:
    assert list(pipelines()) == sorted(pipelines())
    for name, pipeline in pipelines().items():
        assert pipeline.flow.fn.__module__ == f"tinkerflow.flows.pipelines.{name}"
        assert pipeline.summary.endswith(".")


async def test_stopped_flow_is_cancelled_with_its_reason() -> None:
    @cancellable
    async def work(*, stops: bool) -> int:
        if stops:
            raise StoppedError("stopped after step 3")
        return 3

    assert await work(stops=False) == 3
    state: Any = await work(stops=True)
    assert state.is_cancelled() and state.message == "stopped after step 3"


async def test_early_signal_cancels_the_run() -> None:
    @cancellable
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    state: Any = await work()
    assert state.is_cancelled() and state.message == "stopped on request, while no step was running"


async def test_the_reason_of_a_failure_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, int]] = []
    monkeypatch.setattr(fine_tuning, "log_line", lambda text, level=logging.INFO: lines.append((text, level)))

    @cancellable
    async def work(error: Exception) -> None:
        raise error

    for error in (UserError("data.url 'x': does not exist"), KeyError("loss")):
        with pytest.raises(type(error)):
            await work(error)
    await work(StoppedError("stopped after step 3"))
    assert lines == [
        ("failed: data.url 'x': does not exist", logging.ERROR),
        ("failed: KeyError: 'loss'", logging.ERROR),
        ("stopped after step 3", logging.INFO),
    ]


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (DpoParameters, {"beta": 0}, "beta\n  Input should be greater than 0"),
        (RlParameters, {}, "give either reward or environment"),
        (RlParameters, {"reward": "a:b", "environment": "c:D"}, "give reward or environment, not both"),
        (
            EvaluateParameters,
            {"reward": "a:b", "environment": "c:D"},
            "give reward or environment, not both",
        ),
        (
            NightlyParameters,
            {"held_out": {"url": "a.jsonl"}, "champion": "a", "metric": "reward"},
            "metric: reward needs a reward or an environment",
        ),
        (
            NightlyParameters,
            {"held_out": {"url": "a.jsonl"}, "champion": "a", "reward": "a:b"},
            "metric: reward needs a reward or an environment, and they need metric: reward",
        ),
        (RlParameters, {"reward": "a.b"}, "reward\n  Value error, write module:function"),
        (RlParameters, {"reward": "a:b", "group_size": 1}, "group_size\n  Input should be greater than or equal to 2"),
        (
            RlParameters,
            {"reward": "a:b", "loss": "cross_entropy"},
            "loss\n  Input should be 'importance_sampling', 'ppo'",
        ),
        (
            DistillParameters,
            {"teacher": {"weights": "a/b"}},
            "teacher.weights\n  Value error, must be the tinker:// path",
        ),
        (DistillParameters, {"reward": "a:b"}, "reward\n  Extra inputs are not permitted"),
    ],
)
def test_invalid_parameters_are_refused_with_their_names(model: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        model.model_validate(DATA | values)
    assert message in str(error.value)
