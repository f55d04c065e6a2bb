"""TensorBoard: a folder of event files for each run, `PROJECT/RUN`. Each writer begins a new file.

A process that is killed may leave a partial event at the end of its file. TensorBoard and `written` ignore it, and the
next writer writes its values again.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tinkerflow.backend.tracking.tracker import Outcome, StepRow, TrackedRun, Tracker

_HEADER = struct.Struct("<QI")  # before each event: its length and a checksum; another checksum follows the event
_CHECKSUM = 4


class _EventFiles:
    def __init__(self, run: TrackedRun, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.summary import text

        self._folder = folder / re.sub(r"[^A-Za-z0-9._ -]+", "-", run.project) / run.slug
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files = sorted(self._folder.glob("*.tfevents.*"))
        # The library's file names contain whole seconds, and it truncates an existing file.
        self._writer = EventsWriter(str(self._folder / "events"), f".{os.getpid()}.{time.time_ns()}")
        if not any(True for file in self._files for _ in _summaries(file)):
            facts = {"name": run.name, "id": run.id, "tags": ", ".join(run.tags), **run.config}
            lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
            self._add(0, time.time(), text("run", "\n".join(lines)))
            self._writer.flush()

    def written(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for file in self._files:
            for event in _summaries(file):
                for value in event.summary.value:
                    found.setdefault(value.tag, set()).add(event.step)
        return found

    def write(self, rows: Sequence[StepRow]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
            self._add(row.step, row.at.timestamp(), Summary(value=values))
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:
        self._writer.close()

    def _add(self, step: int, at: float, summary: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(step=step, wall_time=at, summary=summary))


def _summaries(file: Path) -> Iterator[Any]:
    """The complete events in a file that contain a summary."""
    from tensorboardX.proto.event_pb2 import Event

    data, at = file.read_bytes(), 0
    while at + _HEADER.size <= len(data):
        size, _ = _HEADER.unpack_from(data, at)
        begin = at + _HEADER.size
        at = begin + size + _CHECKSUM
        if at > len(data):
            return
        event = Event.FromString(data[begin : begin + size])
        if event.HasField("summary"):
            yield event


TRACKER = Tracker("tensorboard", "tensorboardX", _EventFiles)
