"""Events of training runs for people: pauses, restores, saves, alarms and ends. A run keeps the newest MOST_EVENTS."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import Field, col

from tinkerflow.backend.journal.database import Aggregate, CutText, Table, Text, UtcDateTime, as_view

MOST_EVENTS = 100  # of one run


class RunEventRow(Table, table=True):
    """An event of a run. level: as in `logging`. id: increases with every event, and is never reused."""

    __tablename__ = "run_event"
    __table_args__ = (sa.Index("ix_run_event_model_id_id", "model_id", "id"), {"sqlite_autoincrement": True})

    id: int | None = Field(default=None, primary_key=True, sa_type=sa.BigInteger().with_variant(sa.Integer(), "sqlite"))
    model_id: str = Field(foreign_key="model.id", sa_type=Text())
    at: datetime = Field(sa_type=UtcDateTime)
    level: int
    text: str = Field(sa_type=CutText())


_ID, _RUN = col(RunEventRow.id), col(RunEventRow.model_id) == sa.bindparam("run_id")
_NEWEST = sa.select(RunEventRow).where(_RUN).order_by(_ID.desc()).limit(MOST_EVENTS)
_TOO_OLD = sa.select(_ID).where(_RUN).order_by(_ID.desc()).offset(MOST_EVENTS).limit(1).scalar_subquery()
_TRIM = sa.delete(RunEventRow).where(_RUN, _ID <= _TOO_OLD)
_LAST = sa.select(sa.func.max(_ID)).where(_RUN)


@dataclass(frozen=True)
class RunEvent:
    """An event of a run. at: when it happened. level: logging.INFO, WARNING or ERROR. text: for people."""

    at: datetime
    level: int
    text: str


class RunEvents(Aggregate):
    def add(self, run_id: str, events: Sequence[RunEvent]) -> None:
        """Store events of a run, oldest first, and delete all but the newest MOST_EVENTS."""
        with self._write() as connection:
            put_events(connection, run_id, events)

    def newest(self, run_id: str) -> list[RunEvent]:
        """The events of a run, newest first. One statement."""
        with self._read() as connection:
            return [as_view(RunEvent, row) for row in connection.execute(_NEWEST, {"run_id": run_id})]

    def last(self, run_id: str) -> int:
        """The id of a run's newest event; 0 if there is none. One statement."""
        with self._read() as connection:
            return connection.execute(_LAST, {"run_id": run_id}).scalar_one() or 0


def put_events(connection: sa.Connection, run_id: str, events: Sequence[RunEvent]) -> None:
    """Store events in the caller's transaction; see `RunEvents.add`."""
    rows = [{"model_id": run_id, "at": one.at, "level": one.level, "text": one.text} for one in events]
    connection.execute(sa.insert(RunEventRow), rows)
    connection.execute(_TRIM, {"run_id": run_id})


def put_event(connection: sa.Connection, run_id: str, now: datetime, text: str, level: int = logging.INFO) -> None:
    """Store an event with the time `now`, in the caller's transaction."""
    put_events(connection, run_id, [RunEvent(now, level, text)])
