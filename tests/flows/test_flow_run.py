"""The requests that a flow run's record sends, and their order, on a fake client that records them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Self
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import Task
from prefect.client.schemas.actions import LogCreate
from prefect.states import Cancelled, Completed, Running, State
from tests.manual_clock import ManualClock

from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.journal import Kind, LossMeasured, Outcome, StepMeasured
from tinkerflow.flows.observers import Batch
from tinkerflow.flows.prefect import connection as connection_module
from tinkerflow.flows.prefect import flow_run, mirror
from tinkerflow.flows.prefect.connection import PrefectConnection
from tinkerflow.flows.prefect.drawing import DRAW_SECONDS, Drawing, Shown
from tinkerflow.flows.prefect.flow_run import FlowRunRecord, Heading, sampling
from tinkerflow.flows.prefect.mirror import Mirror
from tinkerflow.flows.prefect.pacing import Pacing
from tinkerflow.tasks.execution.restore import Restored

HEADING = Heading(sampling, "sampling unigram", {"base_model": "unigram"}, ())


class Server:
    """A fake of Prefect's client. errors: raised by the next requests that send logs."""

    def __init__(self) -> None:
        self.closed = 0
        self.sent: list[list[str]] = []
        self.drawn: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.task_runs: dict[UUID, list[str]] = {}
        self.states: list[str] = []
        self.errors: list[Exception] = []
        self.refused: Exception | None = None
        self.now: State[Any] = Running()
        self.hold = asyncio.Event()
        self.hold.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed += 1

    async def create_flow(self, *_: object, **__: object) -> Any:
        return uuid4()

    async def create_deployment(self, *_: object, **__: object) -> Any:
        return uuid4()

    async def create_flow_run(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(id=uuid4())

    create_flow_run_from_deployment = create_flow_run

    async def read_flow_run(self, _: object) -> Any:
        if self.refused is not None:
            raise self.refused
        return SimpleNamespace(state=self.now)

    async def set_flow_run_state(self, _: object, state: State[Any], **__: object) -> None:
        self.states.append(state.name or "")

    async def create_logs(self, lines: Sequence[LogCreate]) -> None:
        self.sent.append([line.message for line in lines])
        await self.hold.wait()
        if self.errors:
            raise self.errors.pop()

    async def create_artifact(self, artifact: Any) -> Any:
        self.drawn.append(artifact.data)
        return SimpleNamespace(id=uuid4())

    async def request(self, method: str, path: str, *, json: Any, path_params: Any = None) -> None:
        match method, path:
            case "PATCH", "/artifacts/{id}":
                self.drawn.append(json["data"])
            case "PATCH", "/task_runs/{id}":
                self.task_runs[path_params["id"]][0] = json["name"]
            case "POST", "/events":
                self.events += json
            case _:
                raise AssertionError(path)

    async def create_task_run(
        self, task: Task[..., Any], flow_run_id: UUID, dynamic_key: str, *, name: str, state: State[Any], **_: object
    ) -> None:
        self.task_runs[UUID(dynamic_key)] = [name, task.name, str(state.name)]

    async def set_task_run_state(self, task_run_id: UUID, state: State[Any], force: bool) -> None:
        self.task_runs[task_run_id][2] = f"{state.name}: {state.message}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(connection_module, "get_client", lambda: server)
    monkeypatch.setattr(flow_run, "LOG_SECONDS", 0.01)
    return server


def line(text: str) -> LogCreate:
    return LogCreate(name="tinkerflow", level=logging.INFO, message=text, timestamp=datetime.now(UTC))


async def test_log_line_during_a_send_goes_out_with_the_next(server: Server, until: Any) -> None:
    record = FlowRunRecord(PrefectConnection("http://prefect/api"), HEADING)
    server.hold.clear()
    record.log(line("first"))
    await until(lambda: bool(server.sent))
    record.log(line("second"))
    server.hold.set()
    await until(lambda: len(server.sent) == 2)
    assert server.sent == [["first"], ["second"]]


async def test_refused_lines_do_not_delay_the_end_of_the_flow_run(
    server: Server, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    record = FlowRunRecord(PrefectConnection("http://prefect/api"), HEADING)
    server.errors = [ValueError("too long")]
    record.log(line("a" * 1000))
    record.finish(Completed())
    await until(lambda: server.states == ["Running", "Completed"])
    assert "refused 1 lines: too long" in caplog.text


async def test_lines_wait_for_an_unreachable_server_up_to_a_limit(
    server: Server, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_run, "MOST_LINES", 3)
    connection = PrefectConnection("http://prefect/api")
    record = FlowRunRecord(connection, HEADING)
    server.errors = [httpx.ConnectError("refused")]
    record.log(line("0"))
    await until(lambda: not connection.reachable)
    for number in range(1, 5):
        record.log(line(str(number)))
    connection.note_reachable(True, "")
    await until(lambda: len(server.sent) == 2)
    assert server.sent[1] == ["2", "3", "4"]


async def test_one_drawing_waits_for_an_unreachable_server(server: Server, until: Any) -> None:
    """A long run draws every minute, and its server may be away for days."""
    connection, made = PrefectConnection("http://prefect/api"), 0
    record = FlowRunRecord(connection, HEADING)
    await until(lambda: record.requests.is_idle)

    def draw() -> list[Shown]:
        return [Shown("run", "markdown", "a run", str(made))]

    drawing: Any = SimpleNamespace(draw=draw, key=lambda shown: shown.name)
    connection.note_reachable(False, "it is away")
    for _ in range(100):
        made += 1
        record.draw(drawing)
    connection.note_reachable(True, "")
    await until(lambda: record.requests.is_idle)
    assert server.drawn == ["100"]
    record.draw(drawing)
    await until(lambda: record.requests.is_idle)
    assert server.drawn == ["100", "100"]


async def test_prefect_request_that_always_fails_is_abandoned(
    server: Server, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connection = PrefectConnection("http://prefect/api")
    record = FlowRunRecord(connection, HEADING)
    await until(lambda: record.requests.is_idle)
    request = httpx.Request("GET", "http://prefect/api")
    server.refused = httpx.HTTPStatusError("500", request=request, response=httpx.Response(500, request=request))
    record.show(Running(name="Restoring"))
    for _ in range(connection_module.MOST_FAILURES - 1):
        await until(lambda: not connection.reachable)
        connection.note_reachable(True, "")
    await until(lambda: record.requests.is_idle)
    assert connection.reachable
    assert "Prefect refused a request: HTTPStatusError: 500" in caplog.text
    record.finish(Cancelled())
    await until(lambda: server.states == ["Running", "Cancelled"])


async def test_event_waits_for_its_flow_run_in_prefect(server: Server, until: Any) -> None:
    """Otherwise an automation that suspends an event's flow run would not find a run created a moment ago."""
    emitted = server.events
    connection = PrefectConnection("http://prefect/api")
    (run,) = Mirror(connection, Pacing(1.0, SystemClock())).observe_training_run("sess-1234:train:0", "folder/unigram")
    run.restored(2, Restored(None, 0, 0, 0, 0.1, (), {}))
    assert run.flow_run is None and not emitted
    await until(lambda: emitted)
    assert run.flow_run is not None
    (related,) = emitted[0]["related"]
    assert related["prefect.resource.id"] == f"prefect.flow-run.{run.flow_run}"
    assert emitted[0]["resource"]["prefect.resource.id"] == "tinkerflow.model.sess-1234:train:0"


@pytest.mark.parametrize(
    ("label", "base_model", "name"),
    [
        ("Pig  Latin", "Qwen/Qwen3-0.6B", "Pig Latin Qwen3-0.6B 2026-11-28 09:05"),
        ("", "/data/models/tinkerflow/tiny-qwen3", "model-1234-0 tiny 2026-11-28 09:05"),
    ],
)
async def test_training_flow_run_has_a_readable_name(server: Server, label: str, base_model: str, name: str) -> None:
    connection = PrefectConnection("http://prefect/api")
    made = datetime(2026, 11, 28, 9, 5, tzinfo=UTC)
    (run,) = Mirror(connection, Pacing(1.0, SystemClock())).observe_training_run(
        "sess-1234:train:0", base_model, label, created_at=made
    )
    heading = run._heading
    assert (heading.name, heading.parameters["model_id"]) == (name, "sess-1234:train:0")
    assert "sess-1234:train:0" in heading.tags


async def test_page_requests_grow_with_time_and_not_with_steps(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request costs 1 to 2.5 ms of the engine's CPU time, and a step about 15 ms."""
    seconds, clock, loop = 120, ManualClock(), asyncio.get_running_loop()
    monkeypatch.undo()  # restores the real LOG_SECONDS
    monkeypatch.setattr(connection_module, "get_client", lambda: server)
    monkeypatch.setattr(mirror, "SystemClock", lambda: clock)
    monkeypatch.setattr(loop, "time", clock.monotonic)
    steps = 0
    monkeypatch.setattr(Drawing, "draw", lambda _: [Shown("run", "markdown", "a run", str(steps))])
    journal: Any = object()
    (run,) = Mirror(PrefectConnection("http://prefect/api"), Pacing(1.0, clock), journal=journal).observe_training_run(
        "m", "b"
    )

    async def settled() -> None:
        for _ in range(4):  # lets due callbacks run and begin to send
            await asyncio.sleep(0)
        while run._flow_run is not None and not run._flow_run.requests.is_idle:  # noqa: ASYNC110
            await asyncio.sleep(0)

    await settled()
    for _ in range(seconds):
        for _ in range(4):
            steps += 1
            operation: Any = SimpleNamespace(
                request=SimpleNamespace(kind=Kind.OPTIM_STEP), answered=loop.create_future()
            )
            run.started(Batch(Kind.OPTIM_STEP, (), steps), [operation])
            effect = StepMeasured("m", steps, steps, 0.5, 1e-4)
            operation.answered.set_result(Outcome("req", b"", "json", effects=(LossMeasured("m", 4, 3.0, 6.0), effect)))
        clock.advance(1.0)
        await settled()
    assert len(server.sent) <= seconds / flow_run.LOG_SECONDS
    assert len(server.drawn) <= 1 + seconds / DRAW_SECONDS
    record = run._flow_run
    run.ended("Completed", "it was unloaded")
    while "Completed" not in server.states[-1:] or record is None or not record.requests.is_idle:  # noqa: ASYNC110
        await asyncio.sleep(0)
    said = [re.findall(r"\d+", text.partition(":")[0]) for request in server.sent for text in request]
    assert [int(first) for first, *_ in said[:-1]] == [1, *(int(numbers[-1]) + 1 for numbers in said[:-2])]
    assert said[-2][-1] == str(steps), "the last line is that of the run's end"
    assert server.drawn[-1] == str(steps)
