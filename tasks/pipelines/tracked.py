"""Mirrors a pipeline's steps to the trackers in its parameter `tracking`. Training never waits for a tracker.

Each tracker has a thread. The tracker's run represents the pipeline's run: a retry, or a run with the same `resume`,
continues it, although its training run is a different one. Only values that the tracker lacks are written.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress

import orjson

from tinkerflow.backend.core.clock import Clock, SystemClock
from tinkerflow.backend.core.retry import backoffs
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.tracking.mirror import TrackerError, TrackerMirror
from tinkerflow.backend.tracking.tracker import Outcome, StepRow, TrackedRun, Tracker
from tinkerflow.backend.tracking.trackers import trackers_named
from tinkerflow.tasks.pipelines.control import StoppedError
from tinkerflow.tasks.pipelines.preparation import PreparedRun
from tinkerflow.tasks.pipelines.progress import SegmentRecord, StepMetrics

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 120.0  # how long the end of a pipeline waits for all trackers


class TrackedSteps:
    """The values of a pipeline's steps, and the threads that write them to trackers."""

    def __init__(self, trackers: Sequence[Tracker], run: TrackedRun, clock: Clock) -> None:
        """Start a thread for each tracker. run: as shown by the trackers. clock: gives the time of values."""
        self._run, self._now = run, clock.now
        self._folder = Settings().tracking_folder
        self._rows: list[StepRow] = []  # this process's steps; only grows
        self._changed = {tracker.name: threading.Event() for tracker in trackers}
        self._outcome: Outcome | None = None
        self._threads = [
            threading.Thread(target=self._keep, args=(tracker,), name=f"tracker {tracker.name}", daemon=True)
            for tracker in trackers
        ]
        for thread in self._threads:
            thread.start()

    def add(self, steps: Sequence[StepMetrics]) -> None:
        """Show the values of steps."""
        self._rows += [StepRow(step.step, self._now(), step.values) for step in steps]
        self._wake()

    def add_segment(self, segment: SegmentRecord) -> None:
        """Show a recorded segment: its steps, and at the last one the measurements on held-out rows."""
        self.add([*segment.steps, StepMetrics(step=segment.last_step, values=segment.held_out)])

    def close(self, outcome: Outcome) -> None:
        """Wait until the trackers have stored everything, for at most _CLOSE_SECONDS."""
        self._outcome = outcome
        self._wake()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("%s has not stored all values: run the pipeline with the same `resume`", thread.name)

    def _wake(self) -> None:
        for changed in self._changed.values():
            changed.set()

    def _keep(self, tracker: Tracker) -> None:
        """Write rows to a tracker until the end. After a failure and a pause, begin again with the first row."""
        pauses: Iterator[float] = backoffs()
        changed, failed = self._changed[tracker.name], False
        while True:
            mirror: TrackerMirror | None = None
            try:
                mirror = TrackerMirror(tracker, self._run, self._folder)
                self._follow(mirror, changed)
                return
            except TrackerError as error:
                if not failed:
                    log.warning("the steps are not shown yet; they are sent when the tracker works again: %s", error)
                failed = True
                if mirror is not None:
                    with suppress(TrackerError):  # so that no thread of the library keeps writing
                        mirror.close("unfinished")
                time.sleep(next(pauses))

    def _follow(self, mirror: TrackerMirror, changed: threading.Event) -> None:
        written = 0
        while True:
            changed.clear()
            outcome, rows = self._outcome, self._rows[written:]
            mirror.write(rows)
            written += len(rows)
            if outcome is not None:
                mirror.close(outcome)
                return
            changed.wait()


@asynccontextmanager
async def tracked(run: PreparedRun, name: str, segments: Sequence[SegmentRecord]) -> AsyncIterator[TrackedSteps]:
    """Show a pipeline's run in its trackers. name: shared by retries. segments: recorded segments to show first."""
    steps = TrackedSteps(trackers_named(run.parameters.tracking), describe(run, name), SystemClock())
    for segment in segments:
        steps.add_segment(segment)
    outcome: Outcome = "unfinished"  # also after a suspension, which raises no Exception
    try:
        yield steps
        outcome = "finished"
    except StoppedError:
        raise
    except Exception:
        outcome = "failed"
        raise
    finally:
        await asyncio.shield(asyncio.to_thread(steps.close, outcome))


def describe(run: PreparedRun, name: str) -> TrackedRun:
    """The run as trackers show it. name: shared by retries."""
    values = run.parameters.model_dump(mode="json", exclude={"name", "connection", "work", "resume", "tracking"})
    config = {"pipeline": run.pipeline, "offered_model": run.model.name, **_flat(values)}
    return TrackedRun(name, run.pipeline, f"{run.parameters.name} {name[:8]}", (run.pipeline,), config)


def _flat(values: dict[str, object], outer: str = "") -> dict[str, str | int | float | bool]:
    """The values of all sections by their dotted names. Lists are JSON."""
    found: dict[str, str | int | float | bool] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{outer}{name}.")
        elif value is not None:
            found[outer + name] = value if isinstance(value, str | int | float) else orjson.dumps(value).decode()
    return found
