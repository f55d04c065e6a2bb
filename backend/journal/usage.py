"""Usage: tokens and checkpoints in hourly buckets by session and base model, and stored bytes.

Tokens are counted in the transaction that answers their request (results.py). Each answer is therefore counted exactly
once, and discarded work is not counted. Stored bytes are computed from the times at which checkpoints were saved and
deleted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal.checkpoints import exists
from tinkerflow.backend.journal.database import Aggregate, as_view, owned_by, size_of
from tinkerflow.backend.journal.quotas import ROW_BYTES
from tinkerflow.backend.journal.sessions import PROJECT
from tinkerflow.backend.journal.tables import ApiKey, Checkpoint, Model, Session, UsageBucket, UsageKind

HOUR = timedelta(hours=1)
MOST_BYTES = 2**26  # in the rows of one report: their texts, and ROW_BYTES for each row

_KEY_NAME: sa.ColumnElement[str | None] = col(ApiKey.name).label("key_name")
# A checkpoint's project is the label of its run's session, or the checkpoint's owner if there is none.
_STORED_PROJECT = sa.func.coalesce(col(Session.project_id), col(Checkpoint.owner))
# A literal, because Postgres takes two parameters in SELECT and GROUP BY for two different expressions.
_KEY_ID: sa.ColumnElement[str] = sa.func.coalesce(col(Session.key_id), sa.literal_column("''"))


@dataclass(frozen=True)
class Usage:
    """The usage of one kind by a session on a base model, in the hour that starts at bucket_start.

    project: the session's current project. key_id, key_name: the session's key; "" and None without keys.
    """

    bucket_start: datetime
    session_id: str
    base_model: str
    kind: UsageKind
    quantity: int
    project: str
    key_id: str
    key_name: str | None
    user_metadata: Mapping[str, object]


@dataclass(frozen=True)
class TotalUsage:
    """The usage of one kind by all sessions of a project, in the hour that starts at bucket_start.

    owner: the tenant. project: the label of the sessions, or the owner if they have none.
    """

    bucket_start: datetime
    owner: str
    project: str
    kind: UsageKind
    quantity: int


@dataclass(frozen=True)
class StoredUsage:
    """The byte-hours of a base model's checkpoints in the hour that starts at bucket_start."""

    bucket_start: datetime
    base_model: str
    project: str
    key_id: str
    key_name: str | None
    byte_hours: float


@dataclass(frozen=True)
class StoredNow:
    """The number and total bytes of a project's and key's checkpoints."""

    project: str
    key_id: str
    key_name: str | None
    checkpoints: int
    size_bytes: int


class UsageReports(Aggregate):
    def hourly(self, owner: str | None, start: datetime, end: datetime) -> list[Usage]:
        """Tokens and saved checkpoints in the hours that begin in [start, end), by hour, then largest first.

        One statement. UserError: the rows exceed MOST_BYTES. A report must be complete.
        """
        bucket = col(UsageBucket.bucket_start)
        statement = (
            sa.select(UsageBucket, PROJECT.label("project"), col(Session.key_id), col(Session.user_metadata), _KEY_NAME)
            .join(Session, col(Session.id) == col(UsageBucket.session_id))
            .outerjoin(ApiKey, col(ApiKey.id) == col(Session.key_id))
            .where(bucket >= start, bucket < end, *owned_by(Session, owner))
            .order_by(bucket, col(UsageBucket.quantity).desc(), col(UsageBucket.session_id), col(UsageBucket.kind))
        )
        usage: list[Usage] = []
        size = 0
        with self._read() as connection, connection.execute(statement, execution_options={"yield_per": 1000}) as rows:
            for row in rows:
                size = _counted(size + ROW_BYTES + size_of(row), start, end)
                usage.append(as_view(Usage, row))
        return usage

    def totals(self, owner: str | None, start: datetime, end: datetime) -> list[TotalUsage]:
        """The usage of projects in the hours that begin in [start, end), by hour. One statement."""
        bucket, kind = col(UsageBucket.bucket_start), col(UsageBucket.kind)
        quantity = sa.cast(sa.func.sum(col(UsageBucket.quantity)), sa.BigInteger).label("quantity")
        statement = (
            sa.select(bucket, col(Session.owner), PROJECT.label("project"), kind, quantity)
            .join(Session, col(Session.id) == col(UsageBucket.session_id))
            .where(bucket >= start, bucket < end, *owned_by(Session, owner))
            .group_by(bucket, col(Session.owner), PROJECT, kind)
            .order_by(bucket, col(Session.owner), PROJECT, kind)
        )
        return self._views(TotalUsage, statement)

    def stored(self, owner: str | None, start: datetime, end: datetime) -> list[StoredUsage]:
        """Byte-hours of checkpoints in each whole hour of [start, end), up to now. One statement.

        A checkpoint counts from its save until its deletion or expiry. Another save to its path restarts the time.
        UserError: the report exceeds MOST_BYTES.
        """
        until = min(end, self._now())
        gone = sa.func.coalesce(col(Checkpoint.deleted_at), until)
        due = sa.func.coalesce(col(Checkpoint.expires_at), until)
        columns = (
            col(Checkpoint.base_model),
            col(Checkpoint.size_bytes),
            col(Checkpoint.created_at),
            col(Checkpoint.deleted_at),
            col(Checkpoint.expires_at),
        )
        whose = (_STORED_PROJECT.label("project"), _KEY_ID.label("key_id"), _KEY_NAME)
        lived = _of_checkpoints(sa.select(*columns, *whose), owner).where(
            col(Checkpoint.created_at) < until, gone > start, due > start
        )
        hours = int((end - start) / HOUR)
        sums: dict[tuple[str, str, str, str | None], npt.NDArray[np.float64]] = defaultdict(lambda: np.zeros(hours))
        size = 0
        with self._read() as connection, connection.execute(lived, execution_options={"yield_per": 1000}) as rows:
            for row in rows:
                last = min(moment for moment in (row.deleted_at, row.expires_at, until) if moment is not None)
                begin, finish = (max(row.created_at, start) - start) / HOUR, (last - start) / HOUR
                lived_in = slice(int(begin), math.ceil(finish))
                hour = np.arange(hours, dtype=np.float64)[lived_in]
                parts = np.minimum(finish, hour + 1) - np.maximum(begin, hour)  # the part of each hour
                by_hour = sums[row.base_model, row.project, row.key_id, row.key_name][lived_in]
                size = _counted(size + int((by_hour == 0).sum()) * (ROW_BYTES + size_of(row)), start, end)
                by_hour += parts * row.size_bytes
        found = [
            StoredUsage(start + hour * HOUR, base_model, project, key_id, key_name, byte_hours)
            for (base_model, project, key_id, key_name), by_hour in sums.items()
            for hour, byte_hours in enumerate(by_hour.tolist())
            if byte_hours
        ]
        return sorted(
            found, key=lambda one: (one.bucket_start, -one.byte_hours, one.project, one.key_id, one.base_model)
        )

    def stored_now(self, owner: str | None, project: str | None = None) -> list[StoredNow]:
        """The number and total bytes of checkpoints by project and key. project: None: all projects.

        One statement.
        """
        size = sa.cast(sa.func.sum(col(Checkpoint.size_bytes)), sa.BigInteger)
        whose = (_STORED_PROJECT, _KEY_ID, _KEY_NAME)
        sums = _of_checkpoints(sa.select(*whose, sa.func.count(), size), owner).where(exists(self._now()))
        if project is not None:
            sums = sums.where(_STORED_PROJECT.in_([project]))
        with self._read() as connection:
            rows = connection.execute(sums.group_by(*whose)).all()
        return sorted((StoredNow(*row) for row in rows), key=lambda one: (one.project, one.key_id))


def _counted(size: int, start: datetime, end: datetime) -> int:
    """The size of a report in bytes. UserError: it exceeds MOST_BYTES."""
    if size > MOST_BYTES:
        raise UserError(
            f"the usage from {start.isoformat()} to {end.isoformat()} has more than {MOST_BYTES} bytes: "
            "ask for fewer hours"
        )
    return size


def _of_checkpoints(columns: sa.Select[Any], owner: str | None) -> sa.Select[Any]:
    """Select columns of checkpoints, including deleted ones, and of their sessions and keys."""
    found = (
        columns.select_from(Checkpoint)
        .outerjoin(Model, col(Model.id) == col(Checkpoint.run_id))
        .outerjoin(Session, col(Session.id) == col(Model.session_id))
        .outerjoin(ApiKey, col(ApiKey.id) == col(Session.key_id))
    )
    return found if owner is None else found.where(col(Checkpoint.owner) == owner)
