"""MLflow: a run in the experiment of its project, at MLFLOW_TRACKING_URI or else in an SQLite file of the folder.

The tag `tinkerflow.run` contains the run's id. A batch of values is one transaction, or one request to a server.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path

from tinkerflow.backend.core.disk import sqlite_url
from tinkerflow.backend.spec.history import digest
from tinkerflow.backend.tracking.tracker import Outcome, StepRow, TrackedRun, Tracker

TAG = "tinkerflow.run"
_AT_ONCE = 1000  # values of one batch: MLflow's limit
_LONGEST = 250  # characters of a name: MLflow's limit
_STATUS = {"finished": "FINISHED", "failed": "FAILED"}


class MlflowRun:
    """A run on the tracking server, or in the database."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        folder.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        self._client = MlflowClient(tracking_uri=uri or sqlite_url(folder / "mlflow.db"))
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        experiment = self._client.get_experiment_by_name(project)
        artifacts = None if uri else (folder / "artifacts").as_uri()
        number = experiment.experiment_id if experiment else self._client.create_experiment(project, artifacts)
        found = self._client.search_runs([number], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if not found:
            tags = {TAG: run.id, "tinkerflow.tags": ", ".join(run.tags)}
            found = [self._client.create_run(number, int(time.time() * 1000), tags, run.name)]
        self._id = found[0].info.run_id
        if found[0].info.status != "RUNNING":
            self._client.update_run(self._id, "RUNNING")
        params = {legal(name): str(value) for name, value in run.config.items()}  # equal legal names: the last counts
        left = [Param(name, value) for name, value in params.items() if name not in found[0].data.params]
        for start in range(0, len(left), 100):
            self._client.log_batch(self._id, params=left[start : start + 100])

    def written(self) -> dict[str, set[int]]:
        names = self._client.get_run(self._id).data.metrics
        return {name: {one.step for one in self._client.get_metric_history(self._id, name)} for name in names}

    def write(self, rows: Sequence[StepRow]) -> None:
        from mlflow.entities import Metric

        left = (
            Metric(name, value, _milliseconds(row.at), row.step) for row in rows for name, value in row.values.items()
        )
        while some := list(islice(left, _AT_ONCE)):
            self._client.log_batch(self._id, some)

    def close(self, outcome: Outcome) -> None:
        if outcome in _STATUS:
            self._client.set_terminated(self._id, _STATUS[outcome])


def _milliseconds(at: datetime) -> int:
    return int(at.timestamp() * 1000)


def legal(name: str) -> str:
    """A name that MLflow accepts: some characters and empty or dotted parts are replaced, and long names are cut."""
    parts = re.sub(r"[^\w.\- /:]", "_", name).split("/")
    short = "/".join(part if part.strip(".") else "_" for part in parts)
    return short if len(short) <= _LONGEST else f"{short[: _LONGEST - 9].rstrip('/')}-{digest(name.encode())[:8]}"


TRACKER = Tracker("mlflow", "mlflow", MlflowRun, legal)
