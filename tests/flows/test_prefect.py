"""What people see: flow runs and task runs on a real Prefect server, and what happens without it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import warnings
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tinkerflow.backend.clock import SystemClock
from tinkerflow.backend.journal import ModelState
from tinkerflow.backend.processes import free_port
from tinkerflow.backend.settings import Settings
from tinkerflow.flows.dispatcher import Dispatcher
from tinkerflow.flows.groups import ServedModel
from tinkerflow.flows.prefect.controls import CANCELLED
from tinkerflow.flows.prefect.pacing import Pacing
from tinkerflow.flows.prefect.tracking import Tracking, open_tracking
from tinkerflow.flows.prefect.training_run import serve_model, training_run
from tinkerflow.flows.prefect_server import PrefectServer, start_server
from tinkerflow.flows.runner import ModelRunner, Shared, Why
from tinkerflow.flows.sampling_runner import SamplingRunner

pytestmark = [
    pytest.mark.slow,
    # Prefect's event worker keeps its connections to a server until they are collected (a few, and no more with time)
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <:pytest.PytestUnraisableExceptionWarning"),
]

BASE = "folder/unigram"


@pytest.fixture(autouse=True, scope="module")
def _collect_prefect_s_connections() -> Iterator[None]:
    """Here, and not in the next module's tests, for which an open socket is an error."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    server = asyncio.run(start_server(tmp_path_factory.mktemp("prefect"), free_port()))
    yield server
    asyncio.run(server.stop())


@pytest.fixture
async def tracking(server: PrefectServer) -> AsyncIterator[Tracking]:
    tracking = Tracking(server.url, "test")
    with tracking.settings(), temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 5}):  # nobody looks whether it is back
        yield tracking
        await tracking.close()


async def runs(url: str, kind: str, wanted: int, **filters: object) -> list[dict[str, Any]]:
    """Flow or task runs, as soon as there are `wanted` and all have ended: the server writes them with some delay."""
    found: list[dict[str, Any]] = []
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(600):
            order = {"sort": "EXPECTED_START_TIME_ASC"} if kind == "task_runs" else {}
            found = await post(http, f"{url}/{kind}/filter", json=filters | order)
            if len(found) >= wanted and all(
                run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") for run in found
            ):
                break
            await asyncio.sleep(0.2)
    return found


async def serve(
    tracking: Tracking, context: Any, client: Any, work: Any, rate: float = 1000.0
) -> tuple[str, ModelRunner]:
    """Create a model, let `work(model)` submit requests, answer all, unload it; the model's id."""
    model, created = client.submit_create()
    lane = ModelRunner(context, Shared(Pacing(rate, SystemClock()), tracking), model, 0)
    serving = asyncio.create_task(serve_model(lane, tracking, BASE))
    await client.results(created, *work(model))
    client.journal.models.request_unload(model, "its session is over")
    lane.wake()
    assert (await asyncio.wait_for(serving, 60)).why is Why.DONE
    return model, lane


async def test_a_flow_run_per_model_and_a_readable_task_run_per_batch(
    tracking: Tracking, context: Any, client: Any
) -> None:
    def work(model: str) -> list[str]:
        return [
            client.forward_backward(model, [1]),
            client.forward_backward(model, [2]),
            client.optim_step(model),
            client.forward_backward(model, [99]),
            client.optim_step(model),
        ]

    model, _ = await serve(tracking, context, client, work)
    (flow_run,) = await runs(tracking.api_url, "flow_runs", 1, flow_runs={"name": {"any_": [model]}})
    assert flow_run["state_type"] == "COMPLETED"
    assert flow_run["state"]["message"] == "unloaded: its session is over"
    assert {"tinkerflow", BASE} < set(flow_run["tags"])

    found = await runs(tracking.api_url, "task_runs", 6, flow_runs={"id": {"any_": [flow_run["id"]]}})
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
    assert all(run["tags"] == [] for run in found)  # a tag costs a round trip to the server before every task run


async def test_above_the_rate_task_runs_are_shared(tracking: Tracking, context: Any, client: Any) -> None:
    steps = 60

    def work(model: str) -> list[str]:
        return [r for _ in range(steps) for r in (client.forward_backward(model, [1]), client.optim_step(model))]

    model, _ = await serve(tracking, context, client, work, rate=2.0)
    (flow_run,) = await runs(tracking.api_url, "flow_runs", 1, flow_runs={"name": {"any_": [model]}})
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(120):
        while not any(f"-{steps + 1:06d}" in run["name"] for run in found):  # the unload comes after them
            found = await runs(tracking.api_url, "task_runs", 5, flow_runs={"id": {"any_": [flow_run["id"]]}})
    assert len(found) < steps
    assert client.journal.models.get(model, None).step == steps


async def test_samples_share_a_task_run(tracking: Tracking, context: Any, client: Any) -> None:
    lane = SamplingRunner(context, Shared(Pacing(1000.0, SystemClock()), tracking), most_waiting=8)
    serving = asyncio.create_task(lane.serve_for_ever())
    sampler = client.sampler(0)
    requests = [client.sample(sampler) for _ in range(3)]
    lane.wake()
    await client.results(*requests)
    lane.stop()
    await asyncio.wait_for(serving, 60)
    (flow_run,) = await runs(tracking.api_url, "flow_runs", 1, flow_runs={"name": {"any_": [f"sampling {BASE}"]}})
    found = await runs(tracking.api_url, "task_runs", 1, flow_runs={"id": {"any_": [flow_run["id"]]}})
    assert [(run["name"], run["state"]["message"]) for run in found] == [("unigram/sample-000001", "sample x3")]


async def test_a_lane_rolls_over_to_another_flow_run(tracking: Tracking, context: Any, client: Any) -> None:
    model, created = client.submit_create()
    lane = ModelRunner(context, Shared(Pacing(1000.0, SystemClock()), tracking), model, 0)
    served = tracking.run(training_run, lambda: lane.serve(1), (), model_id=model, base_model=BASE)
    assert (await asyncio.wait_for(served, 120)).why is Why.ROLL_OVER
    assert (await client.result(created)).error is None
    rest = client.optim_step(model)
    lane.stop()
    assert (await lane.serve(1)).why is Why.STOPPED
    assert client.journal.requests.result(rest, "local") is None


async def test_what_an_earlier_engine_left_running_is_said_to_have_crashed(server: PrefectServer) -> None:
    tracking = Tracking(server.url, "another deployment")
    forever = asyncio.Event()

    async def body() -> None:
        forever.set()
        await asyncio.Event().wait()

    with tracking.settings():
        left = asyncio.create_task(tracking.run(training_run, body, (), model_id="left", base_model=BASE))
        await asyncio.wait_for(forever.wait(), 120)
        assert await Tracking(server.url, "a third one").reconcile() == 0
        assert await Tracking(server.url, "another deployment").reconcile() == 1
        (run,) = await runs(server.url, "flow_runs", 1, flow_runs={"name": {"any_": ["left"]}})
        state = State.model_validate(run["state"])
        assert state.is_crashed() and "ended without a word" in str(state.message)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await tracking.close()


async def test_work_goes_on_while_the_server_is_dead_and_is_tracked_again_after(
    tmp_path: Path, context: Any, client: Any, caplog: pytest.LogCaptureFixture, until: Any
) -> None:
    settings = Settings(data_dir=tmp_path, prefect_port=free_port())
    async with open_tracking(settings, print) as tracking:
        watching = asyncio.create_task(tracking.watch())
        model, created = client.submit_create()
        lane = ModelRunner(context, Shared(Pacing(1000.0, SystemClock()), tracking), model, 0)
        serving = asyncio.create_task(serve_model(lane, tracking, BASE))
        await client.result(created)
        assert tracking.tracked == 1

        server = next(p for p in children(os.getpid()) if f" {settings.prefect_port} " in cmdline(p))
        os.kill(server, signal.SIGKILL)
        for _ in range(100):
            request = client.optim_step(model)
            lane.wake()
            assert (await client.result(request, seconds=20.0)).error is None  # never waits for Prefect
            await asyncio.sleep(0.05)
            if tracking.untracked:
                break
        assert tracking.untracked

        await until(lambda: tracking.reachable)  # the embedded server is started again
        before = tracking.tracked
        await client.result(submit_and_wake(client, lane, model))
        assert tracking.tracked > before
        client.journal.models.request_unload(model, "over")
        lane.wake()
        assert (await asyncio.wait_for(serving, 60)).why is Why.DONE
        watching.cancel()
        (flow_run,) = await runs(tracking.api_url, "flow_runs", 1, flow_runs={"name": {"any_": [model]}})
        assert flow_run["state_type"] == "COMPLETED"
    assert any("is back" in record.message for record in caplog.records)


async def test_the_end_of_a_group_and_the_recovery_are_seen(
    tracking: Tracking, context: Any, client: Any, pool: Any, tmp_path: Path, running: Any
) -> None:
    shared = Shared(Pacing(1000.0, SystemClock()), tracking)
    served = ServedModel(context.card, context, pool, SamplingRunner(context, shared, most_waiting=8))
    dispatcher = Dispatcher(Settings(data_dir=tmp_path), client.journal, shared, [served])
    async with running(dispatcher.serve(lambda: None)):
        model = await client.create()
        await client.result(client.optim_step(model))
        pool.die()
        assert (await client.result(client.optim_step(model))).error is None

        async def found() -> tuple[list[str], dict[str, Any]]:
            (run,) = await post(http, f"{url}/flow_runs/filter", json=named(model))
            states = await ask(http, "GET", f"{url}/flow_run_states/", params={"flow_run_id": run["id"]})
            events = await post(http, f"{url}/events/filter", json={"filter": {"event": {"prefix": ["tinkerflow."]}}})
            told = {event["event"]: event for event in events["events"]}
            return [state["name"] for state in states], dict(sorted(told.items()))

        url = tracking.api_url
        async with httpx.AsyncClient(timeout=60) as http, asyncio.timeout(120):
            while True:
                states, events = await found()
                if states[-2:] == ["Restoring", "Running"] and len(events) == 3:
                    break
                await asyncio.sleep(0.5)
    assert list(events) == ["tinkerflow.group.ended", "tinkerflow.group.serves", "tinkerflow.model.restored"]
    told = events["tinkerflow.model.restored"]
    assert told["resource"] == {"prefect.resource.id": f"tinkerflow.model.{model}", "prefect.resource.name": model}
    assert told["payload"].pop("seconds") >= 0
    assert told["payload"] == {
        "generation": 2,
        "snapshot_at_request": None,
        "replayed_requests": 2,
        "replayed_steps": 1,
    }


def named(model: str) -> dict[str, Any]:
    return {"flow_runs": {"name": {"any_": [model]}}}


async def test_a_server_that_is_stopped_is_noticed(tmp_path: Path) -> None:
    server = await start_server(tmp_path, free_port())
    try:
        watching = asyncio.create_task(server.ended(silence=6.0))
        server.process.send_signal(signal.SIGSTOP)
        assert await asyncio.wait_for(watching, 60) == "did not answer for 6 s (stopped?)"
    finally:
        server.process.kill()  # what stop() comes to; it would first wait for the SIGTERM to be heard
        await server.stop()
    assert await server.ended() == "ended with status -9"


async def test_what_began_untracked_gets_a_flow_run_when_prefect_is_back(
    tracking: Tracking, context: Any, client: Any
) -> None:
    tracking.reachable = False
    model, created = client.submit_create()
    lane = ModelRunner(context, Shared(Pacing(1000.0, SystemClock()), tracking), model, 0)
    serving = asyncio.create_task(serve_model(lane, tracking, BASE))
    assert (await client.result(created)).error is None
    assert (tracking.tracked, tracking.untracked) == (0, 1)
    tracking.reachable = True
    assert (await client.result(submit_and_wake(client, lane, model))).error is None
    lane.stop()
    assert (await asyncio.wait_for(serving, 60)).why is Why.STOPPED
    assert (tracking.tracked, tracking.untracked) == (1, 1)
    (flow_run,) = await runs(tracking.api_url, "flow_runs", 1, flow_runs={"name": {"any_": [model]}})
    assert flow_run["state_type"] == "CANCELLED" and flow_run["state"]["message"] == "the engine was stopped"


def submit_and_wake(client: Any, lane: ModelRunner, model: str) -> str:
    request: str = client.optim_step(model)
    lane.wake()
    return request


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in listed for child in path.read_text().split()]


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")


async def press(http: httpx.AsyncClient, run: dict[str, Any], **state: object) -> None:
    """What the UI sends for a button."""
    await post(http, f"/flow_runs/{run['id']}/set_state", json={"state": state, "force": True})


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    return await ask(http, "POST", path, **body)


async def ask(http: httpx.AsyncClient, method: str, path: str, **more: Any) -> Any:
    """On a busy machine the server's database is locked at times (503), and people would click again."""
    async with asyncio.timeout(120):
        while (answer := await http.request(method, path, **more)).status_code == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    return answer.raise_for_status().json()


async def in_state(http: httpx.AsyncClient, run: dict[str, Any], name: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    async with asyncio.timeout(120):
        while state.get("name") != name:
            state = (await http.get(f"/flow_runs/{run['id']}")).json().get("state", {})
            await asyncio.sleep(0.1)
    return state


async def test_the_buttons_of_the_ui_are_obeyed(
    tracking: Tracking, context: Any, client: Any, pool: Any, tmp_path: Path, running: Any, until: Any
) -> None:
    shared = Shared(Pacing(1000.0, SystemClock()), tracking)
    served = ServedModel(context.card, context, pool, SamplingRunner(context, shared, most_waiting=8))
    dispatcher = Dispatcher(Settings(data_dir=tmp_path), client.journal, shared, [served])
    async with (
        running(dispatcher.serve(lambda: None)),
        httpx.AsyncClient(base_url=tracking.api_url, timeout=60) as http,
    ):
        model = await client.create()
        (run,) = await post(http, "/flow_runs/filter", json=named(model))
        assert run["deployment_id"] is not None  # else the UI has no buttons

        later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        suspended = {"pause_timeout": later, "pause_reschedule": True}
        await press(http, run, type="PAUSED", name="Suspended", state_details=suspended)
        await until(lambda: client.journal.models.get(model, None).held is not None)
        request = client.optim_step(model)
        assert "Resume lets it go on" in client.journal.queue.waits_for(request)
        await post(http, f"/flow_runs/{run['id']}/resume")
        assert (await client.result(request)).error is None
        await in_state(http, run, "Running")
        assert client.journal.models.get(model, None).held is None
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
        assert pool.names[-3:] == ["CreateAdapter", "OptimStep", "OptimStep"]  # replayed, and the new one

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
        assert "nothing to go on with" in (await in_state(http, run, "Failed"))["message"]


async def test_a_hold_outlives_the_engine_and_ends_with_the_session(
    tracking: Tracking, context: Any, client: Any, pool: Any, tmp_path: Path, running: Any, until: Any
) -> None:
    shared = Shared(Pacing(1000.0, SystemClock()), tracking)
    served = ServedModel(context.card, context, pool, SamplingRunner(context, shared, most_waiting=8))
    model = await created_by_another_engine(context, client)
    client.journal.models.pause(model, "for the night")
    request = client.optim_step(model)
    dispatcher = Dispatcher(Settings(data_dir=tmp_path), client.journal, shared, [served])
    async with (
        running(dispatcher.serve(lambda: None)),
        httpx.AsyncClient(base_url=tracking.api_url, timeout=60) as http,
    ):
        async with asyncio.timeout(120):
            while not (found := await post(http, "/flow_runs/filter", json=named(model))):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await in_state(http, found[0], "Paused")
        assert "OptimStep" not in pool.names
        client.journal.sessions.finish(client.session, "local", "success")
        assert "its session is over" in (await client.result(request)).error
        await in_state(http, found[0], "Cancelled")


async def created_by_another_engine(context: Any, client: Any) -> str:
    model, created = client.submit_create()
    lane = ModelRunner(context, Shared(Pacing(1000.0, SystemClock()), Tracking("")), model, 0)
    serving = asyncio.create_task(lane.serve(1000))
    await client.result(created)
    lane.stop()
    await asyncio.wait_for(serving, 60)
    return str(model)
