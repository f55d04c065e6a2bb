"""`sft` under `tinkerflow serve`: the buttons of Prefect's page, a killed process, and a silent one."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import yaml
from prefect import flow, get_client, tags, task
from prefect.client.schemas.objects import FlowRun
from prefect.events import Event, Resource
from prefect.events.clients import PrefectEventsClient
from prefect.states import Running
from serving import serving
from tests.waiting import wait_for

from tinkerflow.deployments.automations import automations, ensure_automations
from tinkerflow.deployments.config import read_config
from tinkerflow.deployments.run import example_file
from tinkerflow.deployments.serve import ensure_tag_limits
from tinkerflow.flows.pipelines.sft import SftParameters, sft
from tinkerflow.tasks.pipelines.connection import TinkerflowConnection, connect
from tinkerflow.tasks.pipelines.progress import RunProgress, SegmentRecord
from tinkerflow.tasks.pipelines.work import open_work, read_json

pytestmark = pytest.mark.thorough


def values(pipelines, name: str) -> dict:
    """A smaller version of the example, with the shapes of other tests, whose programs are compiled already."""
    found = read_config(example_file("sft.yaml"))
    del found["held_out"]
    found |= {"name": name, "work": pipelines.work, "model": {"rank": 8}, "samples": {"rows": 0}}
    found["training"] = {"steps": 11, "segment_steps": 2, "batch_size": 8, "learning_rate": 0.005}
    return found


@contextmanager
def served(pipelines, tmp_path: Path, given: dict) -> Iterator[str]:
    """Run `tinkerflow serve` with one deployment of slow_sft.py, start a flow run of it, and yield the run's id."""
    file, log, ask = tmp_path / "prefect.yaml", tmp_path / "serve.log", pipelines.server.ask_prefect
    one = {"name": given["name"], "entrypoint": "slow_sft.slow_sft", "parameters": {"parameters": given}}
    file.write_text(yaml.safe_dump({"deployments": [one]}))
    mine = {"deployments": {"name": {"any_": [given["name"]]}}}
    with serving(file, log):
        wait_for(lambda: ask("/deployments/filter", mine))
        (deployment,) = ask("/deployments/filter", mine)
        run = ask(f"/deployments/{deployment['id']}/create_flow_run", {})["id"]
        try:
            yield run
        except BaseException:
            print(log.read_text())
            raise


def test_planted_deployments_are_not_executed(pipelines, tmp_path, monkeypatch):
    """Runs of a deployment with pull steps, another entry point or job variables fail."""
    monkeypatch.setenv("SLOW_SFT", str(tmp_path))
    marker, ask = tmp_path / "executed", pipelines.server.ask_prefect
    step = {"prefect.deployments.steps.run_shell_script": {"script": f"touch {marker}"}}
    given = values(pipelines, "planted")
    with served(pipelines, tmp_path, given) as run:
        wait_for(lambda: state(pipelines, run)["type"] == "RUNNING")
        ask(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}, "force": True})
        (mine,) = ask("/deployments/filter", {"deployments": {"name": {"any_": ["planted"]}}})
        kept = {name: mine[name] for name in ("flow_id", "entrypoint", "parameters", "parameter_openapi_schema")}
        for name, plants in (("planted", {"pull_steps": [step]}), ("planted", {"entrypoint": f"{marker}.py:main"})):
            ask("/deployments/", {**kept, "name": name, **plants})
            other = ask(f"/deployments/{mine['id']}/create_flow_run", {})["id"]
            wait_for(lambda other=other: state(pipelines, other)["type"] == "FAILED")
            assert "was changed on the Prefect server" in state(pipelines, other)["message"]
            ask("/deployments/", {**kept, "name": name, "pull_steps": None})
        variables = {"job_variables": {"env": {"PYTHONSTARTUP": str(marker)}}}
        other = ask(f"/deployments/{mine['id']}/create_flow_run", variables)["id"]
        wait_for(lambda: state(pipelines, other)["type"] == "FAILED")
        new = ask("/deployments/", {**kept, "name": "new", "pull_steps": [step]})["id"]
        late = ask(f"/deployments/{new}/create_flow_run", {})["id"]
        wait_for(lambda: state(pipelines, run)["type"] == "CANCELLED")
        assert state(pipelines, late)["type"] == "SCHEDULED", "`serve` looks for runs of its own deployments only"
    assert not marker.exists()


def state(pipelines, run: str) -> dict:
    return pipelines.server.ask_prefect(f"/flow_runs/{run}")["state"]


def segments(pipelines, run: str) -> list[SegmentRecord]:
    """The segments that a run has recorded so far."""
    plan = read_json(open_work(pipelines.work), f"progress/{run}/plan.json")
    return [] if plan is None else RunProgress(pipelines.work, run, plan["plan"]).segments()


def processes_of(waiting: Path) -> list[int]:
    """Pids of the processes that reported in this folder and still exist."""
    return [int(reported.name) for reported in waiting.iterdir() if Path("/proc", reported.name).exists()]


def test_buttons_and_kill_9_do_not_change_the_result_of_a_served_run(pipelines, tmp_path, page, monkeypatch):
    waiting = tmp_path / "waiting"
    waiting.mkdir()
    monkeypatch.setenv("SLOW_SFT", str(waiting))
    given = values(pipelines, "clicked")
    with served(pipelines, tmp_path, given) as run:
        url = pipelines.server.prefect_page(f"/runs/flow-run/{run}")

        def made_three_steps(processes: int) -> None:
            wait_for(lambda: len(list(waiting.iterdir())) == processes)

        def shown(word: str) -> None:
            with page.at(url):
                page.shows(word)
                page.picture(f"sft-{word.lower()}")

        made_three_steps(1)
        with page.at(url):
            clicked = page.press("Suspend", "Submit")
            wait_for(lambda: len(segments(pipelines, run)) == 2)
        print(f"\nSuspend: the state was saved {time.monotonic() - clicked:.1f} s after the click")
        wait_for(lambda: not processes_of(waiting))
        assert state(pipelines, run)["name"] == "Suspended"
        shown("Suspended")

        with page.at(url):
            clicked = page.press("Resume", "Submit")
            wait_for(lambda: state(pipelines, run)["type"] != "PAUSED")
        made_three_steps(2)
        print(f"Resume: three more steps were made {time.monotonic() - clicked:.1f} s after the click")
        with page.at(url):
            clicked = page.press("Cancel", "Confirm")
            wait_for(lambda: len(segments(pipelines, run)) == 4)
        print(f"Cancel: the state was saved {time.monotonic() - clicked:.1f} s after the click")
        wait_for(lambda: state(pipelines, run)["type"] == "CANCELLED")
        wait_for(lambda: not processes_of(waiting))
        shown("Cancelled")
        with pipelines.server.client() as service:
            left = segments(pipelines, run)[-1].state
            client = service.create_training_client_from_state_with_optimizer(left).result()
            assert client.get_info().model_data.model_name == pipelines.server.base_model

        with page.at(url):
            page.press("Retry", "Retry")
            wait_for(lambda: state(pipelines, run)["type"] != "CANCELLED")
        made_three_steps(3)
        (pid,) = processes_of(waiting)
        os.kill(pid, signal.SIGKILL)  # step 9 is lost with the process
        wait_for(lambda: state(pipelines, run)["type"] == "CRASHED")
        before = segments(pipelines, run)
        shown("Crashed")
        with page.at(url):
            page.press("Retry", "Retry")
            wait_for(lambda: state(pipelines, run)["type"] != "CRASHED")
        wait_for(lambda: state(pipelines, run)["type"] == "COMPLETED")
        shown("Completed")
    after = segments(pipelines, run)
    assert after[: len(before)] == before
    made = [[one.step for one in segment.steps] for segment in after]
    assert made == [[1, 2], [3], [4, 5], [6], [7, 8], [9, 10], [11]]  # no step is made twice
    undisturbed = asyncio.run(sft(SftParameters.model_validate(given | {"name": "undisturbed-11"})))
    mine, other = pipelines.weights(after[-1].state), pipelines.weights(undisturbed.state)
    assert mine.keys() == other.keys() and all(np.array_equal(mine[name], other[name]) for name in mine)


async def test_automation_marks_a_silent_run_as_crashed_but_not_one_that_waits(pipelines):
    name = "tinkerflow: test of silence"
    (wanted,) = [one for one in automations() if "heartbeat" in one.name]
    trigger = wanted.trigger.model_copy(update={"within": timedelta(seconds=10)})
    wanted = wanted.model_copy(update={"name": name, "trigger": trigger})
    assert await ensure_automations([wanted]) == [name]
    assert await ensure_automations([wanted]) == []  # it exists already
    async with get_client() as client:
        try:
            runs = [await client.create_flow_run(sft, name=name, state=Running()) for _ in range(3)]
            held, delayed, silent = runs

            async def say(run: FlowRun, what: str) -> None:
                resource = {"prefect.resource.id": f"prefect.flow-run.{run.id}", "prefect.resource.name": name}
                await events.emit(Event(event=f"prefect.flow-run.{what}", resource=Resource(resource)))

            async with asyncio.timeout(600), PrefectEventsClient() as events:
                for turn in itertools.count():
                    if turn % 120 == 0:  # repeated, because a busy server may lose an event
                        for run in runs:
                            await say(run, "heartbeat")
                    if (found := await client.read_flow_run(silent.id)).state.is_crashed():
                        break
                    await say(held, "Suspended")  # repeated, because events that arrive together have no order
                    await say(delayed, "AwaitingRetry")
                    await asyncio.sleep(0.5)
            for run in (held, delayed):
                assert (await client.read_flow_run(run.id)).state.is_running()
        finally:
            (made,) = await client.read_automations_by_name(name)
            await client.delete_automation(made.id)
    assert "its process sent no heartbeat" in found.state.message


async def test_prefect_block_gives_the_server_address(pipelines, monkeypatch):
    block = TinkerflowConnection(base_url=pipelines.server.api_url, api_key="tml-of-the-block")
    await block.asave("elsewhere", overwrite=True)
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")  # the block takes precedence
    async with connect("elsewhere") as server:
        assert (await server.base_model("")).name == pipelines.server.base_model
    async with get_client() as client:
        kept = await client.read_block_document_by_name("elsewhere", "tinkerflow-connection", include_secrets=False)
    assert "tml-of-the-block" not in str(kept.data)


async def test_tag_limit_makes_runs_take_turns(pipelines):
    await ensure_tag_limits({"one-at-a-time": 1})
    await ensure_tag_limits({"one-at-a-time": 1})  # it exists already
    inside, most = set(), 0

    @task
    async def turn(number: int) -> None:
        nonlocal most
        inside.add(number)
        most = max(most, len(inside))
        await asyncio.sleep(0.3)
        inside.remove(number)

    @flow
    async def trains(number: int) -> None:
        with tags("one-at-a-time"):  # as training.py does with the flow run's tags
            await turn(number)

    async with asyncio.timeout(600):
        await asyncio.gather(trains(1), trains(2))
    assert most == 1
