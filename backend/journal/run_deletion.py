"""Deletion of training runs that have ended.

A deleted run's row is kept without its texts, so no other run gets its id, and `database.get_owned` no longer finds it.
The deleting transaction drops the bytes of the run's requests and samples, removes its figures, metrics and events,
ends its history and marks its checkpoints as deleted. Most figures and metrics are removed before, in transactions of
_ROWS_AT_ONCE, because a long run has millions of them, and others wait for the write lock. The engine's sweeps remove
the files of checkpoints, snapshots and histories afterwards, even after a crash in between. Usage and the audit log are
kept.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapped
from sqlmodel import col

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.checkpoints import exists, mark_deleted
from tinkerflow.backend.journal.database import Aggregate, RowLock, Table, get_owned, in_id_order, insert_if_absent
from tinkerflow.backend.journal.history import HistorySegment
from tinkerflow.backend.journal.quotas import lock_project, uncount_kept
from tinkerflow.backend.journal.results import EXPIRED, dropped_values
from tinkerflow.backend.journal.run_events import RunEventRow
from tinkerflow.backend.journal.run_metrics import RunMetricValue, delete_metrics
from tinkerflow.backend.journal.samples import is_named_save, is_unnamed_save
from tinkerflow.backend.journal.tables import (
    TAKES_WORK,
    Checkpoint,
    Model,
    Request,
    SamplerRow,
    Session,
    SessionState,
    TrainingStep,
)
from tinkerflow.backend.journal.training_runs import kept_texts
from tinkerflow.backend.spec.history import Segment
from tinkerflow.backend.spec.run_metadata import OUTCOME, REASON

_ROWS_AT_ONCE = 10_000


def _part_of(table: type[Table], *key: Mapped[Any]) -> sa.Delete:
    """The statement that deletes `at_most` rows of the run `run_id`. key: the primary key after the run's id."""
    of_run = Table.metadata.tables[str(table.__tablename__)].c.model_id == sa.bindparam("run_id")
    some = sa.select(*key).where(of_run).limit(sa.bindparam("at_most"))
    return sa.delete(table).where(of_run, sa.tuple_(*key).in_(some))


_PARTS = (
    _part_of(TrainingStep, col(TrainingStep.seq_id)),
    _part_of(RunMetricValue, col(RunMetricValue.name), col(RunMetricValue.step)),
)


@dataclass(frozen=True)
class RunContents:
    """The contents lost with a run. paths: its checkpoints. size_bytes: their total. public: how many are published."""

    id: str
    paths: tuple[str, ...]
    size_bytes: int
    public: int


class RunDeletions(Aggregate):
    """Deletes training runs."""

    def contents(self, run_ids: Collection[str], owner: str) -> list[RunContents]:
        """The contents of the project's runs, if all runs may be deleted. Three statements for each run.

        NotFoundError: unknown or foreign run. UserError: a run or its session has not ended.
        """
        with self._read() as connection:
            return [self._contents(connection, run_id, owner) for run_id in run_ids]

    def delete(self, run_ids: Collection[str], owner: str, key_id: str = "") -> None:
        """Delete the project's runs, each in its own transaction. Errors as in `contents`.

        key_id: the deleting key, for the audit log.
        """
        for run_id in run_ids:
            for part in _PARTS:
                while self._delete_part(run_id, owner, part) == _ROWS_AT_ONCE:
                    continue
            with self._write() as connection:
                lock_project(connection, owner)
                run = _ended_run(connection, run_id, owner, lock="change")
                _delete(connection, run, audit.actor_of_key(key_id), self._now())

    def _delete_part(self, run_id: str, owner: str, part: sa.Delete) -> int:
        """Delete rows of an ended run with a statement of _PARTS. Returns their number."""
        with self._write() as connection:
            lock_project(connection, owner)
            _ended_run(connection, run_id, owner, lock="change")
            return connection.execute(part, {"run_id": run_id, "at_most": _ROWS_AT_ONCE}).rowcount

    def _contents(self, connection: sa.Connection, run_id: str, owner: str) -> RunContents:
        _ended_run(connection, run_id, owner)
        saved = sa.select(Checkpoint).where(col(Checkpoint.run_id) == run_id, exists(self._now()))
        rows = connection.execute(saved.order_by(col(Checkpoint.path))).all()
        paths, sizes = tuple(row.path for row in rows), (row.size_bytes for row in rows)
        return RunContents(run_id, paths, sum(sizes), sum(row.public for row in rows))


def _ended_run(connection: sa.Connection, run_id: str, owner: str, lock: RowLock | None = None) -> sa.Row[Any]:
    """The row of a run that may be deleted; errors as in `RunDeletions.contents`. lock: as in `get_owned`."""
    run = get_owned(connection, Model, run_id, owner, lock=lock)
    if run.state in TAKES_WORK:
        raise UserError(f"run {run_id} is {run.state}: only runs that have ended can be deleted")
    if get_owned(connection, Session, run.session_id, None).state == SessionState.ACTIVE:
        raise UserError(f"run {run_id}: its session {run.session_id} is still active: it must end first")
    return run


def _delete(connection: sa.Connection, run: sa.Row[Any], actor: str, now: datetime) -> None:
    is_left = (col(Checkpoint.run_id) == run.id, col(Checkpoint.deleted_at).is_(None))
    event = audit.AuditedEvent.CHECKPOINT_DELETED
    lost = mark_deleted(connection, is_left, now, event, actor=actor)
    _drop_bytes(connection, run, now)
    delete_metrics(connection, run.id, run.owner)
    counted = {key: text for key, text in run.user_metadata.items() if key not in (OUTCOME, REASON)}
    uncount_kept(connection, run.owner, "training_runs", 1, kept_texts(run.base_model, counted))
    for table in (TrainingStep, RunEventRow):
        connection.execute(sa.delete(table).where(col(table.model_id) == run.id))
    if run.history:  # the sweep lists it even without a segment: examined rows may be in its folder
        empty = Segment(name="", first=-1, last=-1, size_bytes=0)
        insert_if_absent(connection, HistorySegment, {"model_id": run.id, **asdict(empty)})
    emptied = sa.update(Model).where(col(Model.id) == run.id)
    connection.execute(emptied.values(user_metadata={}, detail=None, history=False, deleted_at=now))
    event = audit.AuditedEvent.TRAINING_RUN_DELETED
    details = {"checkpoints": len(lost), "size_bytes": sum(row.size_bytes for row in lost)}
    audit.write_event(connection, now, owner=run.owner, event=event, actor=actor, model_id=run.id, details=details)


def _drop_bytes(connection: sa.Connection, run: sa.Row[Any], now: datetime) -> None:
    """Drop the payloads and results of a run's requests, and of samples of its weights in its own session."""
    of_weights = sa.or_(is_unnamed_save(run.id), is_named_save(run.id))
    samplers = sa.select(col(SamplerRow.id)).where(col(SamplerRow.session_id) == run.session_id, of_weights)
    none = {"payload": b"", "replays": False, "archives": False, "dropped_at": now}
    values = dropped_values(f"{EXPIRED}: its run was deleted", **none)
    has_bytes = sa.or_(sa.func.length(col(Request.payload)) > 0, col(Request.result).is_not(None))
    for which in (col(Request.sampler_id).in_(samplers), col(Request.model_id) == run.id):
        connection.execute(sa.update(Request).where(in_id_order(Request, which, has_bytes)).values(**values))
