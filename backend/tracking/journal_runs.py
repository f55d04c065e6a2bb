"""Mirrors the training runs of the journal to one tracker, in a separate thread or process that may lag behind.

The mirror reads the extent of each run from the journal every few seconds, and writes the difference. A file records
the extent of each closed run that the tracker has stored. After a crash, open runs are read back from the tracker.
"""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from tinkerflow.backend.core.clock import Clock
from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.core.retry import Restarts
from tinkerflow.backend.journal import AWAY, Extent, Journal, ModelState, RunSaves
from tinkerflow.backend.tracking.mirror import TrackerError, TrackerMirror
from tinkerflow.backend.tracking.tracker import Outcome, StepRow, TrackedRun, Tracker

log = logging.getLogger(__name__)

Run = TypeVar("Run", Extent, RunSaves)

LOOK_SECONDS = 2.0
ALL_SECONDS = 300.0  # between two looks at ended runs, because clients may still store metrics for them
_IDLE_SECONDS = 300.0  # without new values, after which a run is closed
_MOST_OPEN = 64
_AT_ONCE = 5000  # rows
_OUTCOMES: Mapping[ModelState, Outcome] = {
    ModelState.UNLOADED: "finished",
    ModelState.FAILED: "failed",
    ModelState.LOST: "failed",
}


class JournalMirror:
    """Mirrors the runs of some projects to one tracker."""

    def __init__(
        self, tracker: Tracker, journal: Journal, folder: Path, clock: Clock, projects: Collection[str] = ()
    ) -> None:
        """Read nothing yet.

        tracker: the tracker. journal: contains the runs. folder: for the data of all trackers. clock: gives the time of
        values without a time. projects: the projects of the mirrored runs; none = all projects.
        """
        self._tracker, self._journal, self._folder, self._clock = tracker, journal, folder, clock
        self._projects = projects
        self._stored = Stored(folder / tracker.name / "stored.txt")
        self._open: dict[str, _OpenRun] = {}
        self._failing: dict[str, tuple[Restarts, float]] = {}  # by run, and when the next attempt is due
        self._all_at = -ALL_SECONDS

    def keep(self, stop: threading.Event) -> None:
        """Mirror until `stop` is set, then close all runs. UserError: another process is already mirroring."""
        with alone(self._folder / self._tracker.name):
            while not stop.is_set():
                try:
                    self.turn()
                except AWAY as error:
                    log.warning("tracker %s waits for the journal: %s", self._tracker.name, error)
                stop.wait(LOOK_SECONDS)
            self.close()

    def once(self) -> None:
        """Write the journal's current values. UserError: as in `keep`. TrackerError: a run was not stored."""
        with alone(self._folder / self._tracker.name):
            self.turn()
            self.close()
        if self._failing:
            raise TrackerError(f"tracker {self._tracker.name}: not stored: {', '.join(self._failing)}")

    def turn(self) -> None:
        """Write new values. If the tracker fails for a run, the run is retried after a growing pause."""
        now = time.monotonic()
        read = partial(self._journal.run_values.extents, self._projects)
        extents, every = look_at_runs(read, self._open.keys(), every=now - self._all_at >= ALL_SECONDS)
        if every:
            self._all_at = now
            self._close_except({extent.id for extent in extents})
        for extent in extents:
            try:
                self._mirror(extent, now)
            except NotFoundError as error:  # a person has deleted the run meanwhile
                log.info("run %s is not shown: %s", extent.id, error)

    def close(self) -> None:
        self._close_except(())

    def _close_except(self, kept: Collection[str]) -> None:
        """Close the open runs that are not in `kept`, such as runs that were deleted."""
        for opened in [one for one in self._open.values() if one.run_id not in kept]:
            try:
                self._close(opened)
            except TrackerError as error:
                self._failing[opened.run_id] = Restarts(), 0.0
                log.warning("run %s will be completed at the next start: %s", opened.run_id, error)

    def _mirror(self, extent: Extent, now: float) -> None:
        opened = self._open.get(extent.id)
        if opened is None and (self._stored.has(extent) or (extent.last_seq < 0 and not extent.metrics)):
            return
        restarts, due = self._failing.get(extent.id, (Restarts(), 0.0))
        if now < due:
            return
        try:
            if opened is None:
                opened = self._open_run(extent.id)
            if opened.extent != extent:
                opened.write(extent, self._clock)
                opened.changed = now
            if extent.state in _OUTCOMES or now - opened.changed > _IDLE_SECONDS:
                self._close(opened)
        except TrackerError as error:
            pause = restarts.pause(steady=False)
            self._failing[extent.id] = restarts, time.monotonic() + pause
            log.warning("run %s is not shown now, trying again in %g s: %s", extent.id, pause, error)
            if (failed := self._open.pop(extent.id, None)) is not None:
                with suppress(TrackerError):  # closed, so that no thread of the library continues to write
                    failed.mirror.close("unfinished")
        else:
            self._failing.pop(extent.id, None)

    def _open_run(self, run_id: str) -> _OpenRun:
        if len(self._open) >= _MOST_OPEN:
            self._close(min(self._open.values(), key=lambda one: one.changed))
        mirror = TrackerMirror(self._tracker, describe(self._journal, run_id), self._folder)
        opened = self._open[run_id] = _OpenRun(self._journal, run_id, mirror)
        return opened

    def _close(self, opened: _OpenRun) -> None:
        del self._open[opened.run_id]
        opened.mirror.close("unfinished" if opened.extent is None else _OUTCOMES.get(opened.extent.state, "unfinished"))
        if opened.extent is not None:
            self._stored.note(opened.extent)


class _OpenRun:
    """A run that is being mirrored. extent: how much of it was written. changed: when it last grew."""

    def __init__(self, journal: Journal, run_id: str, mirror: TrackerMirror) -> None:
        self.run_id, self.mirror = run_id, mirror
        self.extent: Extent | None = None
        self.changed = time.monotonic()
        self._values = journal.run_values
        self._seq, self._step = -1, 0
        self._counts: dict[str, int] = {}  # by metric: how many values were read
        self._last: dict[str, int] = {}  # by metric: the last step

    def write(self, extent: Extent, clock: Clock) -> None:
        """Write the values of the run up to `extent`."""
        while made := self._values.steps(self.run_id, self._seq, _AT_ONCE):
            rows = []
            for one in made:
                # After loading an earlier checkpoint, a client repeats step numbers. These steps get the next numbers.
                self._step = max(one.step, self._step + 1)
                rows.append(StepRow(self._step, one.at, one.values))
            self._seq = made[-1].seq_id
            self.mirror.write(rows)
        counts = self._values.metrics(self.run_id)
        grown = [name for name, number in counts.items() if number > self._counts.get(name, 0)]
        new = self._write_metrics({name: self._last.get(name, -1) for name in grown}, clock)
        # Some new values belong to earlier steps than known values. All are read again, and the mirror skips known
        # ones.
        late = [name for name in grown if self._counts.get(name, 0) + new[name] < counts[name]]
        self._write_metrics(dict.fromkeys(late, -1), clock)
        self._counts, self.extent = counts, extent

    def _write_metrics(self, after: Mapping[str, int], clock: Clock) -> dict[str, int]:
        """Write the values of metrics at later steps than `after`, a row for each step. Returns their counts."""
        new = dict.fromkeys(after, 0)
        while after:
            steps: dict[int, dict[str, float]] = {}
            left = {}
            for name, last in after.items():
                if points := self._values.metric(self.run_id, name, last, _AT_ONCE):
                    for step, value in points:
                        steps.setdefault(step, {})[name] = value
                    new[name] += len(points)
                    left[name] = points[-1][0]
                    self._last[name] = max(self._last.get(name, -1), left[name])
            self.mirror.write([StepRow(step, clock.now(), values) for step, values in sorted(steps.items())])
            after = left
        return new


class Stored:
    """A file with the extents of closed runs that a tracker has stored. The last line of a run counts.

    A line that a crash cut off is ignored.
    """

    def __init__(self, path: Path) -> None:
        """path: the file, which need not exist."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        text = path.read_text() if path.exists() else ""
        self._lines = dict(line.split("\t", 1) for line in text.split("\n")[:-1] if "\t" in line)
        self._cut = bool(text) and not text.endswith("\n")

    def has(self, extent: Extent) -> bool:
        """Whether the tracker has stored the run up to this extent."""
        return self._lines.get(extent.id) == _line(extent)

    def note(self, extent: Extent) -> None:
        """Note that the tracker has stored the run up to this extent."""
        self._lines[extent.id] = line = _line(extent)
        with self._path.open("a") as file:
            file.write("\n" * self._cut + f"{extent.id}\t{line}\n")
        self._cut = False


def _line(extent: Extent) -> str:
    over = extent.state if extent.state in _OUTCOMES else ""
    return f"{extent.last_seq} {extent.metrics} {over}"


def look_at_runs(read: Callable[..., list[Run]], known: Set[str], *, every: bool) -> tuple[list[Run], bool]:
    """The live runs, or all runs if `every` is set or a known run has just ended, and whether these are all runs.

    read: reads them from the journal, with the argument `live_only`. known: ids of runs that were live before.
    """
    found = read(live_only=not every)
    if every or known <= {run.id for run in found}:
        return found, every
    return read(live_only=False), True


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Be the only process that mirrors the journal to this folder. UserError: another process does so."""
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another `tinkerflow track` writes there; stop it first") from None
        yield


def describe(journal: Journal, run_id: str) -> TrackedRun:
    """The run as trackers show it."""
    model = journal.models.get(run_id, None)
    session = journal.sessions.get(model.session_id, None)
    config: dict[str, str | int | float | bool] = {
        "base_model": model.base_model,
        "rank": model.rank,
        "train_attn": model.train_attn,
        "train_mlp": model.train_mlp,
        "train_unembed": model.train_unembed,
        "optimizer": model.optimizer,
        **({} if model.seed is None else {"seed": model.seed}),
        **{f"metadata.{name}": value for name, value in model.user_metadata.items()},
    }
    return TrackedRun(run_id, session.project, journal.models.label(run_id) or run_id, session.tags, config)
