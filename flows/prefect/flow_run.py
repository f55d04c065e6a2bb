"""One flow run and its task runs on the Prefect server, written as the work proceeds. Nothing here executes work.

Prefect's engine would call the function of a flow. Tinkerflow's engine does the work itself, and only reports it. The
requests to Prefect are sent in order, in the background. A request takes 1 to 2.5 ms of CPU.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID, uuid4

from prefect import Flow, Task, flow
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import ArtifactCreate, LogCreate
from prefect.client.schemas.objects import State
from prefect.events import Event, RelatedResource
from prefect.states import Pending, Running

from tinkerflow.backend.core.prefect_access import TRAINING_FLOW
from tinkerflow.backend.journal import AWAY
from tinkerflow.flows.prefect.connection import PrefectConnection, RequestQueue, is_away, send_event
from tinkerflow.flows.prefect.drawing import Drawing

log = logging.getLogger(__name__)

LOG_SECONDS = 15.0  # log lines of this period are sent in one request
MOST_LINES = 500  # log lines that wait for the server

_ABOUT = """\
The training runs of a Tinkerflow engine, which executes them itself. They begin when a client creates a model, and not
by _Run_. _Cancel_ ends a model, _Suspend_ and _Resume_ pause and continue it, and _Retry_ resumes a failed model from
the journal."""


@flow(name=TRAINING_FLOW, persist_result=False)
async def training_run(model_id: str, base_model: str) -> None:
    """One model's training run. Its task runs have names such as `model-ab12-0/step-000017/forward_backward`.

    A declaration for the Prefect server: `tinkerflow.flows.runner` does the work.
    """


@flow(name="sampling", persist_result=False)
async def sampling(base_model: str) -> None:
    """Samples of one base model and of all adapters on it. A task run shows the requests of one window of time.

    A declaration for the Prefect server: `tinkerflow.flows.sampling_runner` does the work.
    """


@cache
def task_named(name: str) -> Task[[], None]:
    """The declaration of a task for the Prefect server."""

    def declared() -> None:
        """Do nothing."""

    return Task(declared, name=name, persist_result=False)


@dataclass(frozen=True)
class Heading:
    """The name and other attributes of a new flow run.

    key: the key of the flow run that an earlier engine began and this engine continues; None for a new flow run.
    deployed: whether the flow run gets the buttons that Prefect's UI shows only for deployments.
    """

    flow: Flow[..., Any]
    name: str
    parameters: dict[str, str]
    tags: tuple[str, ...]
    key: str | None = None
    deployed: bool = False


class FlowRunRecord:
    """A flow run on the server. Every method returns immediately (`RequestQueue`)."""

    def __init__(
        self,
        connection: PrefectConnection,
        heading: Heading,
        adopted: UUID | None = None,
        note: Callable[[UUID], object] | None = None,
    ) -> None:
        """Create the flow run with this heading, or continue the existing one, `adopted`, which a person retried.

        note: stores the id of the flow run in the journal. It is called in a thread.
        """
        self.id = adopted
        self._connection = connection
        self._heading = heading
        self._note = note
        self._key = heading.key or str(uuid4())  # a creation that is sent twice makes only one flow run
        self.requests = RequestQueue(connection, f"flow run {heading.name}")
        self._lines: deque[LogCreate] = deque(maxlen=MOST_LINES)
        self._open = 0  # task runs
        self._artifacts: dict[str, UUID] = {}
        self._draws = False  # a drawing waits for the server
        self._final: State[None] | None = None
        self.requests.send(self._begin)

    def show(self, state: State[None]) -> None:
        """Set the flow run's state, but only if it is running, so that a state that people chose stays."""

        async def show(client: PrefectClient) -> None:
            now = (await client.read_flow_run(self._created)).state
            if now is not None and now.is_running():
                await client.set_flow_run_state(self._created, state)

        self.requests.send(show)

    def log(self, line: LogCreate) -> None:
        """Add a line to the flow run's logs. When more than MOST_LINES wait, the oldest are dropped."""
        self._lines.append(line)
        if len(self._lines) == 1:
            asyncio.get_running_loop().call_later(LOG_SECONDS, self.requests.send, self._send_lines)

    def draw(self, drawing: Drawing) -> None:
        """Create the artifacts of the drawing, or update those that this flow run already has."""
        if self._draws:
            return
        self._draws = True

        async def put(client: PrefectClient) -> None:
            self._draws = False
            try:
                drawn = await asyncio.to_thread(drawing.draw)
            except AWAY as error:  # the next drawing shows the change
                log.info("flow run %s: its artifacts wait for the journal: %s", self._heading.name, error)
                return
            for artifact in drawn:
                if (known := self._artifacts.get(artifact.name)) is not None:
                    # update_artifact would also emit an event with the whole picture, which is half of its cost.
                    changed = {"data": artifact.data, "description": artifact.title}
                    await client.request("PATCH", "/artifacts/{id}", path_params={"id": known}, json=changed)
                    continue
                created = ArtifactCreate(
                    key=drawing.key(artifact),
                    type=artifact.kind,
                    description=artifact.title,
                    data=artifact.data,
                    flow_run_id=self._created,
                )
                self._artifacts[artifact.name] = (await client.create_artifact(created)).id

        self.requests.send(put)

    def finish(self, state: State[None]) -> None:
        """End the flow run with `state`, as soon as its task runs have ended."""
        self._final = state
        if not self._open:
            self.requests.send(self._end)

    def open_task_run(self, name: str, task: str) -> TaskRunRecord:
        """Begin a task run of the task called `task`."""
        self._open += 1
        return TaskRunRecord(self, name, task)

    def task_run_ended(self) -> None:
        self._open -= 1
        if self._final is not None and not self._open:
            self.requests.send(self._end)

    def emit(self, event: Event) -> None:
        """Send an event that is related to this flow run, after the flow run is created on the server."""
        self.emit_all(lambda: [event])

    def emit_all(self, make: Callable[[], Sequence[Event]]) -> None:
        """Send events as `emit` does. make: called in a thread, since it may read the journal."""

        async def send(client: PrefectClient) -> None:
            resource = {
                "prefect.resource.id": f"prefect.flow-run.{self._created}",
                "prefect.resource.role": "flow-run",
                "prefect.resource.name": self._heading.name,
            }
            try:
                events = await asyncio.to_thread(make)
            except AWAY as error:
                log.warning("flow run %s: events were not sent: %s", self._heading.name, error)
                return
            for event in events:
                related = [RelatedResource(resource), *event.related]
                await send_event(client, event.model_copy(update={"related": related}))

        self.requests.send(send, optional=True)

    @property
    def _created(self) -> UUID:
        assert self.id is not None, "requests are sent in order, and the first one creates the flow run"
        return self.id

    async def _begin(self, client: PrefectClient) -> None:
        if self.id is None:
            self.id = await self._create(client)
        await client.set_flow_run_state(self.id, Running(), force=True)
        if self._note is not None:
            try:
                await asyncio.to_thread(self._note, self.id)
            except AWAY as error:  # the next engine that executes the run stores it
                log.info("flow run %s: its id is not stored in the journal: %s", self._heading.name, error)

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
        assert self._final is not None, "`finish` gives the final state"
        await client.set_flow_run_state(self._created, self._final, force=True)

    async def _send_lines(self, client: PrefectClient) -> None:
        lines = [line.model_copy(update={"flow_run_id": self._created}) for line in self._lines]
        self._lines.clear()  # a line that is added while these are sent waits for the next request
        if not lines:
            return
        try:
            await client.create_logs(lines)
        except Exception as error:  # the state of the flow run matters more than its logs
            if is_away(error):
                self._lines = deque([*lines, *self._lines], maxlen=MOST_LINES)
                raise
            log.warning("flow run %s: Prefect refused %d lines: %s", self._heading.name, len(lines), error)


class TaskRunRecord:
    """A task run on the server."""

    def __init__(self, flow_run: FlowRunRecord, name: str, task: str) -> None:
        """Begin the task run. name: may change until the end. task: the name of its task."""
        self.name = name
        self._flow_run = flow_run
        self._task = task
        self._first_name = name
        self._id = uuid4()
        flow_run.requests.send(self._create, optional=True)

    def end(self, state: State[None]) -> None:
        """End the task run."""

        async def end(client: PrefectClient) -> None:
            if self.name != self._first_name:
                await client.request("PATCH", "/task_runs/{id}", path_params={"id": self._id}, json={"name": self.name})
            await client.set_task_run_state(self._id, state, force=True)

        self._flow_run.requests.send(end, optional=True)
        self._flow_run.task_run_ended()

    async def _create(self, client: PrefectClient) -> None:
        flow_run_id, key = self._flow_run.id, str(self._id)
        task = task_named(self._task)
        await client.create_task_run(task, flow_run_id, key, id=self._id, name=self.name, state=Running())
