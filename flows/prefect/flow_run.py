"""One flow run and its task runs on the Prefect server, written down as the work goes on. Nothing here executes work.

Prefect would have its engine call a flow's function. The engine of Tinkerflow does the work itself and only reports it:
flow runs and their states by requests, task runs by the events that Prefect's own task engine sends (prefect 3.8.8,
`emit_task_run_state_change_event`). The two events of a task run cost the engine 1.3 ms of CPU, threads included.
A call of a Prefect task cost 2.9 ms (300 task runs each, on a busy machine with two cores).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import httpx
from prefect import Flow, flow
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import ArtifactCreate, LogCreate
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Pending, Running

from tinkerflow.backend.journal import AWAY
from tinkerflow.flows.prefect.client import get_client
from tinkerflow.flows.prefect.connection import PrefectConnection, is_away
from tinkerflow.flows.prefect.report import Drawing

log = logging.getLogger(__name__)

LOG_SECONDS = 15.0  # lines of so long go out in one request, which takes 1 to 2.5 ms of CPU
MOST_FAILURES = 30  # answers such as 500 to one request, from a server that is healthy; about a minute of them
MOST_LINES = 500  # of logs that wait for the server

_ABOUT = """\
The runs of a Tinkerflow engine, which executes them itself. They begin when a client creates a model, and not by
_Run_. _Cancel_ ends a model, _Suspend_ and _Resume_ pause it and let it go on, _Retry_ takes a model that failed or
crashed up again, from the journal."""


@flow(name="training_run", persist_result=False)
async def training_run(model_id: str, base_model: str) -> None:
    """One model's training run; its task runs are named `model-ab12-0/step-000017/forward_backward`.

    A declaration for the Prefect server: `tinkerflow.flows.runner` does the work.
    """


@flow(name="sampling", persist_result=False)
async def sampling(base_model: str) -> None:
    """Samples of one base model and of all adapters on it; a task run shows the requests of one window of time.

    A declaration for the Prefect server: `tinkerflow.flows.sampling_runner` does the work.
    """


@dataclass(frozen=True)
class Heading:
    """What a flow run is called. `deployed`: it gets the buttons that Prefect's UI offers for deployments alone."""

    flow: Flow[..., Any]
    name: str
    parameters: dict[str, str]
    tags: tuple[str, ...]
    deployed: bool = False


class FlowRunRecord:
    """A flow run at the server. Every method returns immediately; requests are sent in order, beside the work.

    A request that does not reach the server is sent again when the server is back. One that the server refuses, or
    fails at MOST_FAILURES times, is logged and skipped.
    """

    def __init__(self, connection: PrefectConnection, heading: Heading, adopted: UUID | None = None) -> None:
        """A new flow run, or the existing one `adopted`, which somebody has retried."""
        self.id = adopted
        self.task_runs = 0
        self._connection = connection
        self._heading = heading
        self._key = str(uuid4())  # a creation that is sent twice makes one flow run
        self._requests: deque[Callable[[PrefectClient], Awaitable[object]]] = deque()
        self._sending: asyncio.Task[object] | None = None
        self._events: list[dict[str, Any]] | None = []  # until the flow run has an id
        self._lines: deque[LogCreate] = deque(maxlen=MOST_LINES)
        self._open = 0  # task runs
        self._artifacts: dict[str, UUID] = {}
        self._final: State[None] | None = None
        self._send(self._begin)

    def show(self, state: State[None]) -> None:
        """Give the flow run a state, if it is running by then: a state that people chose stays."""

        async def show(client: PrefectClient) -> None:
            now = (await client.read_flow_run(self._created)).state
            if now is not None and now.is_running():
                await client.set_flow_run_state(self._created, state)

        self._send(show)

    def log(self, line: LogCreate) -> None:
        """Add a line to the flow run's logs. When more than MOST_LINES wait, the oldest are dropped."""
        self._lines.append(line)
        if len(self._lines) == 1:
            asyncio.get_running_loop().call_later(LOG_SECONDS, self._send, self._send_lines)

    def draw(self, drawing: Drawing) -> None:
        """Make the artifacts of the drawing as they are now, or bring those up to date that this flow run has."""

        async def put(client: PrefectClient) -> None:
            try:
                drawn = await asyncio.to_thread(drawing.draw)
            except AWAY as error:  # the next drawing shows it
                log.info("flow run %s: its artifacts wait for the journal: %s", self._heading.name, error)
                return
            for one in drawn:
                if (known := self._artifacts.get(one.name)) is not None:
                    # As update_artifact does, which also emits an event with the whole picture in it: half of its cost.
                    shown = {"data": one.data, "description": one.title}
                    await client.request("PATCH", "/artifacts/{id}", path_params={"id": known}, json=shown)
                    continue
                made = ArtifactCreate(
                    key=drawing.key(one), type=one.kind, description=one.title, data=one.data, flow_run_id=self._created
                )
                self._artifacts[one.name] = (await client.create_artifact(made)).id

        self._send(put)

    def finish(self, state: State[None]) -> None:
        """End the flow run with `state`, as soon as its task runs have ended."""
        self._final = state
        if not self._open:
            self._send(self._end)

    def open_task_run(self, name: str, task: str) -> TaskRunRecord:
        """Begin a task run of the task called `task`."""
        self.task_runs += 1
        self._open += 1
        opened = TaskRunRecord(self, name, task)
        opened.set_state("Running")
        return opened

    def task_run_ended(self) -> None:
        """One of the task runs has ended."""
        self._open -= 1
        if self._final is not None and not self._open:
            self._send(self._end)

    def emit(self, event: dict[str, Any]) -> None:
        """Send an event about this flow run or its task runs, once the server knows the flow run."""
        if self._events is not None:
            self._events.append(event)
        else:
            run, name = f"prefect.flow-run.{self.id}", self._heading.name
            shown_in = {"prefect.resource.id": run, "prefect.resource.role": "flow-run", "prefect.resource.name": name}
            emit_event(**event, related=[shown_in])

    @property
    def _created(self) -> UUID:
        assert self.id is not None, "requests are sent in order, and the first one creates the flow run"
        return self.id

    async def _begin(self, client: PrefectClient) -> None:
        if self.id is None:
            self.id = await self._create(client)
        await client.set_flow_run_state(self.id, Running(), force=True)
        events, self._events = self._events or [], None
        for event in events:
            self.emit(event)

    async def _create(self, client: PrefectClient) -> UUID:
        heading = self._heading
        how: dict[str, Any] = {
            "name": heading.name,
            "parameters": heading.parameters,
            "tags": heading.tags,
            "state": Pending(),
        }
        if not heading.deployed:
            return (await client.create_flow_run(heading.flow, **how)).id
        deployment = await client.create_deployment(
            await client.create_flow(heading.flow),
            name=self._connection.title,
            description=_ABOUT,
            tags=["tinkerflow", self._connection.mark],
            enforce_parameter_schema=False,
        )
        return (await client.create_flow_run_from_deployment(deployment, idempotency_key=self._key, **how)).id

    async def _end(self, client: PrefectClient) -> None:
        await self._send_lines(client)
        assert self._final is not None, "`finish` says how the flow run ends"
        if self._final.is_completed():
            now = (await client.read_flow_run(self._created)).state
            if now is not None and now.is_cancelling():
                return  # a person cancelled it just now: controls.py ends the model, which may go on in another run
        await client.set_flow_run_state(self._created, self._final, force=True)

    async def _send_lines(self, client: PrefectClient) -> None:
        lines = [line.model_copy(update={"flow_run_id": self._created}) for line in self._lines]
        self._lines.clear()  # a line that comes while these are sent waits for the next request
        if not lines:
            return
        try:
            await client.create_logs(lines)
        except Exception as error:  # the state of the flow run matters more than its logs
            if is_away(error):
                self._lines = deque([*lines, *self._lines], maxlen=MOST_LINES)
                raise
            log.warning("flow run %s: Prefect refused %d lines: %s", self._heading.name, len(lines), error)

    def _send(self, request: Callable[[PrefectClient], Awaitable[object]]) -> None:
        self._requests.append(request)
        if self._sending is None:
            self._sending = self._connection.beside(self._send_all(), f"flow run {self._heading.name}")

    async def _send_all(self) -> None:
        failures = 0  # in a row
        try:
            while self._requests:
                await self._connection.back()
                try:
                    async with get_client() as client:
                        while self._requests:
                            await self._requests[0](client)
                            self._requests.popleft()
                            failures = 0
                except Exception as error:  # noqa: BLE001  whatever Prefect raises, the work goes on
                    why = f"{type(error).__name__}: {error}"
                    failures += isinstance(error, httpx.HTTPStatusError)
                    if is_away(error) and failures < MOST_FAILURES:
                        self._connection.found(False, why)
                    else:
                        log.warning("flow run %s: Prefect refused a request: %s", self._heading.name, why)
                        self._requests.popleft()
                        failures = 0
        finally:
            self._sending = None


@dataclass
class TaskRunRecord:
    """A task run at the server; every state is one event."""

    flow_run: FlowRunRecord
    name: str
    task: str
    id: UUID = field(default_factory=uuid4)
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    def end(self, state: str, message: str) -> None:
        """The task run ends, `Completed` or `Failed`."""
        self.set_state(state, message)
        self.flow_run.task_run_ended()

    def set_state(self, state: str, message: str = "") -> None:
        """Tell the server of a new state, `Running`, `Completed` or `Failed`."""
        now, running = datetime.now(UTC), state == "Running"
        occurred = self.began if running else now
        run: dict[str, Any] = {
            "name": self.name,
            "task_key": self.task,
            "dynamic_key": str(self.id),
            "run_count": 1,
            "expected_start_time": self.began.isoformat(),
            "start_time": self.began.isoformat(),
        }
        if not running:
            run |= {"end_time": now.isoformat(), "total_run_time": (now - self.began).total_seconds()}
        resource = {
            "prefect.resource.id": f"prefect.task-run.{self.id}",
            "prefect.resource.name": self.name,
            "prefect.run-count": "1",
            "prefect.state-message": message,
            "prefect.state-name": state,
            "prefect.state-timestamp": occurred.isoformat(),
            "prefect.state-type": state.upper(),
            "prefect.orchestration": "client",
        }
        payload = {
            "intended": {"from": None if running else "RUNNING", "to": state.upper()},
            "initial_state": None if running else {"type": "RUNNING", "name": "Running", "state_details": {}},
            "validated_state": {"type": state.upper(), "name": state, "message": message, "state_details": {}},
            "task_run": run,
        }
        self.flow_run.emit(
            {"event": f"prefect.task-run.{state}", "resource": resource, "payload": payload, "occurred": occurred}
        )
