"""The mirror: what the runners do, shown as flow runs and task runs. Nothing waits for it, and nothing depends on it.

A runner tells its `RunMirror` what begins, what it waits for, and how it ends. The mirror alone decides which flow run
and which task run show that: above a rate many operations share a task run (pacing.py), after MOST_TASK_RUNS task runs
the story goes on in another flow run, and while Prefect is away operations are only counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID

from prefect.client.schemas.actions import LogCreate
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed, Paused, Running

from tinkerflow.backend.core.clock import SystemClock
from tinkerflow.backend.journal import Journal, Kind, Outcome, Trained
from tinkerflow.flows.observers import Batch, RunControls
from tinkerflow.flows.prefect.connection import PrefectConnection
from tinkerflow.flows.prefect.controls import ControlsWatch
from tinkerflow.flows.prefect.flow_run import FlowRunRecord, Heading, TaskRunRecord, sampling, training_run
from tinkerflow.flows.prefect.pacing import Pacing
from tinkerflow.flows.prefect.report import Drawing, RunReport
from tinkerflow.flows.prefect.window import Window
from tinkerflow.tasks.execution.operation import Operation
from tinkerflow.tasks.execution.restore import Restored

# Task runs of one flow run: with 500, its page takes more than six seconds to open (tests/benchmarks/RESULTS.md).
MOST_TASK_RUNS = 150
_LABEL = 60  # characters of a client's name for a run that the flow run's name shows
_MOST_LINES = 200  # of logs that wait for a flow run
_FINAL_STATES = {"Completed": Completed, "Failed": Failed, "Cancelled": Cancelled}


class Mirror:
    """What all runs share: the connection to Prefect, and the pace of task runs."""

    def __init__(
        self,
        connection: PrefectConnection,
        pacing: Pacing,
        most_task_runs: int = MOST_TASK_RUNS,
        journal: Journal | None = None,
        api_url: str = "",
        budget_tokens: int = 0,
    ) -> None:
        """Nothing is shown yet.

        connection, pacing: to Prefect, and of task runs. most_task_runs: how many one flow run shows. journal: what
        the artifacts of training runs are drawn from; None: they have none. api_url: where our console is.
        budget_tokens: after how many training tokens of a run Prefect is told; 0: never.
        """
        self.connection = connection
        self._journal, self._api_url = journal, api_url
        self.budget_tokens = budget_tokens
        self.pacing = pacing
        self.most_task_runs = most_task_runs

    @property
    def is_on(self) -> bool:
        """Whether runs are shown at all: there is a Prefect server."""
        return bool(self.connection.api_url)

    def emit(self, event: str, name: str, of: str = "base-model", **payload: object) -> None:
        """Emit a Prefect event about the `of` called `name`."""
        self.connection.emit(event, name, of, payload)

    async def watch(self, controls: RunControls) -> None:
        """Watch Prefect's health, and obey the buttons of its UI, until cancelled; return if there is no Prefect."""
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
    ) -> list[RunMirror]:
        """The mirror of one model's training run; none without Prefect.

        model_id, base_model: of the run. label: the client's name for it. adopted: the flow run, which somebody has
        retried, in which it continues. trained: the tokens on which the run was trained before.
        """
        if not self.is_on:
            return []
        parameters = {"model_id": model_id, "base_model": base_model}
        name = " ".join((last_part(base_model), *label[:_LABEL].split(), model_id))
        heading = Heading(training_run, name, parameters, self._tags(base_model), deployed=True)
        console = f"{self._api_url}/training_runs/{model_id}"
        drawing = None if self._journal is None else Drawing(self._journal, model_id, name, console)
        return [RunMirror(self, heading, short_name(model_id), adopted, model_id, drawing, trained)]

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
    """One runner's story, in as many flow runs as it takes. Every method returns immediately."""

    def __init__(
        self,
        mirror: Mirror,
        heading: Heading,
        short: str,
        adopted: UUID | None = None,
        model_id: str = "",
        drawing: Drawing | None = None,
        trained: Trained = Trained(),  # noqa: B008  it is frozen
    ) -> None:
        """The first flow run begins now, or as soon as Prefect is back and there is something to show.

        mirror, heading: of the runner, and of its flow runs. short: what the names of task runs begin with. adopted:
        the flow run to go on in. model_id, drawing, trained: of a training run, of its artifacts, and of its past.
        """
        self._mirror = mirror
        self._connection = mirror.connection
        self._heading = heading
        self._short = short
        self._flow_run: FlowRunRecord | None = None
        self._paused = False
        self._window: Window | None = None  # a shared one
        self._task_run: TaskRunRecord | None = None  # that shows the shared window
        self._windows = 0
        self._first_step = 0
        self._may_split = False
        self._operations = 0
        self._lines: deque[LogCreate] = deque(maxlen=_MOST_LINES)  # for the first flow run, until there is one
        self._model_id, self._drawing = model_id, drawing
        self._drawn = False
        self._draw_next: asyncio.TimerHandle | None = None
        if adopted is not None or self._connection.reachable:
            self._begin_flow_run(adopted)
        self._report = RunReport(SystemClock(), self.log, self._tell, trained, mirror.budget_tokens)
        self._connection.when_back(self._on_back)

    @property
    def flow_run(self) -> UUID | None:
        """The flow run that shows the runner's work now."""
        return self._flow_run.id if self._flow_run is not None else None

    # ------------------------------------------------------------------ what runners report
    def started(self, batch: Batch, operations: Sequence[Operation]) -> None:
        """The operations of a batch of one model were started."""
        self._operations += len(operations)
        for operation in operations:
            operation.answered.add_done_callback(self._answered)
        if not self._shows():
            return
        pacing, window = self._mirror.pacing, self._window
        if window is not None and self._may_split and pacing.seconds == 0:
            window.close()
        if window is None or not window.open or window.full:
            pacing.open()
            self._first_step = batch.step
            if pacing.sharing:
                window = self._share(shared_name(self._short, batch.step), "steps")
            else:
                window = self._open(run_name(self._short, batch), kind_name(batch.kind))
        for operation in operations:
            window.add(operation)
        if window is not self._window:
            window.close()
        elif self._task_run is not None:
            self._task_run.name = shared_name(self._short, self._first_step, batch.step)
        self._may_split = batch.ends_step

    def sampled(self, operation: Operation) -> None:
        """A sampling request was taken."""
        self._operations += 1
        if not self._shows():
            return
        window = self._window
        if window is None or not window.open or window.full:
            self._windows += 1
            self._mirror.pacing.open()
            window = self._share(f"{self._short}/sample-{self._windows:06d}", "sample")
        window.add(operation)

    def paused(self, text: str | None) -> None:
        """The runner takes nothing more from the journal; None: it goes on. Prefect shows its own pauses itself."""
        begins = text is not None and not self._paused
        self._paused = text is not None
        if begins and self._flow_run is None:
            self._on_back()
        elif begins and text:
            self._show(Paused(message=text))

    def restoring(self, generation: int) -> None:
        """The model is being restored in the worker group of this generation."""
        text = f"in worker group {generation}, from its last snapshot and the journal"
        self._show(Running(name="Restoring", message=text))

    def restored(self, generation: int, restored: Restored) -> None:
        """The model was restored."""
        snapshot, seconds = restored.snapshot, round(restored.seconds, 3)
        text = f"restored in worker group {generation}: {restored.requests} requests replayed"
        self._show(Running(message=text))
        source = "its creation" if snapshot is None else f"its snapshot at request {snapshot.seq_id}"
        self.log(f"{text} ({restored.steps} optimizer steps) after {source}, in {seconds} s")
        for why in restored.unreadable:
            self.log(f"a newer snapshot cannot be read: {why}", logging.ERROR)
            self._tell("tinkerflow.snapshot.unreadable", why=why)
        self._tell(
            "tinkerflow.model.restored",
            generation=generation,
            snapshot_at_request=None if snapshot is None else snapshot.seq_id,
            replayed_requests=restored.requests,
            replayed_steps=restored.steps,
            seconds=seconds,
        )

    def interrupted(self) -> None:
        """The worker group ended, and what was in flight with it."""
        text = "its worker group ended; what was in flight is executed again by the next one"
        self._show(Running(name="Interrupted", message=text))
        self.log(text, logging.WARNING)

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Add a line to the logs of the flow run, or of the next one when there is none now."""
        line = LogCreate(name="tinkerflow", level=level, message=text, timestamp=datetime.now(UTC))
        if self._flow_run is not None:
            self._flow_run.log(line)
        else:
            self._lines.append(line)

    def ended(self, state: str, text: str, *, over: bool = True) -> None:
        """The runner has ended: `Completed`, `Failed` or `Cancelled`. over: no other engine takes its run up again."""
        self._connection.forget(self._on_back)
        self._report.close()
        self.log(
            f"ended after {self._operations} operations: {text}", logging.ERROR if state == "Failed" else logging.INFO
        )
        if self._model_id and over:
            self._tell("tinkerflow.run.finished", state=state, why=text, operations=self._operations)
        self._draw()
        self._finish(_FINAL_STATES[state](message=text))

    # ------------------------------------------------------------------ lines, events and artifacts
    def _answered(self, answered: asyncio.Task[Outcome | None]) -> None:
        if answered.cancelled() or answered.exception() is not None or (outcome := answered.result()) is None:
            return
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

    def _tell(self, event: str, *, once: str = "", **payload: object) -> None:
        emit = self._flow_run.emit if self._flow_run is not None else None
        self._connection.emit(event, self._model_id, "model", payload, send=emit, once=once)

    # ------------------------------------------------------------------ which flow run and which task run
    def _shows(self) -> bool:
        """Whether what happens now is shown; if so there is a flow run for it."""
        if not self._connection.reachable:
            self._connection.untracked += 1
            return False
        if self._flow_run is None:
            self._begin_flow_run()
        return True

    def _begin_flow_run(self, adopted: UUID | None = None) -> FlowRunRecord:
        self._flow_run = FlowRunRecord(self._connection, self._heading, adopted)
        while self._lines:
            self._flow_run.log(self._lines.popleft())
        return self._flow_run

    def _on_back(self) -> None:
        """A paused run needs a flow run at once: its Resume button is the only way to let it go on."""
        if self._paused and self._flow_run is None and self._connection.reachable:
            self._begin_flow_run()
            self._show(Paused(message="it was paused already when this run began"))

    def _show(self, state: State[None]) -> None:
        if self._flow_run is not None:
            self._flow_run.show(state)

    def _share(self, name: str, task: str) -> Window:
        if self._window is not None:
            self._window.close()
        self._window = self._open(name, task, shared=True)
        return self._window

    def _open(self, name: str, task: str, *, shared: bool = False) -> Window:
        full = self._flow_run is not None and self._flow_run.task_runs >= self._mirror.most_task_runs
        if full and not self._paused:  # a paused run stays in the flow run that has the Resume button
            self._finish(Completed(message="it goes on in another flow run"))
        self._connection.tracked += 1
        task_run = (self._flow_run or self._begin_flow_run()).open_task_run(name, task)
        if not shared:
            return Window(task_run.end)
        self._task_run = task_run
        return Window(task_run.end, linger=lambda: self._mirror.pacing.seconds)

    def _finish(self, state: State[None]) -> None:
        if self._window is not None:
            self._window.close()
        if self._flow_run is not None:
            self._flow_run.finish(state)
        self._window = self._flow_run = self._task_run = None


def kind_name(kind: Kind) -> str:
    """The name that clients know a kind of operation by."""
    return "save_weights_for_sampler" if kind is Kind.SAVE_FOR_SAMPLER else kind.value


def last_part(base_model: str) -> str:
    """A base model's short name: the last part of a hub id or of a folder's path."""
    return base_model.rstrip("/").rsplit("/", 1)[-1]


def short_name(model_id: str) -> str:
    """`model-ab12-0` for `sess-…ab12:train:0`: the end of the session's id, and the model's number in it."""
    session, _, number = model_id.partition(":train:")
    return f"model-{session[-4:]}-{number}"


def run_name(short: str, batch: Batch) -> str:
    """The name of a batch's task run: `model-ab12-0/step-000017/forward_backward`."""
    return f"{short}/step-{batch.step:06d}/{kind_name(batch.kind)}"


def shared_name(short: str, first_step: int, last_step: int | None = None) -> str:
    """The name of a task run that many batches share; while it is open, its last step is not known."""
    end = "onwards" if last_step is None else f"{last_step:06d}"
    return f"{short}/steps-{first_step:06d}-{end}"
