"""`reading.py TRACKER FOLDER RUN PROJECT` prints a run's {name: [[step, value]]}, read with the tracker's own library.

Values that are stored twice are listed twice.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

Points = Iterator[tuple[str, int, float]]


def tensorboard(folder: Path, run: str, project: str) -> Points:
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ImportError:  # CI installs only the library that writes
        from tensorboardX.proto.event_pb2 import Event

        from tinkerflow.backend.tracking.trackers.tensorboard import _summaries

        for file in sorted((folder / project / run).glob("*.tfevents.*")):
            for event in _summaries(file):
                assert isinstance(event, Event)
                yield from (
                    (one.tag, event.step, one.simple_value) for one in event.summary.value if not one.HasField("tensor")
                )
        return
    events = EventAccumulator(str(folder / project / run), {SCALARS: 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        yield from ((name, one.step, one.value) for one in events.Scalars(name))


def mlflow(folder: Path, run: str, project: str) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    if (experiment := client.get_experiment_by_name(project)) is None:
        return
    listed = client.search_runs([experiment.experiment_id])
    found = {one.data.tags["tinkerflow.run"].replace(":", "-"): one for one in listed}
    assert len(found) == len(listed), "each run is there once"
    for name in found[run].data.metrics:
        history = client.get_metric_history(found[run].info.run_id, name)
        yield from ((name, one.step, one.value) for one in history)


def trackio(folder: Path, run: str, project: str) -> Points:
    os.environ["TRACKIO_DIR"] = str(folder)
    from trackio.sqlite_storage import SQLiteStorage

    for log in SQLiteStorage.get_logs(project, run):
        step = log.pop("step")
        yield from ((name, step, value) for name, value in log.items() if name != "timestamp")


def wandb(folder: Path, run: str, project: str) -> Points:
    from tinkerflow.backend.tracking.trackers.wandb import _offline_rows  # the library has no reader of these files

    for file in sorted((folder / "wandb").glob(f"offline-run-*-{run}/*.wandb")):
        for row in _offline_rows(file):
            yield from ((name, row["training_step"], value) for name, value in row.items() if name[0] != "_")


if __name__ == "__main__":
    tracker, place, of_run, of_project = sys.argv[1:]
    points: dict[str, list[tuple[int, float]]] = {}
    for name, step, value in globals()[tracker](Path(place) / tracker, of_run, of_project):
        if name != "training_step":
            points.setdefault(name, []).append((step, value))
    print(json.dumps(points))
