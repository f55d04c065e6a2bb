"""The engine's lease on this database, and the API's heartbeats.

An engine holds the lease by its epoch, a number that increases with each new holder. Transactions that answer requests
check the epoch (Database.write, fenced), so an engine with an older epoch cannot answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.database import Aggregate, insert_if_absent
from tinkerflow.backend.journal.tables import Process

ENGINE, API = "engine", "api"
LEASE_SECONDS = 6.0  # without a heartbeat, after which the lease is free
PAUSE_SECONDS = 15.0  # without a heartbeat, after which the API counts as away


@dataclass(frozen=True)
class ProcessView:
    """A part of the service: `engine` or `api`.

    epoch: how many times it was started. began_at: when its lease, or its unbroken series of heartbeats, began.
    """

    name: str
    epoch: int
    began_at: datetime
    beat_at: datetime


class Leases(Aggregate):
    """The engine's lease, and the API's heartbeats."""

    @property
    def epoch(self) -> int | None:
        """The epoch of this process's lease; None if it never took the lease."""
        return self._database.epoch

    def acquire(self, holder: str, *, force: bool = False) -> str | None:
        """Take the engine's lease if it is free or has expired. Returns None, or the name of the current holder.

        force: take it even if it is held, because its holder is dead. If another engine takes the lease afterwards,
        this process's answers are refused (FencedError).
        """
        now = self._now()
        with self._write() as connection:
            empty = {"name": ENGINE, "holder": "", "epoch": 0, "began_at": now, "beat_at": now}
            insert_if_absent(connection, Process, empty)
            row = connection.execute(sa.select(Process).where(col(Process.name) == ENGINE).with_for_update()).one()
            if row.holder and not force and row.beat_at > now - timedelta(seconds=LEASE_SECONDS):
                return str(row.holder)
            values = {"holder": holder, "epoch": row.epoch + 1, "began_at": now, "beat_at": now}
            connection.execute(sa.update(Process).where(col(Process.name) == ENGINE).values(**values))
        self._database.epoch = int(row.epoch) + 1
        return None

    def renew(self) -> None:
        """Renew the lease. FencedError: another engine has taken it."""
        self._check_held()
        with self._write(fenced=True, lasting=False) as connection:
            connection.execute(sa.update(Process).where(col(Process.name) == ENGINE).values(beat_at=self._now()))

    def release(self) -> None:
        """Release the lease if it is still ours."""
        ours = (col(Process.name) == ENGINE, col(Process.epoch) == self._check_held())
        with self._write() as connection:
            connection.execute(sa.update(Process).where(*ours).values(holder=""))

    def beat(self, *, starts: bool = False) -> None:
        """Record a heartbeat of the API. starts: the API has just been started.

        `began_at` is reset after a pause, and if it is in the future because the clock was set back.
        """
        now = self._now()
        row = {"name": API, "holder": "", "epoch": int(starts), "began_at": now, "beat_at": now}
        with self._write(lasting=False) as connection:
            if insert_if_absent(connection, Process, row):
                return
            paused = col(Process.beat_at) < now - timedelta(seconds=PAUSE_SECONDS)
            began = sa.case((sa.or_(paused, col(Process.began_at) > now), now), else_=col(Process.began_at))
            values = {"began_at": began, "beat_at": now, "epoch": col(Process.epoch) + int(starts)}
            connection.execute(sa.update(Process).where(col(Process.name) == API).values(**values))

    def beats(self) -> list[ProcessView]:
        """The last heartbeats of the engine and of the API, if they ever ran. One statement."""
        return self._views(ProcessView, sa.select(Process).order_by(col(Process.name)))

    def has_api(self) -> bool:
        """Whether the API has sent a heartbeat within PAUSE_SECONDS."""
        oldest = self._now() - timedelta(seconds=PAUSE_SECONDS)
        return any(view.name == API and view.beat_at >= oldest for view in self.beats())

    def _check_held(self) -> int:
        if self._database.epoch is None:
            raise ValueError("the engine's lease was never acquired: call acquire first")
        return self._database.epoch


def answering_since(connection: sa.Connection, now: datetime) -> datetime | None:
    """The time since which clients have been able to reach the API without a pause, at the time `now`.

    None if no API ever ran. `now` if the API is away.
    """
    row = connection.execute(sa.select(Process).where(col(Process.name) == API)).one_or_none()
    if row is None:
        return None
    away = row.beat_at < now - timedelta(seconds=PAUSE_SECONDS)
    return now if away else row.began_at
