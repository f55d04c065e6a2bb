"""The outcome of a pipeline, as sent to the page of its training run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tinkerflow.api.routes.runs import RunMetricsBody
from tinkerflow.backend.core.errors import UserError
from tinkerflow.flows.pipelines.fine_tuning import _mean, _outcome_reported, checkpoints_page, decisive_parameters
from tinkerflow.tasks.pipelines.connection import ServerClients
from tinkerflow.tasks.pipelines.control import StoppedError
from tinkerflow.tasks.pipelines.parameters import NightlyParameters, RlParameters
from tinkerflow.tasks.pipelines.progress import SegmentRecord, StepMetrics
from tinkerflow.tasks.pipelines.reported import ReportedMetrics
from tinkerflow.tasks.pipelines.trainer import Lineage


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, ("completed", "")),
        (UserError("reward a:b: no"), ("failed", "reward a:b: no")),
        (KeyError("x"), ("failed", "KeyError: 'x'")),
        (StoppedError("stopped after step 3"), ("cancelled", "stopped after step 3")),
    ],
)
async def test_the_end_of_a_pipeline_is_sent_for_its_newest_run(
    error: Exception | None, outcome: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, ...]] = []

    async def end(self: Any, *told: str) -> None:
        sent.append(told)

    monkeypatch.setattr(ReportedMetrics, "end", end)
    server = ServerClients(None, None, "http://127.0.0.1:1")  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(newest_run="run-2", run=SimpleNamespace(server=server))
    raised = None
    try:
        async with _outcome_reported(trainer):
            if error is not None:
                raise error
    except Exception as caught:  # noqa: BLE001  any of the parameters
        raised = caught
    assert raised is error and sent == [("run-2", *outcome)]
    trainer.newest_run = ""
    async with _outcome_reported(trainer):
        pass
    assert len(sent) == 1, "no training run was made"


def test_a_resumed_run_may_give_its_environments_more_time() -> None:
    given = {"data": {"url": "rows.jsonl"}, "reward": "rewards:right"}
    plans = [
        decisive_parameters(RlParameters.model_validate(given | more))
        for more in ({}, {"environment_seconds": 1800, "environment_retries": 4}, {"group_size": 4})
    ]
    assert plans[0] == plans[1] != plans[2]


def test_a_resumed_nightly_run_may_have_another_margin_and_approval() -> None:
    given = {"data": {"url": "rows.jsonl"}, "held_out": {"url": "held-out.jsonl"}, "champion": "best"}
    plans = [
        decisive_parameters(NightlyParameters.model_validate(given | more))
        for more in ({}, {"margin": 0.5, "approval_hours": 2}, {"metric": "exact_match"})
    ]
    assert plans[0] == plans[1] != plans[2]


def test_means_follow_the_order_of_names_and_count_missing_values_as_0() -> None:
    first = StepMetrics(step=1, values={"left_out_episodes": 4, "reward": 1.0})
    second = StepMetrics(step=2, values={"reward": 0.0, "loss": 2.0})
    means = _mean([first, second], ("reward", "loss", "left_out_episodes", "unknown"))
    assert list(means.items()) == [("reward", 0.5), ("loss", 1.0), ("left_out_episodes", 2.0)]


def test_the_page_of_checkpoints_lists_the_newest() -> None:
    segments = [
        SegmentRecord(first_step=step, last_step=step, state=f"tinker://run/weights/{step}", steps=[])
        for step in range(1, 103)
    ]
    page = checkpoints_page(segments, Lineage("sft", "run", "rows.jsonl", "code"), "").splitlines()
    assert page[-101:-99] == ["| and 2 before | | |", "| 3 | `tinker://run/weights/3` |  |"]
    assert page[-1].startswith("| 102 |") and "before" not in checkpoints_page(segments[2:], Lineage(*"abcd"), "")


async def test_refused_outcome_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    reported = ReportedMetrics(ServerClients(None, None, "http://127.0.0.1:1"))  # type: ignore[arg-type]
    await reported.end("run-2", "failed", "why")
    await reported.close()
    assert "does not show that it is failed" in caplog.text


async def test_values_that_the_server_refuses_are_left_out_of_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[RunMetricsBody] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(RunMetricsBody.model_validate_json(request.content))
        return httpx.Response(200)

    http = httpx.AsyncClient(base_url="http://tinkerflow", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(ServerClients, "http", lambda *_: http)
    reported = ReportedMetrics(ServerClients(None, None))  # type: ignore[arg-type]
    await reported.send("run-2", {1: {"reward": 0.5}, 2: {"reward": -1e31, "entropy": 1e30}, 3: {"reward": math.nan}})
    await reported.close()
    assert [(one.step, one.values) for body in sent for one in body.steps] == [
        (1, {"reward": 0.5}),
        (2, {"entropy": 1e30}),
    ]
