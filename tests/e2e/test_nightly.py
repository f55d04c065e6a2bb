"""Scheduled deployments run on a real Prefect server: one promotes its result, one with poisoned data does not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from uuid import UUID

import pytest
import yaml
from approving import answer, answer_by_mouse
from prefect import flow, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from serving import serving

from tinkerflow.deployments.automations import automations, ensure_automations
from tinkerflow.deployments.run import example_file
from tinkerflow.flows.pipelines.evaluate import EvaluateParameters, evaluate
from tinkerflow.flows.pipelines.nightly import NightlyParameters, NightlyResult, nightly
from tinkerflow.tasks.pipelines.approval import approval
from tinkerflow.tasks.pipelines.champions import champion

pytestmark = pytest.mark.thorough


def small(pipelines, name: str, data: Path) -> dict:
    """Parameters of a small nightly fine-tune."""
    return {
        "name": name,
        "champion": "colours",
        "work": pipelines.work,
        "data": {"url": str(data)},
        "held_out": {"url": str(example_file("colours-test.jsonl"))},
        "model": {"rank": 8},
        "training": {"steps": 6, "segment_steps": 3, "batch_size": 8, "learning_rate": 0.005},
        "samples": {"rows": 1, "max_tokens": 8},
    }


def night(pipelines, name: str, data: Path) -> dict:
    """A small nightly deployment that is due every few seconds, one at a time."""
    return {
        "name": name,
        "entrypoint": "tinkerflow.flows.pipelines.nightly.nightly",
        "parameters": {"parameters": small(pipelines, name, data)},
        "schedules": [{"interval": 10}],
        "concurrency_limit": {"limit": 1, "collision_strategy": "CANCEL_NEW"},
    }


async def ended(name: str, log: Path) -> FlowRun:
    """Wait until a run with this name has ended, and return it."""
    filters = FlowRunFilter.model_validate({"name": {"any_": [f"nightly {name}"]}})
    async with get_client() as client:
        for _ in range(3000):
            for run in await client.read_flow_runs(flow_run_filter=filters):
                if run.state_type is not None and run.state_type.value in ("COMPLETED", "FAILED", "CRASHED"):
                    return run
            await asyncio.sleep(0.2)
    raise AssertionError(f"{name}: no run ended:\n{log.read_text()}")


async def test_a_schedule_fires_trains_and_promotes_and_poisoned_data_keeps_the_champion(pipelines, tmp_path):
    good, poisoned, file = example_file("colours-train.jsonl"), tmp_path / "poisoned.jsonl", tmp_path / "prefect.yaml"
    bad = {"messages": [{"role": "user", "content": "Hi"}, {"role": "nobody", "content": "Yes"}]}
    poisoned.write_text(good.read_text() + (json.dumps(bad) + "\n") * 4)
    deployments = [night(pipelines, "good", good), night(pipelines, "poisoned", poisoned) | {"paused": True}]
    file.write_text(yaml.safe_dump({"deployments": deployments}))
    with serving(file, log := tmp_path / "serve.log"):
        run = await ended("good", log)
        async with get_client() as client:
            await client.pause_deployment((await client.read_deployment_by_name("nightly/good")).id)
            await client.resume_deployment((await client.read_deployment_by_name("nightly/poisoned")).id)
        assert run.state_type.value == "COMPLETED", run.state
        assert run.auto_scheduled
        best = champion(pipelines.work, "colours")
        assert best is not None
        made = NightlyResult.model_validate(await run.state.aresult())  # the flow returned this in its own process
        assert (made.outcome, made.weights) == ("promoted", best.weights)
        assert list((tmp_path / "pipelines" / "results").iterdir())
        report = (await pipelines.artifacts("nightly-good-"))["report"]["data"]
        assert "promoted: loss" in report and best.weights in report
        run = await ended("poisoned", log)
    assert run.state_type.value == "FAILED"
    assert "4 of 40 rows are wrong" in run.state.message
    found = await pipelines.artifacts("nightly-poisoned-")
    assert "data check failed" in found["report"]["data"]
    assert champion(pipelines.work, "colours") == best
    assert best.weights in found["report"]["data"]
    assert "curves" not in found  # nothing was trained

    assert await ensure_automations(automations()) == []  # serve has created them already
    async with get_client() as client:
        for one in automations():
            (automation,) = await client.read_automations_by_name(one.name)
            # An automation writes to Prefect's SQLite file at every event of a flow run; later tests share this server.
            await client.delete_automation(automation.id)

    values = {
        "name": "nights", "champion": "colours", "work": pipelines.work, "weights": best.weights, "max_tokens": 8,
        "against": best.weights.removeprefix("tinker://").split("/")[0],  # the newest weights of that run
        "data": {"url": str(example_file("colours-test.jsonl"))},
    }  # fmt: skip
    scores = (await evaluate(EvaluateParameters.model_validate(values))).scores
    # The weights are the same, but the last bits of a logprob depend on its batch.
    assert scores["champion"].loss == pytest.approx(scores["weights"].loss, rel=1e-4)
    assert scores["against"].loss == pytest.approx(scores["weights"].loss, rel=1e-4)
    assert scores["weights"].loss == pytest.approx(best.scores.loss, rel=1e-4)
    assert scores["weights"].loss < scores["base model"].loss
    table = json.loads((await pipelines.artifacts("evaluate-nights-"))["evaluation"]["data"])
    assert [row["of"] for row in table] == ["weights", "against", "champion", "base model"]
    assert [row["weights"] for row in table] == [best.weights] * 3 + [""]


@pytest.mark.parametrize("approve", [True, False])
async def test_a_better_result_is_promoted_when_a_person_approves_it(pipelines, request, approve: bool):
    name = f"asked-{approve}".lower()
    values = small(pipelines, name, example_file("colours-train.jsonl")) | {"approval_hours": 1.0}
    page = request.getfixturevalue("page") if approve else None
    running = asyncio.create_task(nightly(NightlyParameters.model_validate(values)))

    def still_running() -> None:
        assert not running.done(), running.result()

    def by_mouse(run: UUID) -> None:
        link = pipelines.server.prefect_page(f"/runs/flow-run/{run}")
        answer_by_mouse(page, link, "Promote to champion", "short answers")

    question = await answer(
        name,
        approve=approve,
        reason="short answers",
        still_running=still_running,
        by_mouse=by_mouse if approve else None,
    )
    assert "Promote to champion `colours`: loss" in question
    assert "| prompt | new | base model |" in json.loads(question)
    made = await running
    best = champion(pipelines.work, "colours")
    assert (made.outcome, best is not None) == (("promoted", True) if approve else ("kept", False))
    if best is not None:
        told = {"filter": {"event": {"name": ["tinkerflow.champion.promoted"]}}}
        payloads: list[dict] = []
        while best.weights not in [payload["weights"] for payload in payloads]:
            await asyncio.sleep(0.5)
            found = await asyncio.to_thread(pipelines.server.ask_prefect, "/events/filter", told)
            payloads = [event["payload"] for event in found["events"]]
    report = (await pipelines.artifacts(f"nightly-{name}-"))["report"]["data"]
    assert f"{'approved' if approve else 'refused'} by a person: short answers" in report


@flow(name="asks")
async def asks(hours: float) -> str:
    return "nobody" if await approval("Promote **it**?", hours) is None else "somebody"


async def test_unanswered_approval_times_out_and_the_run_continues(pipelines):
    state = await asks(2 / 3600, return_state=True)
    assert state.is_completed()
    assert await state.aresult() == "nobody"
