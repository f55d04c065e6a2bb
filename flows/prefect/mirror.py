"""The mirror: shows the runners' work as flow runs and task runs. Nothing waits for it, and nothing depends on it.

A training run is one flow run from its start to its end, even across restarts of the engine. A runner reports to its
`RunMirror`, which alone decides which task run shows an operation: above a rate (pacing.py), and as the number of task
runs grows (window.py), more operations share one. While Prefect is away, operations are only counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import LogCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events import Event
from prefect.states import Cancelled, Completed, Crashed, Failed, Paused, Pending, Running

from tinkerflow.backend.catalog.model_card import public_name
from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.journal import CheckpointSaved, Journal, Kind, ModelState, Outcome, Trained
from tinkerflow.backend.spec.drift import UNLIMITED, DriftLimits
from tinkerflow.backend.store import Store
from tinkerflow.flows.observers import Batch, RunControls
from tinkerflow.flows.prefect.assets import asset_events
from tinkerflow.flows.prefect.client import get_client
from tinkerflow.flows.prefect.connection import PrefectConnection, event_about
from tinkerflow.flows.prefect.controls import ControlsWatch
from tinkerflow.flows.prefect.drawing import Drawing
from tinkerflow.flows.prefect.flow_run import FlowRunRecord, Heading, TaskRunRecord, sampling, training_run
from tinkerflow.flows.prefect.pacing import Pacing
from tinkerflow.flows.prefect.window import Window, window_size, windows_of
from tinkerflow.flows.run_report import INTERRUPTED, RunReport, restored_line
from tinkerflow.tasks.execution.operation import Operation
from tinkerflow.tasks.execution.recheck import Difference
from tinkerflow.tasks.execution.restore import Restored

_LABEL = 60  # characters of a client's name for a run, in the flow run's name
_MOST_LINES = 200  # log lines that wait for a flow run
_FINAL_STATES = {"Completed": Completed, "Failed": Failed, "Cancelled": Cancelled}
_UNFINISHED = ("PENDING", "RUNNING", "PAUSED")  # controls.py ends the runs that are to be cancelled
WAITING = "the engine is not executing the run now; it continues with its next request"


class Mirror:
    """The state that all runs share: the connection to Prefect, and the pace of task runs."""

    def __init__(
        self,
        connection: PrefectConnection,
        pacing: Pacing,
        journal: Journal | None = None,
        api_url: str = "",
        budget_tokens: int = 0,
        drift_limits: DriftLimits = UNLIMITED,
        store: Store | None = None,
    ) -> None:
        """Nothing is shown yet.

        connection: to Prefect. pacing: of task runs. journal: for the artifacts of training runs, and for the states of
        runs that an earlier engine left behind; None: neither is shown. api_url: our console's URL. budget_tokens:
        training tokens of a run after which Prefect gets an event; 0: never. drift_limits: limits of `DRIFT_FIGURES`.
        store: contains the histories.
        """
        self.connection = connection
        self._journal, self._api_url, self._store = journal, api_url, store
        self.budget_tokens, self.drift_limits = budget_tokens, drift_limits
        self.pacing = pacing

    @property
    def is_on(self) -> bool:
        """Whether runs are shown at all, because there is a Prefect server."""
        return bool(self.connection.api_url)

    def emit(self, event: str, name: str, of: str = "base-model", **payload: object) -> None:
        """Emit a Prefect event about the object `name` of the kind `of`."""
        self.connection.emit(event_about(event, name, of, payload))

    def asset_events(self, saved: CheckpointSaved) -> list[Event]:
        """The events of a saved checkpoint as an asset. Call this in a thread, since it reads the journal."""
        if self._journal is None:
            return []
        return asset_events(self._journal.models.get(saved.run_id, None), saved, self._api_url)

    async def reconcile(self) -> int:
        """Set flow runs that an earlier engine left unfinished to their states in the journal. Returns their number."""
        if not self.connection.reachable:
            return 0
        tags, state = {"all_": [self.connection.mark]}, {"type": {"any_": _UNFINISHED}}
        left = FlowRunFilter.model_validate({"tags": tags, "state": state})
        runs: list[FlowRun] = []
        try:
            async with get_client() as client:
                while page := await client.read_flow_runs(flow_run_filter=left, offset=len(runs)):
                    runs += page
                for run in runs:
                    await self._reconcile_one(client, run)
        except Exception as error:  # noqa: BLE001  Prefect may show wrong states, the work continues
            self.connection.note_reachable(False, f"{type(error).__name__}: {error}")
        return len(runs)

    async def _reconcile_one(self, client: PrefectClient, run: FlowRun) -> None:
        state = await asyncio.to_thread(self._state_in_journal, str(run.parameters.get("model_id", "")))
        paused = run.state is not None and run.state.type is StateType.PAUSED
        if not (paused and state.type is StateType.PENDING):
            await client.set_flow_run_state(run.id, state, force=True)

    def _state_in_journal(self, model_id: str) -> State[Any]:
        """The state of a run that no engine executes."""
        if self._journal is None or not model_id:
            return Crashed(message="the engine that executed this run ended unexpectedly")
        try:
            model = self._journal.models.get(model_id, None)
        except NotFoundError as error:
            return Crashed(message=error.message)
        match model.state:
            case ModelState.CREATING | ModelState.LIVE:
                return Pending(name="Waiting", message=WAITING)
            case ModelState.UNLOADED:
                return Completed(message=f"unloaded: {model.detail}")
        return Failed(message=f"{model.state}: {model.detail}")

    async def watch(self, controls: RunControls) -> None:
        """Watch Prefect's health, and handle the buttons of its UI, until cancelled. Returns if there is no Prefect."""
        if self.is_on:
            async with asyncio.TaskGroup() as watches:
                watches.create_task(self.connection.watch(), name="prefect health")
                watches.create_task(ControlsWatch(self.connection, controls).watch(), name="controls")

    def observe_training_run(
        self,
        model_id: str,
        base_model: str,
        label: str = "",
        adopted: UUID | None = None,
        trained: Trained = Trained(),  # noqa: B008  it is frozen
        steps: int = 0,
        created_at: datetime | None = None,
    ) -> list[RunMirror]:
        """The mirror of one model's training run; none without Prefect.

        model_id, base_model, created_at: the run's. label: the client's name for the run. adopted: the flow run that a
        person retried, in which the run continues. trained, steps: the tokens and optimizer steps that the run was
        trained before.
        """
        if not self.is_on:
            return []
        parameters = {"model_id": model_id, "base_model": base_model}
        began = () if created_at is None else (f"{created_at:%Y-%m-%d %H:%M}",)
        name = " ".join((*(label[:_LABEL].split() or (short_name(model_id),)), last_part(base_model), *began))
        key = f"{self.connection.mark} {model_id}"
        heading = Heading(training_run, name, parameters, (*self._tags(base_model), model_id), key, deployed=True)
        console = f"{self._api_url}/training_runs/{model_id}"
        drawing = None if self._journal is None else Drawing(self._journal, model_id, name, console, self._store)
        return [RunMirror(self, heading, short_name(model_id), adopted, model_id, drawing, trained, steps)]

    def observe_sampling(self, base_model: str) -> list[RunMirror]:
        """The mirror of one base model's samples; none without Prefect."""
        if not self.is_on:
            return []
        short = last_part(base_model)
        heading = Heading(sampling, f"{short} sampling", {"base_model": base_model}, self._tags(base_model))
        return [RunMirror(self, heading, short)]

    def _tags(self, base_model: str) -> tuple[str, ...]:
        return ("tinkerflow", last_part(base_model), self.connection.mark)


class RunMirror:
    """One runner's work in one flow run. Every method returns immediately."""

    def __init__(
        self,
        mirror: Mirror,
        heading: Heading,
        short: str,
        adopted: UUID | None = None,
        model_id: str = "",
        drawing: Drawing | None = None,
        trained: Trained = Trained(),  # noqa: B008  it is frozen
        steps: int = 0,
    ) -> None:
        """The flow run begins now, or as soon as Prefect is back and there is something to show.

        mirror: the runner's mirror. heading: its flow run's heading. short: the beginning of task runs' names. adopted:
        the flow run to continue. model_id, drawing, trained, steps: a training run's id, artifacts, and earlier tokens
        and steps.
        """
        self._mirror = mirror
        self._connection = mirror.connection
        self._heading = heading
        self._short = short
        self._flow_run: FlowRunRecord | None = None
        self._paused = False
        self._window: Window | None = None
        self._task_run: TaskRunRecord | None = None  # shows the window
        self._windows = windows_of(2 * steps)  # a step is two operations or more
        self._first_step = 0
        self._may_split = False
        self._operations = 0
        self._lines: deque[LogCreate] = deque(maxlen=_MOST_LINES)  # wait for the first flow run
        self._model_id, self._drawing = model_id, drawing
        self._drawn = False
        self._draw_next: asyncio.TimerHandle | None = None
        if adopted is not None or self._connection.reachable:
            self._begin_flow_run(adopted)
        self._report = RunReport(
            SystemClock(), self.log, self._emit, trained, mirror.budget_tokens, mirror.drift_limits
        )
        self._connection.on_reachable(self._on_reachable)

    @property
    def flow_run(self) -> UUID | None:
        return self._flow_run.id if self._flow_run is not None else None

    # ------------------------------------------------------------------ reports of runners
    def started(self, batch: Batch, operations: Sequence[Operation]) -> None:
        self._operations += len(operations)
        for operation in operations:
            operation.answered.add_done_callback(self._answered)
        if not self._shows():
            return
        window = self._window
        if window is not None and self._may_split and window.full and self._mirror.pacing.seconds == 0:
            window.close()
        if window is None or not window.open:
            self._first_step = batch.step
            shared = self._opens_shared()
            name = shared_name(self._short, batch.step) if shared else run_name(self._short, batch)
            window = self._open(name, "steps" if shared else kind_name(batch.kind), shared=shared)
        elif self._task_run is not None:
            self._task_run.name = shared_name(self._short, self._first_step, batch.step)
        for operation in operations:
            window.add(operation)
        if self._window is None:
            window.close()  # the task run shows only this batch
        self._may_split = batch.ends_step

    def sampled(self, operation: Operation) -> None:
        self._operations += 1
        if not self._shows():
            return
        window = self._window
        if window is None or not window.open:
            window = self._open(f"{self._short}/sample-{self._windows + 1:06d}", "sample", shared=True)
        window.add(operation)

    def paused(self, text: str | None) -> None:
        """The runner is paused for the reason `text`, or continues if `text` is None. Prefect shows its own pauses."""
        begins = text is not None and not self._paused
        self._paused = text is not None
        if begins and self._flow_run is None:
            self._on_reachable()
        elif begins and text:
            self._show(Paused(message=text))

    def restoring(self, generation: int) -> None:
        text = f"in worker group {generation}, from its last snapshot and the journal"
        self._show(Running(name="Restoring", message=text))

    def differed(self, difference: Difference) -> None:
        self.log(str(difference), logging.ERROR)
        self._emit(
            "tinkerflow.run.corrupt",
            step=difference.step,
            kind=difference.kind,
            request=difference.seq_id,
            devices=list(difference.devices),
            ranks=list(difference.places),
            wrong=difference.wrong,
        )

    def restored(self, generation: int, restored: Restored) -> None:
        snapshot, seconds = restored.snapshot, round(restored.seconds, 3)
        line = restored_line(generation, restored)
        self._show(Running(message=line))
        self.log(line)
        for why in restored.unreadable:
            self.log(f"a newer snapshot cannot be read: {why}", logging.ERROR)
            self._emit("tinkerflow.snapshot.unreadable", why=why)
        self._emit(
            "tinkerflow.model.restored",
            generation=generation,
            snapshot_at_request=None if snapshot is None else snapshot.seq_id,
            replayed_requests=restored.requests,
            replayed_steps=restored.steps,
            seconds=seconds,
        )

    def interrupted(self) -> None:
        self._show(Running(name="Interrupted", message=INTERRUPTED))
        self.log(INTERRUPTED, logging.WARNING)

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Add a line to the logs of the flow run, or of the next one if there is none now."""
        line = LogCreate(name="tinkerflow", level=level, message=text, timestamp=datetime.now(UTC))
        if self._flow_run is not None:
            self._flow_run.log(line)
        else:
            self._lines.append(line)

    def ended(self, state: str, text: str, *, over: bool = True) -> None:
        self._connection.forget(self._on_reachable)
        self._report.close()
        level = logging.ERROR if state == "Failed" else logging.INFO
        self.log(f"ended after {self._operations} operations: {text}", level)
        continues = bool(self._model_id) and not over
        if self._model_id and over:
            self._emit("tinkerflow.run.finished", state=state, why=text, operations=self._operations)
        self._draw()
        waiting: State[Any] = Pending(name="Waiting", message=f"{text}: {WAITING}")
        if self._window is not None:
            self._window.close()
        if self._flow_run is not None:
            self._flow_run.finish(waiting if continues else _FINAL_STATES[state](message=text))
        self._window = self._flow_run = self._task_run = None

    # ------------------------------------------------------------------ lines, events and artifacts
    def _answered(self, answered: asyncio.Task[Outcome | None]) -> None:
        if answered.cancelled() or answered.exception() is not None or (outcome := answered.result()) is None:
            return
        for effect in outcome.effects:
            if isinstance(effect, CheckpointSaved) and self._flow_run is not None:
                self._flow_run.emit_all(partial(self._mirror.asset_events, effect))
        if self._report.answered(outcome) and self._drawing is not None and self._draw_next is None:
            loop = asyncio.get_running_loop()
            self._draw_next = loop.call_later(0.0 if not self._drawn else self._drawing.pause, self._draw)

    def _draw(self) -> None:
        if self._draw_next is not None:
            self._draw_next.cancel()
            self._draw_next = None
        if self._drawing is not None and self._flow_run is not None:
            self._drawn = True
            self._flow_run.draw(self._drawing)

    def _emit(self, name: str, *, once: str = "", **payload: object) -> None:
        """Emit an event about the model. It is related to the flow run, which automations can suspend or cancel."""
        emit = self._connection.emit if self._flow_run is None else self._flow_run.emit
        emit(event_about(name, self._model_id, "model", payload, once))

    # ------------------------------------------------------------------ choice of flow run and task run
    def _shows(self) -> bool:
        """Whether operations are shown now. If so, there is a flow run for them."""
        if not self._connection.reachable:
            self._connection.untracked += 1
            return False
        if self._flow_run is None:
            self._begin_flow_run()
        return True

    def _begin_flow_run(self, adopted: UUID | None = None) -> FlowRunRecord:
        note = None if self._drawing is None else self._drawing.note_flow_run
        self._flow_run = FlowRunRecord(self._connection, self._heading, adopted, note)
        while self._lines:
            self._flow_run.log(self._lines.popleft())
        return self._flow_run

    def _on_reachable(self) -> None:
        """Begin the flow run of a paused run, because only its Resume button can end the pause."""
        if self._paused and self._flow_run is None and self._connection.reachable:
            self._begin_flow_run()
            self._show(Paused(message="it was paused already when this run began"))

    def _show(self, state: State[None]) -> None:
        if self._flow_run is not None:
            self._flow_run.show(state)

    def _opens_shared(self) -> bool:
        """Whether the next task run shows more than one batch."""
        return window_size(self._windows) > 1 or self._mirror.pacing.sharing

    def _open(self, name: str, task: str, *, shared: bool) -> Window:
        """Open a task run. A shared one stays open for later operations."""
        self._mirror.pacing.open()
        self._connection.tracked += 1
        size = window_size(self._windows)
        self._windows += 1
        task_run = (self._flow_run or self._begin_flow_run()).open_task_run(name, task)
        window = Window(task_run.end, size, linger=lambda: self._mirror.pacing.seconds)
        self._window, self._task_run = (window, task_run) if shared else (None, None)
        return window


def kind_name(kind: Kind) -> str:
    """The clients' name for a kind of operation."""
    return "save_weights_for_sampler" if kind is Kind.SAVE_FOR_SAMPLER else kind.value


def last_part(base_model: str) -> str:
    """A base model's short name: the last part of a hub id or of a folder's path."""
    return public_name(base_model).rstrip("/").rsplit("/", 1)[-1]


def short_name(model_id: str) -> str:
    """`model-ab12-0` for `sess-…ab12:train:0`: the end of the session's id, and the model's number in it."""
    session, _, number = model_id.partition(":train:")
    return f"model-{session[-4:]}-{number}"


def run_name(short: str, batch: Batch) -> str:
    """The name of a batch's task run: `model-ab12-0/step-000017/forward_backward`."""
    return f"{short}/step-{batch.step:06d}/{kind_name(batch.kind)}"


def shared_name(short: str, first_step: int, last_step: int | None = None) -> str:
    """The name of a task run that many batches share. While it is open, its last step is unknown."""
    end = "onwards" if last_step is None else f"{last_step:06d}"
    return f"{short}/steps-{first_step:06d}-{end}"
