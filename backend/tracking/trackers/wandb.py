"""Weights & Biases: runs by id, offline in WANDB_DIR or the folder, unless WANDB_MODE sets another mode.

`wandb sync` uploads offline runs. The steps of wandb only increase, but values of an earlier step may arrive later.
Therefore each row is a step of wandb, and the charts' axis is the value `training_step`.

The library's process (wandb-core) writes the files. If our process is killed, wandb-core ends and loses unwritten
values. An offline run is read back from its files, and a run on the server through its API.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from tinkerflow.backend.tracking.tracker import Outcome, StepRow, TrackedRun, Tracker

AXIS = "training_step"
_OFFLINE = ("offline", "dryrun", "disabled")
_QUIET_SECONDS = 2.0  # wandb-core ends 0.3 s after a process that was killed
_BLOCK = 32768  # of a file, in LevelDB's log format
_RECORD = struct.Struct("<IHB")  # checksum, size and kind of a part of a record
_WHOLE, _LAST = 1, 4  # kinds that end a record
_FILE_HEADER = 7


class WandbRun:
    """A run, with the library's process behind it."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        root = Path(os.environ.get("WANDB_DIR") or folder)
        root.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or "offline"
        run_id = run.slug
        project = os.environ.get("WANDB_PROJECT") or re.sub(r"[/\\#?%:]+", "-", run.project)
        if mode in _OFFLINE:
            files = sorted(root.glob(f"wandb/offline-run-*-{run_id}/*.wandb"))
            _wait_until_quiet(files)
            self._written = _steps(row for file in files for row in _offline_rows(file))
        self._run = wandb.init(
            id=run_id,
            project=project,
            name=run.name,
            tags=[tag[:64] for tag in run.tags if tag],
            config=dict(run.config),
            resume="allow",
            reinit="create_new",  # several runs of one process at a time
            mode=mode,
            dir=str(root),
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
            ),
        )
        self._run.define_metric(AXIS, hidden=True)
        self._run.define_metric("*", step_metric=AXIS)
        if mode not in _OFFLINE:
            rows = wandb.Api().run(self._run.path).scan_history() if self._run.resumed else ()
            self._written = _steps(rows)

    def written(self) -> dict[str, set[int]]:
        return self._written

    def write(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._run.log({**row.values, AXIS: row.step, "_timestamp": row.at.timestamp()})

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))


def _steps(rows: Iterable[Mapping[str, Any]]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for row in rows:
        for name, value in row.items():
            if name != AXIS and not name.startswith("_") and value is not None:
                found.setdefault(name, set()).add(int(row[AXIS]))
    return found


def _wait_until_quiet(files: Sequence[Path]) -> None:
    """Wait until no process writes the files of a run."""
    while files and (age := time.time() - max(file.stat().st_mtime for file in files)) < _QUIET_SECONDS:
        time.sleep(_QUIET_SECONDS - max(0.0, age))


def _offline_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows in the file of an offline run, up to an incomplete one at its end."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), _FILE_HEADER, b""
    while at + _RECORD.size <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _RECORD.size:  # the end of a block is empty
            at += left
            continue
        _, size, kind = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if at + size > len(data):
            return
        whole, at = whole + data[at : at + size], at + size
        if kind in (_WHOLE, _LAST):
            items = Record.FromString(whole).history.item
            whole = b""
            if items:
                yield {item.key or item.nested_key[0]: orjson.loads(item.value_json) for item in items}


def legal(name: str) -> str:
    """The name as wandb shows it. Names with a leading underscore, and the axis, are reserved."""
    return f"value{name}" if name.startswith("_") else f"{name}_value" if name == AXIS else name


TRACKER = Tracker("wandb", "wandb", WandbRun, legal)
