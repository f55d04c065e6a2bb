"""Mirrors a run to one tracker. Only values that the tracker lacks are written, so each value is written once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.tracking.tracker import Outcome, StepRow, TrackedRun, Tracker


class TrackerError(ServerError):
    """A tracker, or its library, failed."""


class TrackerMirror:
    """Writes a run to a tracker. Every method may block, and raises TrackerError if the tracker fails.

    After an error, open another mirror, which reads the values that the tracker has stored. Two mirrors must not write
    the same run at the same time.
    """

    def __init__(self, tracker: Tracker, run: TrackedRun, folder: Path) -> None:
        """Open the run. folder: shared by all trackers; a tracker's local data is in its subfolder."""
        self._tracker = tracker
        with self._fails():
            self._writer = tracker.open(run, folder / tracker.name)
            self._written = self._writer.written()

    def write(self, rows: Sequence[StepRow]) -> None:
        """Write the values that the tracker lacks. Values that are not finite are left out."""
        missing = [replace(row, values=values) for row in rows if (values := self._missing(row))]
        if missing:
            with self._fails():
                self._writer.write(missing)

    def close(self, outcome: Outcome) -> None:
        """Close the run. Returns when the tracker has stored all values."""
        with self._fails():
            self._writer.close(outcome)

    def _missing(self, row: StepRow) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, value in row.values.items():
            known = self._written.setdefault(legal := self._tracker.legal(name), set())
            if row.step not in known and math.isfinite(value):
                known.add(row.step)
                values[legal] = value
        return values

    @contextmanager
    def _fails(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            name = type(error).__name__
            raise TrackerError(f"tracker {self._tracker.name} fails: {name}: {' '.join(str(error).split())}") from error
