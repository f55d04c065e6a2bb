"""The events of training runs on their pages in the console. They are written to the journal in the background."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from uuid import UUID

from tinkerflow.backend.core.clock import Clock
from tinkerflow.backend.journal import Journal, Outcome, RunEvent, Trained
from tinkerflow.backend.spec.drift import DriftLimits
from tinkerflow.flows.observers import Batch
from tinkerflow.flows.run_report import INTERRUPTED, RunReport, restored_line
from tinkerflow.tasks.execution.operation import Operation
from tinkerflow.tasks.execution.recheck import Difference
from tinkerflow.tasks.execution.restore import Restored

_MOST_WAITING = 1000  # events of all runs in memory; beyond this number, the oldest events are dropped


class RunLogs:
    """The events of all runs of an engine that are not yet in the journal."""

    def __init__(self, journal: Journal, clock: Clock, budget_tokens: int, drift_limits: DriftLimits) -> None:
        """budget_tokens: see the settings. drift_limits: the limits of `DRIFT_FIGURES`."""
        self._journal, self._clock = journal, clock
        self._budget, self._drift_limits = budget_tokens, drift_limits
        self._waiting: deque[tuple[str, RunEvent]] = deque(maxlen=_MOST_WAITING)
        self.some = asyncio.Event()  # there are events to write

    def observe(self, model_id: str, trained: Trained) -> RunLog:
        """The observer of one model's training run. trained: tokens that the run was trained on before this engine."""
        return RunLog(self, self._clock, model_id, trained, self._budget, self._drift_limits)

    def add(self, run_id: str, text: str, level: int) -> None:
        """Queue an event that happens now for the next `write`."""
        self._waiting.append((run_id, RunEvent(self._clock.now(), level, text)))
        self.some.set()

    async def write(self) -> None:
        """Write the queued events, in one transaction per run. After an error, the other events stay queued."""
        by_run: dict[str, list[RunEvent]] = {}
        while self._waiting:
            run_id, event = self._waiting.popleft()
            by_run.setdefault(run_id, []).append(event)
        try:
            for run_id in list(by_run):
                events = by_run.pop(run_id)
                try:
                    await asyncio.to_thread(self._journal.run_events.add, run_id, events)
                except Exception:  # not if cancelled: the thread still writes them
                    by_run[run_id] = events
                    raise
        finally:
            queued = [(run_id, event) for run_id, events in by_run.items() for event in events]
            self._waiting = deque([*queued, *self._waiting], maxlen=_MOST_WAITING)


class RunLog:
    """Collects the events of one run, except its pauses and its end, which the journal records itself."""

    flow_run: UUID | None = None

    def __init__(
        self, logs: RunLogs, clock: Clock, model_id: str, trained: Trained, budget: int, drift_limits: DriftLimits
    ) -> None:
        """logs: receives the events. clock, trained, budget, drift_limits: see `RunReport`. model_id: the run's id."""
        self._logs, self._model_id = logs, model_id
        self._report = RunReport(
            clock, self._note, lambda *_, **__: None, trained, budget, drift_limits, says_steps=False
        )

    def started(self, batch: Batch, operations: Sequence[Operation]) -> None:
        """Report the outcomes of these operations."""
        for operation in operations:
            operation.answered.add_done_callback(self._answered)

    def sampled(self, operation: Operation) -> None:
        """Do nothing: a sampling request is no event of a training run."""

    def paused(self, text: str | None) -> None:
        """Do nothing: the event is already in the journal."""

    def restoring(self, generation: int) -> None:
        """Do nothing: the end of the restore is the event."""

    def restored(self, generation: int, restored: Restored) -> None:
        self._note(restored_line(generation, restored), logging.INFO)
        for why in restored.unreadable:
            self._note(f"a newer snapshot cannot be read: {why}", logging.ERROR)

    def differed(self, difference: Difference) -> None:
        self._note(str(difference), logging.ERROR)

    def interrupted(self) -> None:
        self._note(INTERRUPTED, logging.WARNING)

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Do nothing: lines are for Prefect's logs."""

    def ended(self, state: str, text: str, *, over: bool = True) -> None:
        """Do nothing: the event is already in the journal."""

    def _answered(self, answered: asyncio.Task[Outcome | None]) -> None:
        if not answered.cancelled() and answered.exception() is None and (outcome := answered.result()) is not None:
            self._report.answered(outcome)

    def _note(self, text: str, level: int) -> None:
        self._logs.add(self._model_id, text, level)
