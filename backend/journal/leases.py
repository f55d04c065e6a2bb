"""Which engine works on this database, and since when the API answers without a pause.

An engine holds the lease by its epoch: it is raised with every new holder, and whoever has an older one is refused when
it answers requests (`check`, in the same transaction), whatever it still believes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.errors import FencedError
from tinkerflow.backend.journal.recovery_tables import Process
from tinkerflow.backend.journal.statements import insert_if_absent

ENGINE, API = "engine", "api"
LEASE_SECONDS = 15.0  # without a beat, the lease is free
PAUSE_SECONDS = 15.0  # without a beat, the API was away

_HELD = sa.select(col(Process.epoch)).where(col(Process.name) == ENGINE).with_for_update(read=True)


@dataclass(frozen=True)
class Held:
    """A lease that somebody else holds, and when it was renewed last."""

    holder: str
    beat_at: datetime


def acquire(connection: sa.Connection, holder: str, now: datetime, *, force: bool) -> int | Held:
    """Take the engine's lease when it is free, run out, or by force (its holder is known to be dead): the epoch."""
    empty = {"name": ENGINE, "holder": "", "epoch": 0, "began_at": now, "beat_at": now}
    insert_if_absent(connection, Process, empty)
    row = connection.execute(sa.select(Process).where(col(Process.name) == ENGINE).with_for_update()).one()
    if row.holder and not force and row.beat_at > now - timedelta(seconds=LEASE_SECONDS):
        return Held(row.holder, row.beat_at)
    values = {"holder": holder, "epoch": row.epoch + 1, "began_at": now, "beat_at": now}
    connection.execute(sa.update(Process).where(col(Process.name) == ENGINE).values(**values))
    return int(row.epoch) + 1


def renew(connection: sa.Connection, epoch: int, now: datetime) -> None:
    """Keep the lease; FencedError when another engine has it."""
    check(connection, epoch)
    connection.execute(sa.update(Process).where(col(Process.name) == ENGINE).values(beat_at=now))


def release(connection: sa.Connection, epoch: int) -> None:
    """Give the lease back, if it is still ours."""
    mine = (col(Process.name) == ENGINE, col(Process.epoch) == epoch)
    connection.execute(sa.update(Process).where(*mine).values(holder=""))


def check(connection: sa.Connection, epoch: int) -> None:
    """FencedError unless the lease is still that of `epoch`. Until the transaction ends nobody can take it."""
    if connection.execute(_HELD).scalar() != epoch:
        raise FencedError(f"another engine works on this journal: our epoch {epoch} is over, and we may change nothing")


def beat(connection: sa.Connection, now: datetime) -> None:
    """The API answers; a pause since its last beat makes it begin anew."""
    if insert_if_absent(connection, Process, {"name": API, "holder": "", "epoch": 0, "began_at": now, "beat_at": now}):
        return
    paused = col(Process.beat_at) < now - timedelta(seconds=PAUSE_SECONDS)
    began = sa.case((paused, now), else_=col(Process.began_at))
    connection.execute(sa.update(Process).where(col(Process.name) == API).values(began_at=began, beat_at=now))


def answering_since(connection: sa.Connection, now: datetime) -> datetime | None:
    """Since when clients can reach the API; None when it never said so, `now` when it is away at this moment."""
    row = connection.execute(sa.select(Process).where(col(Process.name) == API)).one_or_none()
    if row is None:
        return None
    away = row.beat_at < now - timedelta(seconds=PAUSE_SECONDS)
    return now if away else row.began_at
