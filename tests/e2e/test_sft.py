"""The pipeline `sft` on the real service: it learns, shows its progress, and can be paused, stopped and retried.

test_served.py tests that it continues after a kill.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random

import numpy as np
import pytest
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, LogFilter
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling, Paused

from tinkerflow.backend.tracking.trackers.tensorboard import _summaries
from tinkerflow.deployments.config import read_config
from tinkerflow.deployments.run import example_file
from tinkerflow.flows.pipelines.sft import SftParameters, SftRecipe, sft
from tinkerflow.tasks.pipelines.control import Control
from tinkerflow.tasks.pipelines.progress import RunProgress
from tinkerflow.tasks.pipelines.schedule import batch_of
from tinkerflow.tasks.pipelines.work import open_work, read_json


def config(pipelines, name: str, **training) -> dict:
    """A smaller version of the example, with the rank of other tests, whose programs are compiled already."""
    found = read_config(example_file("sft.yaml"))
    found |= {"name": name, "work": pipelines.work, "model": {"rank": 8}, "samples": {"rows": 2, "max_tokens": 8}}
    found["training"] = {"steps": 6, "segment_steps": 2, "batch_size": 8, "learning_rate": 0.005} | training
    return found


async def run(values: dict, **options):
    return await sft(SftParameters.model_validate(values), **options)


async def test_sft_lowers_the_loss_and_writes_its_artifacts(pipelines, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="prefect.flow_runs")  # independent of Prefect's level at its import
    monkeypatch.setenv("TINKERFLOW_TRACKING_DIR", str(tmp_path))
    values = config(pipelines, "shown", steps=12, segment_steps=4) | {"resume": "shown", "tracking": "tensorboard"}
    trained = await run(values)
    assert trained.last["loss"] < 0.7 * trained.first["loss"]
    assert len(trained.samples) == 2

    found = await pipelines.artifacts("sft-shown-")
    assert found.keys() == {"data", "progress", "curves", "steps", "samples", "checkpoints"}
    assert {one["type"] for one in found.values()} == {"markdown", "progress", "image", "table"}
    assert found["progress"]["data"] == 100
    assert "| good rows | 36 |" in found["data"]["data"]
    svg = base64.b64decode(found["curves"]["data"].partition(",")[2]).decode()
    assert svg.startswith("<svg") and all(f">{name}<" in svg for name in ("loss", "grad_norm", "learning_rate"))
    assert [row["step"] for row in json.loads(found["steps"]["data"])] == list(range(1, 13))
    assert "after step 12" in json.loads(found["samples"]["data"])[0]
    page = found["checkpoints"]["data"]
    assert trained.state in page and trained.weights in page and "| data | `" in page

    rest = pipelines.server.rest()
    info = rest.get_weights_info_by_tinker_path(trained.state).result()
    assert info.lora_rank == 8
    saved = rest.list_checkpoints(trained.training_run).result().checkpoints
    assert {one.tinker_path for one in saved if one.expires_at is None} == {trained.state, trained.weights}
    async with get_client() as client:  # one version for each key, despite many updates
        every = await client.read_artifacts(limit=200)
    assert sum(one.key == "sft-shown-curves" for one in every) == 1

    again = await run(values)  # finished: no step is made
    assert (again.state, again.last) == (trained.state, trained.last)
    files = sorted((tmp_path / "tensorboard/sft/shown").glob("*.tfevents.*"))
    events = [event for file in files for event in _summaries(file)]
    tracked = sorted(
        (value.tag, event.step) for event in events for value in event.summary.value if value.tag[:3] != "run"
    )
    measured = ("grad_norm", "learning_rate", "loss", "trained_tokens")
    wanted = [(name, step) for name in measured for step in range(1, 13)]
    assert tracked == sorted([*wanted, *(("held_out_loss", step) for step in (4, 8, 12))])
    with pytest.raises(Exception, match=r"different .*data \(training.learning_rate was \S+ and is 0.001\)"):
        await run(values | {"training": values["training"] | {"learning_rate": 0.001}})
    page = f"training run {trained.training_run}: {pipelines.server.api_url}/training_runs/{trained.training_run}"
    wanted = [
        page,
        "step 1 of 12: loss ",
        f"step 12 is saved as {trained.state}, held_out_loss ",
        "step 12 of 12: loss ",
    ]
    await wait_for_log_lines("shown", [*wanted, "failed: resume 'shown': this run was started"])


async def flow_run_in(name: str, *states: StateType):
    """The run of `sft` with this name, once it is in one of the states."""
    async with get_client() as client:
        for _ in range(6000):
            filters = FlowRunFilter.model_validate({"name": {"any_": [f"sft {name}"]}})
            for one in await client.read_flow_runs(flow_run_filter=filters):
                if one.state_type in states:
                    return one
            await asyncio.sleep(0.1)
    raise AssertionError(f"{name}: never {states}")


async def wait_for_log_lines(name: str, beginnings: list[str]) -> None:
    """Wait until the logs of the runs with this name contain lines with all these beginnings."""
    async with get_client() as client, asyncio.timeout(600):
        while True:
            filters = FlowRunFilter.model_validate({"name": {"any_": [f"sft {name}"]}})
            runs = [one.id for one in await client.read_flow_runs(flow_run_filter=filters)]
            logs = await client.read_logs(LogFilter.model_validate({"flow_run_id": {"any_": runs}}))
            if all(any(line.message.startswith(begin) for line in logs) for begin in beginnings):
                return
            await asyncio.sleep(0.5)


async def shows_progress(pipelines, name: str) -> None:
    """Wait until the artifact `progress` exists."""
    async with asyncio.timeout(600):
        while "progress" not in await pipelines.artifacts(f"sft-{name}-"):  # noqa: ASYNC110  it is in another process
            await asyncio.sleep(0.1)


async def test_pause_holds_resume_continues_and_cancel_saves_a_state(pipelines, monkeypatch):
    may_go_on, asked, held = Control.may_go_on, 0, asyncio.Event()

    async def watched(control):
        nonlocal asked
        asked += 1
        if control.paused:
            held.set()
        return await may_go_on(control)

    monkeypatch.setattr(Control, "may_go_on", watched)
    values = config(pipelines, "buttons", steps=100_000, segment_steps=100_000, schedule="constant")
    values["resume"] = "buttons"
    running = asyncio.create_task(run(values, return_state=True))
    await shows_progress(pipelines, "buttons")
    flow_run = await flow_run_in("buttons", StateType.RUNNING)
    async with get_client() as client:
        await client.set_flow_run_state(flow_run.id, Paused(timeout_seconds=3600))
        async with asyncio.timeout(600):
            await held.wait()
        before = asked
        assert not running.done()
        await client.resume_flow_run(flow_run.id)
        async with asyncio.timeout(600):
            while asked < before + 3:  # noqa: ASYNC110  a count has no event
                await asyncio.sleep(0.1)
        await client.set_flow_run_state(flow_run.id, Cancelling())
    state = await asyncio.wait_for(running, 300)
    assert state.is_cancelled(), state
    plan = read_json(open_work(pipelines.work), "progress/buttons/plan.json")["plan"]
    (segment,) = RunProgress(pipelines.work, "buttons", plan).segments()
    assert f"stopped after step {segment.last_step}" in state.message
    with pipelines.server.client() as service:
        client = service.create_training_client_from_state_with_optimizer(segment.state).result()
        assert client.get_info().model_data.model_name == pipelines.server.base_model


async def test_row_that_spoils_a_step_is_left_out_without_a_trace(pipelines, tmp_path, monkeypatch):
    spoiled, size, draw = 25, 4, random.Random(5)
    bad = batch_of(spoiled - 1, size=size, rows=400, seed=0)[2]
    rows = [{"prompt": f"say {n % 7}", "completion": "yes yes yes yes"} for n in range(400)]
    rows[bad] = {"prompt": "say 1", "completion": "".join(chr(draw.randrange(33, 126)) for _ in range(300))}
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    values = config(pipelines, "spoiled", steps=32, segment_steps=28, batch_size=size, learning_rate=0.002)
    values |= {"data": {"url": str(file)}, "resume": "spoiled", "on_outlier": "skip"}
    values.pop("held_out", None)
    trained = await run(values)
    assert [(one.step, one.row) for one in trained.left_out] == [(spoiled, bad)]
    found = await pipelines.artifacts("sft-spoiled-")
    assert f"Left out from now on: rows {bad} of the data." in found["outliers"]["data"]
    assert f"{bad} (step {spoiled})" in found["checkpoints"]["data"]
    counts = [row["rows_left_out"] for row in json.loads(found["steps"]["data"])]
    assert counts == [0.0] * (spoiled - 1) + [1.0] * (32 - spoiled + 1)
    assert (await run(values)).left_out == trained.left_out  # finished: the record contains it

    batch = SftRecipe.batch
    monkeypatch.setattr(SftRecipe, "batch", lambda recipe, step: [row for row in batch(recipe, step) if row != bad])
    never = await run(values | {"name": "never", "resume": "never", "on_outlier": "report"})
    wanted, weights = pipelines.weights(never.state), pipelines.weights(trained.state)
    assert weights.keys() == wanted.keys() and all(np.array_equal(weights[name], wanted[name]) for name in wanted)
    assert never.last["loss"] == trained.last["loss"] and never.left_out == []
