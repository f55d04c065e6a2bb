"""Flow runs and task runs on a real Prefect server, and work while the server is away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect_server import prefect_http

from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.journal import Kind, ModelState
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.supervise.processes import free_port
from tinkerflow.flows.dispatcher import Dispatcher, observed
from tinkerflow.flows.groups import ServedModel
from tinkerflow.flows.prefect import window
from tinkerflow.flows.prefect.connection import PrefectConnection, open_prefect
from tinkerflow.flows.prefect.controls import CANCELLED
from tinkerflow.flows.prefect.mirror import Mirror, short_name
from tinkerflow.flows.prefect.pacing import Pacing
from tinkerflow.flows.prefect.server import PrefectServer, listen, start_server
from tinkerflow.flows.runner import ModelRunner, Why
from tinkerflow.flows.sampling_runner import SamplingRunner
from tinkerflow.flows.snapshots import SnapshotPolicy

pytestmark = [
    # Prefect's event worker keeps a few connections open until they are collected. Their number does not grow.
    pytest.mark.usefixtures("collected_connections"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <:pytest.PytestUnraisableExceptionWarning"),
]

BASE = "folder/unigram"


@pytest.fixture
async def connection(server: PrefectServer) -> AsyncIterator[PrefectConnection]:
    connection = PrefectConnection(server.access.api_url, "test")
    with (
        connection.settings(server.access.credential),
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 5}),
    ):  # retries, because nothing here checks whether the server is back
        yield connection
        await connection.close()


async def runs(url: str, kind: str, wanted: int, **filters: object) -> list[dict[str, Any]]:
    """Wait until there are `wanted` flow or task runs and all have ended. The server writes them with some delay."""
    found: list[dict[str, Any]] = []
    async with prefect_http(url) as http:
        for _ in range(600):
            order = {"sort": "EXPECTED_START_TIME_ASC"} if kind == "task_runs" else {}
            found = await post(http, f"/{kind}/filter", json=filters | order)
            if len(found) >= wanted and all(
                run["state"] and run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") for run in found
            ):
                break
            await asyncio.sleep(0.2)
    return found


def tagged(model: str) -> dict[str, Any]:
    """The filter for a model's flow runs, which are tagged with its id."""
    return {"flow_runs": {"tags": {"all_": [model]}}}


class Runner:
    """A model's runner with its mirror, combined as in the dispatcher."""

    def __init__(self, context: Any, model: str, mirror: Mirror, steps: int = 0) -> None:
        observers = mirror.observe_training_run(model, BASE, steps=steps)
        self.runner = ModelRunner(context, observers, SnapshotPolicy(50, 60.0), model, steps)
        self.wake, self.stop = self.runner.wake, self.runner.stop
        self.serve = partial(observed, self.runner.serve, self.runner.observers)


async def serve(
    connection: PrefectConnection, context: Any, client: Any, work: Any, rate: float = 1000.0, **said: Any
) -> str:
    """Create a model, let `work(model)` submit requests, answer them, and unload it. Returns the model's id."""
    model, created = client.submit_create(**said)
    mirror = Mirror(connection, Pacing(rate, SystemClock()), journal=client.journal, api_url="http://here")
    runner = Runner(context, model, mirror)
    serving = asyncio.create_task(runner.serve())
    await client.results(created, *work(model))
    client.journal.models.request_unload(model, "its session has ended")
    runner.wake()
    assert (await asyncio.wait_for(serving, 60)).why is Why.DONE
    return str(model)


async def test_a_flow_run_per_model_and_a_readable_task_run_per_batch(
    connection: PrefectConnection, context: Any, client: Any
) -> None:
    def work(model: str) -> list[str]:
        return [
            client.forward_backward(model, [1]),
            client.forward_backward(model, [2]),
            client.optim_step(model),
            client.forward_backward(model, [99]),
            client.optim_step(model),
        ]

    model = await serve(connection, context, client, work)
    (flow_run,) = await runs(connection.api_url, "flow_runs", 1, **tagged(model))
    assert flow_run["state_type"] == "COMPLETED"
    assert flow_run["state"]["message"] == "unloaded: its session has ended"
    assert flow_run["name"] == f"{short_name(model)} unigram"
    assert client.journal.models.get(model, None).flow_run == flow_run["id"]
    assert {"tinkerflow", "unigram"} < set(flow_run["tags"])

    found = await runs(connection.api_url, "task_runs", 6, flow_runs={"id": {"any_": [flow_run["id"]]}})
    short = f"model-{model.partition(':')[0][-4:]}-0"
    by_name = {run["name"]: run for run in found}
    assert set(by_name) == {
        f"{short}/step-000001/create_model",
        f"{short}/step-000001/forward_backward",
        f"{short}/step-000001/optim_step",
        f"{short}/step-000002/forward_backward",
        f"{short}/step-000002/optim_step",
        f"{short}/step-000003/unload",
    }
    assert by_name[f"{short}/step-000001/forward_backward"]["state"]["message"] == "forward_backward x2"
    failed = by_name[f"{short}/step-000002/forward_backward"]["state"]
    assert failed["type"] == "FAILED" and "data[0]" in failed["message"]
    async with prefect_http(connection.api_url) as http:
        mine = {"artifacts": {"flow_run_id": {"any_": [flow_run["id"]]}}}
        drawn = {one["type"]: one for one in await post(http, "/artifacts/filter", json=mine)}
    assert drawn["markdown"]["key"] == f"{model.replace(':', '-')}-run"
    assert f"(http://here/training_runs/{model})" in drawn["markdown"]["data"]
    assert "**2** optimizer steps" in drawn["markdown"]["data"]
    assert drawn["image"]["data"].startswith("data:image/svg+xml;base64,")
    assert all(run["tags"] == [] for run in found)  # a tag costs a round trip to the server before every task run


async def test_saved_checkpoint_is_an_asset_of_its_run_with_its_ancestors(
    connection: PrefectConnection, context: Any, client: Any
) -> None:
    parent = f"tinker://{await client_saved(connection, context, client, 0, 'parent')}/weights/parent"
    metadata = {"data": "sha256:0a"}
    model = await client_saved(connection, context, client, 1, "child", origin=parent, user_metadata=metadata)
    path = f"tinker://{model}/weights/child"
    (flow_run,) = await runs(connection.api_url, "flow_runs", 1, **tagged(model))
    prefixes = {"filter": {"event": {"prefix": ["prefect.asset."]}}}
    events: list[Any] = []
    async with prefect_http(connection.api_url) as http, asyncio.timeout(120):
        while not any(one["resource"]["prefect.resource.id"] == path for one in events):
            await asyncio.sleep(0.2)
            events = (await post(http, "/events/filter", json=prefixes))["events"]
    (made,) = (one for one in events if one["resource"]["prefect.resource.id"] == path)
    assert made["event"] == "prefect.asset.materialization.succeeded"
    assert made["resource"]["prefect.resource.name"] == "child"
    assert made["resource"]["prefect.asset.url"] == f"http://here/checkpoints/{model}/weights/child"
    assert (made["payload"]["kind"], made["payload"]["step"]) == ("weights", 1)
    upstream = ["https://huggingface.co/folder/unigram", parent, f"tinker://{model}/data"]
    assert [(one["prefect.resource.role"], one["prefect.resource.id"]) for one in made["related"]] == [
        ("flow-run", f"prefect.flow-run.{flow_run['id']}"),
        *(("asset", one) for one in upstream),
        ("asset-materialized-by", "tinkerflow"),
    ]
    referenced = [
        one["resource"]
        for one in events
        if one["event"] == "prefect.asset.referenced"
        and one["related"][0]["prefect.resource.id"] == f"prefect.flow-run.{flow_run['id']}"
    ]
    assert sorted(one["prefect.resource.id"] for one in referenced) == sorted(upstream)
    (data,) = (one for one in referenced if one["prefect.resource.id"] == upstream[2])
    assert data["prefect.asset.description"] == "sha256:0a"


async def client_saved(
    connection: PrefectConnection, context: Any, client: Any, number: int, name: str, **said: Any
) -> str:
    """Create a model, train one step, save it under the name, and return the model's id."""

    def work(model: str) -> list[str]:
        trained = [client.forward_backward(model, [1]), client.optim_step(model)]
        return [*trained, client.submit(model, Kind.SAVE_WEIGHTS, {"path": name})]

    return await serve(connection, context, client, work, number=number, **said)


async def test_task_runs_are_shared_above_the_rate(connection: PrefectConnection, context: Any, client: Any) -> None:
    steps = 60

    def work(model: str) -> list[str]:
        return [r for _ in range(steps) for r in (client.forward_backward(model, [1]), client.optim_step(model))]

    model = await serve(connection, context, client, work, rate=2.0)
    (flow_run,) = await runs(connection.api_url, "flow_runs", 1, **tagged(model))
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(120):
        while not any(f"-{steps + 1:06d}" in run["name"] for run in found):  # the unload comes after them
            found = await runs(connection.api_url, "task_runs", 5, flow_runs={"id": {"any_": [flow_run["id"]]}})
    assert len(found) < steps
    assert client.journal.models.get(model, None).step == steps


async def test_samples_share_a_task_run(connection: PrefectConnection, context: Any, client: Any) -> None:
    mirror = Mirror(connection, Pacing(1000.0, SystemClock()))
    runner = SamplingRunner(context, mirror.observe_sampling(BASE), most_waiting=8)
    serving = asyncio.create_task(observed(runner.serve, runner.observers))
    sampler = client.sampler(0)
    requests = [client.sample(sampler) for _ in range(3)]
    runner.wake()
    await client.results(*requests)
    runner.stop()
    await asyncio.wait_for(serving, 60)
    (flow_run,) = await runs(connection.api_url, "flow_runs", 1, flow_runs={"name": {"any_": ["unigram sampling"]}})
    found = await runs(connection.api_url, "task_runs", 1, flow_runs={"id": {"any_": [flow_run["id"]]}})
    assert [(run["name"], run["state"]["message"]) for run in found] == [("unigram/sample-000001", "sample x3")]


async def test_a_training_run_is_one_flow_run_over_all_engines(
    connection: PrefectConnection, context: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "SINGLE", 1)
    monkeypatch.setattr(window, "GROWTH", 4.0)
    model, created = client.submit_create()
    async with prefect_http(connection.api_url) as http:
        for engine in range(2):
            mirror = Mirror(connection, Pacing(1000.0, SystemClock()), journal=client.journal)
            if engine:
                assert await mirror.reconcile() >= 1
            runner = Runner(context, model, mirror, steps=3 * engine)
            serving = asyncio.create_task(runner.serve())
            await client.result(created)
            for _ in range(3):
                await client.result(submit_and_wake(client, runner, model))
            runner.stop()
            assert (await asyncio.wait_for(serving, 60)).why is Why.STOPPED
            run = await shown(http, model)
            waiting = await in_state(http, run, "Waiting")
            assert "continues with its next request" in waiting["message"]
        runner = Runner(context, model, Mirror(connection, Pacing(1000.0, SystemClock())), steps=6)
        client.journal.models.request_unload(model, "its session has ended")
        assert (await asyncio.wait_for(runner.serve(), 60)).why is Why.DONE
        await in_state(http, run, "Completed")
    assert len(await runs(connection.api_url, "flow_runs", 1, **tagged(model))) == 1
    task_runs = await runs(connection.api_url, "task_runs", 5, flow_runs={"id": {"any_": [run["id"]]}})
    names = sorted(run["name"].rsplit("/", 1)[-1] for run in task_runs)
    assert names == ["create_model", "optim_step", "steps-000002-000003", "steps-000004-000006", "steps-000007-onwards"]
    assert {run["state_type"] for run in task_runs} == {"COMPLETED"}


async def test_runs_that_an_earlier_engine_left_get_their_states_in_the_journal(
    server: PrefectServer, context: Any, client: Any
) -> None:
    connection = PrefectConnection(server.access.api_url, "another deployment")
    ended = {"unloaded": ModelState.UNLOADED, "failed": ModelState.FAILED, "live": None}
    models = {name: await created_by_another_engine(context, client, number) for number, name in enumerate(ended)}
    for name, state in ended.items():
        if state is not None:
            client.journal.models.end(models[name], state, f"it is {name}")
    with connection.settings(server.access.credential):
        watching = asyncio.create_task(connection.watch())  # resumes after the server refused a request
        mirror = Mirror(connection, Pacing(1000.0, SystemClock()), journal=client.journal)
        for model in (*models.values(), "unknown"):
            mirror.observe_training_run(model, BASE)
        mirror.observe_sampling(BASE)
        async with prefect_http(server.access.api_url) as http:
            marked = {"flow_runs": {"tags": {"all_": [connection.mark]}}}
            async with asyncio.timeout(120):
                while len(found := await post(http, "/flow_runs/filter", json=marked)) < 5:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            for run in found:
                await in_state(http, run, "Running")
            other = Mirror(
                PrefectConnection(server.access.api_url, "a third one"), mirror.pacing, journal=client.journal
            )
            assert await other.reconcile() == 0
            assert await mirror.reconcile() == len(found)
            found = await post(http, "/flow_runs/filter", json=marked)
        watching.cancel()
        await connection.close()
    states = {run["parameters"].get("model_id", "sampling"): run["state"] for run in found}
    names = {"unloaded": "Completed", "failed": "Failed", "live": "Waiting"}
    expected = {models[name]: state for name, state in names.items()} | {"unknown": "Crashed", "sampling": "Crashed"}
    assert {name: state["name"] for name, state in states.items()} == expected
    assert "it is failed" in states[models["failed"]]["message"]


async def test_work_continues_without_prefect_and_is_tracked_again_after(
    tmp_path: Path,
    context: Any,
    client: Any,
    caplog: pytest.LogCaptureFixture,
    until: Any,
    prefect_database: Callable[[Path], None],
) -> None:
    prefect_database(tmp_path)
    settings = Settings(data_dir=tmp_path, prefect_port=free_port())
    async with open_prefect(settings, print) as connection:
        watching = asyncio.create_task(connection.watch())
        model, created = client.submit_create()
        runner = Runner(context, model, Mirror(connection, Pacing(1000.0, SystemClock())))
        serving = asyncio.create_task(runner.serve())
        await client.result(created)
        assert connection.tracked == 1

        noted = json.loads((tmp_path / "prefect" / "server.json").read_text())
        os.kill(json.loads(noted["process"])["pid"], signal.SIGKILL)
        for _ in range(100):
            request = client.optim_step(model)
            runner.wake()
            assert (await client.result(request, seconds=20.0)).error is None  # never waits for Prefect
            await asyncio.sleep(0.05)
            if connection.untracked:
                break
        assert connection.untracked

        await until(lambda: connection.reachable)  # the embedded server was restarted
        before = connection.tracked
        async with asyncio.timeout(120), prefect_http(connection.api_url) as http:
            found: list[Any] = []
            while not found or connection.tracked == before:  # a starting server may refuse some requests
                await client.result(submit_and_wake(client, runner, model))
                await asyncio.sleep(0.1)
                found = await post(http, "/flow_runs/filter", json=tagged(model))
        client.journal.models.request_unload(model, "over")
        runner.wake()
        assert (await asyncio.wait_for(serving, 60)).why is Why.DONE
        (flow_run,) = await runs(connection.api_url, "flow_runs", 1, **tagged(model))
        assert flow_run["state_type"] == "COMPLETED"
        watching.cancel()
    assert any("can be reached again" in record.message for record in caplog.records)


async def test_group_loss_and_recovery_are_shown_and_logged_in_prefect(
    connection: PrefectConnection, context: Any, client: Any, pool: Any, tmp_path: Path, running: Any
) -> None:
    mirror = Mirror(connection, Pacing(1000.0, SystemClock()))
    dispatcher = dispatcher_of(context, client, pool, mirror, tmp_path)
    async with running(dispatcher.serve(lambda: None)):
        model = await client.create()
        await client.result(client.optim_step(model))
        pool.die()
        assert (await client.result(client.optim_step(model))).error is None

        async def found() -> tuple[list[str], dict[str, Any]]:
            run = await shown(http, model)
            states = await ask(http, "GET", "/flow_run_states/", params={"flow_run_id": run["id"]})
            events = await post(http, "/events/filter", json={"filter": {"event": {"prefix": ["tinkerflow."]}}})
            about = [(event["resource"].get("prefect.resource.name"), event) for event in events["events"]]
            return [state["name"] for state in states], {
                one["event"]: one for name, one in about if name in (model, BASE)
            }

        expected = {"tinkerflow.group.ended", "tinkerflow.group.serves", "tinkerflow.model.restored"}
        async with prefect_http(connection.api_url) as http, asyncio.timeout(120):
            while True:
                states, events = await found()
                if states[-2:] == ["Restoring", "Running"] and expected <= events.keys():
                    break
                await asyncio.sleep(0.5)
        dispatcher.stop()
    told = events["tinkerflow.model.restored"]
    assert told["resource"] == {"prefect.resource.id": f"tinkerflow.model.{model}", "prefect.resource.name": model}
    assert told["payload"].pop("seconds") >= 0
    assert told["payload"] == {
        "generation": 2,
        "snapshot_at_request": None,
        "replayed_requests": 2,
        "replayed_steps": 1,
    }
    async with prefect_http(connection.api_url) as http, asyncio.timeout(120):
        run = await shown(http, model)
        asked = {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "sort": "TIMESTAMP_ASC"}
        lines: list[str] = []
        while not any(line.startswith("ended") for line in lines):
            lines = [line["message"] for line in await post(http, "/logs/filter", json=asked)]
    assert lines[0] == f"model {model} of {BASE} was created at optimizer step 0"
    assert any("restored in worker group 2: 2 requests replayed (1 optimizer steps)" in line for line in lines)
    assert lines[-1].startswith("ended after ") and "the engine was stopped" in lines[-1]


def dispatcher_of(context: Any, client: Any, pool: Any, mirror: Mirror, tmp_path: Path) -> Dispatcher:
    sampling = SamplingRunner(context, mirror.observe_sampling(BASE), most_waiting=8)
    served = ServedModel(context.card, context, pool, sampling)
    return Dispatcher(Settings(data_dir=tmp_path), client.journal, mirror, [served])


async def test_stopped_server_is_noticed(tmp_path: Path, prefect_database: Callable[[Path], None]) -> None:
    prefect_database(tmp_path)
    listener = await listen(0)
    server = await start_server(tmp_path, listener)
    try:
        watching = asyncio.create_task(server.ended(silence=6.0))
        server.process.signal(signal.SIGSTOP)
        assert await asyncio.wait_for(watching, 60) == "did not answer for 6 s (stopped?)"
    finally:
        server.process.signal(signal.SIGKILL)  # stop() does the same after waiting for SIGTERM
        await server.stop()
        listener.close()
    assert await server.ended() == "ended with status -9"


async def test_server_that_cannot_be_started_does_not_stop_the_engine(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "ui").touch()  # where the server needs a folder
    settings = Settings(data_dir=tmp_path, prefect="embedded", prefect_port=free_port())
    async with asyncio.timeout(30), open_prefect(settings, print) as connection:
        assert not connection.reachable


async def test_untracked_run_gets_a_flow_run_when_prefect_is_back(
    connection: PrefectConnection, context: Any, client: Any
) -> None:
    connection.note_reachable(False, "it is away")
    model, created = client.submit_create()
    runner = Runner(context, model, Mirror(connection, Pacing(1000.0, SystemClock())))
    serving = asyncio.create_task(runner.serve())
    assert (await client.result(created)).error is None
    assert (connection.tracked, connection.untracked) == (0, 1)
    connection.note_reachable(True, "")
    assert (await client.result(submit_and_wake(client, runner, model))).error is None
    runner.stop()
    assert (await asyncio.wait_for(serving, 60)).why is Why.STOPPED
    assert (connection.tracked, connection.untracked) == (1, 1)
    async with prefect_http(connection.api_url) as http:
        state = await in_state(http, await shown(http, model), "Waiting")
    assert state["message"].startswith("the engine was stopped: ")


def submit_and_wake(client: Any, runner: Runner, model: str) -> str:
    request: str = client.optim_step(model)
    runner.wake()
    return request


async def press(http: httpx.AsyncClient, run: dict[str, Any], **state: object) -> None:
    """Send the request of a button in Prefect's UI."""
    await post(http, f"/flow_runs/{run['id']}/set_state", json={"state": state, "force": True})


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    return await ask(http, "POST", path, **body)


async def ask(http: httpx.AsyncClient, method: str, path: str, **more: Any) -> Any:
    """Retry after 503: on a busy machine the server's database is sometimes locked, and people would click again."""
    async with asyncio.timeout(120):
        while (answer := await http.request(method, path, **more)).status_code == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    return answer.raise_for_status().json()


async def shown(http: httpx.AsyncClient, model: str = "", *, name: str = "") -> dict[str, Any]:
    """Wait for the flow run of a model, or for one with a name. Operations do not wait until Prefect has created it."""
    wanted = {"flow_runs": {"name": {"any_": [name]}}} if name else tagged(model)
    async with asyncio.timeout(120):
        while not (found := await post(http, "/flow_runs/filter", json=wanted)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    (run,) = found
    return dict(run)


async def in_state(http: httpx.AsyncClient, run: dict[str, Any], name: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    async with asyncio.timeout(120):
        while state.get("name") != name:
            state = (await http.get(f"/flow_runs/{run['id']}")).json().get("state", {})
            await asyncio.sleep(0.1)
    return state


async def test_ui_buttons_take_effect(
    connection: PrefectConnection, context: Any, client: Any, pool: Any, tmp_path: Path, running: Any, until: Any
) -> None:
    mirror = Mirror(connection, Pacing(1000.0, SystemClock()))
    dispatcher = dispatcher_of(context, client, pool, mirror, tmp_path)
    async with (
        running(dispatcher.serve(lambda: None)),
        prefect_http(connection.api_url) as http,
    ):
        model = await client.create()
        run = await shown(http, model)
        assert run["deployment_id"] is not None  # otherwise the UI shows no buttons

        later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        suspended = {"pause_timeout": later, "pause_reschedule": True}
        await press(http, run, type="PAUSED", name="Suspended", state_details=suspended)
        await until(lambda: client.journal.models.get(model, None).paused is not None)
        request = client.optim_step(model)
        assert "Resume continues it" in client.journal.queue.waits_for(request)
        await post(http, f"/flow_runs/{run['id']}/resume")
        assert (await client.result(request)).error is None
        await in_state(http, run, "Running")
        assert client.journal.models.get(model, None).paused is None
        assert pool.names.count("OptimStep") == 1

        client.journal.models.end(model, ModelState.FAILED, "the store was away")
        dispatcher.wake(model)
        failed = await in_state(http, run, "Failed")
        assert "the store was away" in failed["message"]
        pool.die()
        await press(http, run, type="SCHEDULED", name="AwaitingRetry", message="Retry from the UI")
        await in_state(http, run, "Running")
        assert (await client.result(client.optim_step(model))).error is None
        assert client.journal.models.get(model, None).step == 2
        assert pool.names[-3:] == ["CreateAdapter", "OptimStep", "OptimStep"]  # a replayed step and the new one

        pool.hold = asyncio.Event()
        waiting = [client.optim_step(model) for _ in range(3)]
        await press(http, run, type="CANCELLING", name="Cancelling")
        for result in await client.results(*waiting):
            assert result.category == "user" and f"model {model} was unloaded: {CANCELLED}" in result.error
        pool.hold.set()
        assert (await in_state(http, run, "Cancelled"))["message"] == CANCELLED
        assert CANCELLED in (await client.result(client.optim_step(model))).error
        assert pool.names[-1] == "DropAdapter"

        await press(http, run, type="SCHEDULED", name="AwaitingRetry", message="Retry from the UI")
        async with asyncio.timeout(120):
            state: dict[str, Any] = {}
            while "Retry changed nothing" not in state.get("message", ""):
                state = await in_state(http, run, "Cancelled")
        assert state["message"].startswith(CANCELLED) and "nothing to continue from" in state["message"]


async def test_hold_survives_the_engine_and_ends_with_the_session(
    connection: PrefectConnection, context: Any, client: Any, pool: Any, tmp_path: Path, running: Any, until: Any
) -> None:
    mirror = Mirror(connection, Pacing(1000.0, SystemClock()))
    model = await created_by_another_engine(context, client)
    client.journal.models.pause(model, "for the night")
    request = client.optim_step(model)
    dispatcher = dispatcher_of(context, client, pool, mirror, tmp_path)
    async with (
        running(dispatcher.serve(lambda: None)),
        prefect_http(connection.api_url) as http,
    ):
        run = await shown(http, model)
        await in_state(http, run, "Paused")
        assert "OptimStep" not in pool.names
        client.journal.sessions.finish(client.session, "local", "success")
        assert "its session has ended" in (await client.result(request)).error
        await in_state(http, run, "Cancelled")


async def created_by_another_engine(context: Any, client: Any, number: int = 0) -> str:
    model, created = client.submit_create(number)
    runner = Runner(context, model, Mirror(PrefectConnection(""), Pacing(1000.0, SystemClock())))
    serving = asyncio.create_task(runner.serve())
    await client.result(created)
    runner.stop()
    await asyncio.wait_for(serving, 60)
    return str(model)
