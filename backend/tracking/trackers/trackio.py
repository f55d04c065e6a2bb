"""trackio: a database for each project in TRACKIO_DIR, or else in the folder. `trackio sync` sends it to a Space.

A trackio run cannot store our id, so its name contains the id.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Sequence
from pathlib import Path

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.tracking.tracker import Outcome, StepRow, TrackedRun, Tracker

_NOT_VALUES = {"step", "timestamp"}
_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioRun:
    """A run in the database of its project."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        if remote := next((name for name in _REMOTE if os.environ.get(name)), None):
            fix = "unset it, and send the local database with `trackio sync`"
            raise UserError(f"{remote} {os.environ[remote]!r}: the values of a remote run cannot be read back; {fix}")
        os.environ.setdefault("TRACKIO_DIR", str(folder))  # read when the library is imported
        import trackio

        self._project = os.environ.get("TRACKIO_PROJECT") or run.project
        self._name = run.slug if run.name == run.id else f"{run.name} {run.slug}"

        def begin() -> trackio.Run:
            return trackio.init(
                self._project,
                self._name,
                config={**run.config, "tags": ", ".join(run.tags)},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

        # In a separate context, because a second `init` in one context ends the first run.
        self._run = contextvars.Context().run(begin)

    def written(self) -> dict[str, set[int]]:
        from trackio.sqlite_storage import SQLiteStorage

        found: dict[str, set[int]] = {}
        for log in SQLiteStorage.get_logs(self._project, self._name):
            for name in log.keys() - _NOT_VALUES:
                found.setdefault(name, set()).add(log["step"])
        return found

    def write(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish()


def legal(name: str) -> str:
    """The name as trackio stores it. Some names are reserved."""
    from trackio.utils import RESERVED_KEYS

    return f"__{name}" if name in RESERVED_KEYS or name.startswith("__") else name


TRACKER = Tracker("trackio", "trackio", TrackioRun, legal)
