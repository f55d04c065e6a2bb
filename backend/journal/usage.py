"""What was used: tokens and checkpoints in hourly buckets by session and base model, and the bytes that are kept.

Tokens are added up in the transaction that answers their request, so that nothing is counted twice, or lost, or counted
for work that was thrown away. Stored bytes are not counted: they follow from when checkpoints were saved and deleted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.kinds import UsageKind
from tinkerflow.backend.journal.records import Used
from tinkerflow.backend.journal.search import PROJECT
from tinkerflow.backend.journal.statements import owned_by
from tinkerflow.backend.journal.tables import ApiKey, Checkpoint, Model, Session, UsageBucket
from tinkerflow.backend.journal.views import StoredNow, StoredUsage, Usage

HOUR = timedelta(hours=1)

_ADD = sa.text(
    "INSERT INTO usage_bucket (session_id, bucket_start, base_model, kind, quantity)"
    " VALUES (:session_id, :bucket_start, :base_model, :kind, :quantity)"
    " ON CONFLICT (session_id, bucket_start, base_model, kind)"
    " DO UPDATE SET quantity = usage_bucket.quantity + excluded.quantity"
).bindparams(sa.bindparam("bucket_start", type_=sa.inspect(UsageBucket).local_table.c.bucket_start.type))
_KEY_NAME: sa.ColumnElement[str | None] = col(ApiKey.name).label("key_name")
# The project of a checkpoint is that of its run's session; one whose run is not here belongs to its owner.
_STORED_PROJECT = sa.func.coalesce(col(Session.project_id), col(Checkpoint.owner))


def add(connection: sa.Connection, used: Sequence[Used], now: datetime) -> None:
    """Add to the current hour's buckets: one upsert for each bucket that is touched."""
    sums: Counter[tuple[str, str, UsageKind]] = Counter()
    for one in used:
        sums[one.session_id, one.base_model, one.kind] += one.quantity
    rows = [
        {"session_id": session, "bucket_start": floor(now), "base_model": base, "kind": kind, "quantity": quantity}
        for (session, base, kind), quantity in sorted(sums.items())  # sorted, so that writers lock in one order
        if quantity
    ]
    if rows:
        connection.execute(_ADD, rows)


def usage(connection: sa.Connection, owner: str | None, start: datetime, end: datetime) -> list[Usage]:
    """The buckets that begin in [start, end), by hour and then the largest first. One statement."""
    bucket = col(UsageBucket.bucket_start)
    statement = (
        sa.select(UsageBucket, PROJECT.label("project"), col(Session.key_id), col(Session.user_metadata), _KEY_NAME)
        .join(Session, col(Session.id) == col(UsageBucket.session_id))
        .outerjoin(ApiKey, col(ApiKey.id) == col(Session.key_id))
        .where(bucket >= start, bucket < end, *owned_by(Session, owner))
        .order_by(bucket, col(UsageBucket.quantity).desc(), col(UsageBucket.session_id), col(UsageBucket.kind))
    )
    return [
        Usage(
            bucket_start=row.bucket_start,
            session_id=row.session_id,
            base_model=row.base_model,
            kind=UsageKind(row.kind),
            quantity=row.quantity,
            project=row.project,
            key_id=row.key_id,
            key_name=row.key_name,
            user_metadata=row.user_metadata,
        )
        for row in connection.execute(statement)
    ]


def stored(
    connection: sa.Connection, owner: str | None, start: datetime, end: datetime, now: datetime
) -> list[StoredUsage]:
    """Byte-hours of checkpoints in each hour of [start, end), which are whole hours, up to now. One statement.

    From saving until deletion or expiry. A checkpoint that was saved again under its name counts from then on only.
    """
    until = min(end, now)
    gone = sa.func.coalesce(col(Checkpoint.deleted_at), until)
    due = sa.func.coalesce(col(Checkpoint.expires_at), until)
    lived = _checkpoints(owner).where(col(Checkpoint.created_at) < until, gone > start, due > start)
    hours = int((end - start) / HOUR)
    lines: dict[tuple[str, str, str, str | None], _Line] = defaultdict(lambda: _Line([0.0] * hours, [0] * (hours + 1)))
    for row in connection.execute(lived):
        last = min(moment for moment in (row.deleted_at, row.expires_at, until) if moment is not None)
        begin = (max(row.created_at, start) - start) / HOUR
        lines[row.base_model, row.project, row.key_id, row.key_name].add(begin, (last - start) / HOUR, row.size_bytes)
    found = [
        StoredUsage(start + hour * HOUR, base_model, project, key_id, key_name, byte_hours)
        for (base_model, project, key_id, key_name), line in lines.items()
        for hour, byte_hours in enumerate(line.byte_hours())
        if byte_hours
    ]
    return sorted(found, key=lambda one: (one.bucket_start, -one.byte_hours, one.project, one.key_id, one.base_model))


def stored_now(connection: sa.Connection, owner: str | None, project: str | None, now: datetime) -> list[StoredNow]:
    """How many checkpoints there are and their bytes, by project and key. One statement."""
    due = col(Checkpoint.expires_at)
    every = _checkpoints(owner).where(col(Checkpoint.deleted_at).is_(None), sa.or_(due.is_(None), due > now))
    sums: dict[tuple[str, str, str | None], tuple[int, int]] = {}
    for row in connection.execute(every):
        if project is None or row.project == project:
            count, size = sums.get((row.project, row.key_id, row.key_name), (0, 0))
            sums[row.project, row.key_id, row.key_name] = count + 1, size + row.size_bytes
    return [StoredNow(*whose, count, size) for whose, (count, size) in sorted(sums.items())]


def floor(moment: datetime) -> datetime:
    """The beginning of its hour, in UTC."""
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


@dataclass
class _Line:
    """Byte-hours of each hour: `parts` of hours, and by its changes what is there for whole hours."""

    parts: list[float]
    changes: list[int]

    def add(self, begin: float, end: float, size: int) -> None:
        """Count `size` bytes from `begin` to `end`, in hours."""
        first, last = int(begin), min(int(end), len(self.parts))
        if first == last:
            self.parts[first] += (end - begin) * size
            return
        self.parts[first] += (first + 1 - begin) * size
        self.changes[first + 1] += size
        self.changes[last] -= size
        if last < len(self.parts):
            self.parts[last] += (end - last) * size

    def byte_hours(self) -> list[float]:
        """The sums, hour by hour."""
        return [part + whole for part, whole in zip(self.parts, accumulate(self.changes), strict=False)]


def _checkpoints(owner: str | None) -> sa.Select[Any]:
    """Checkpoints with the project and the key that they count for."""
    columns = (
        col(Checkpoint.base_model),
        col(Checkpoint.size_bytes),
        col(Checkpoint.created_at),
        col(Checkpoint.deleted_at),
        col(Checkpoint.expires_at),
    )
    key = sa.func.coalesce(col(Session.key_id), "").label("key_id")
    return (
        sa.select(*columns, _STORED_PROJECT.label("project"), key, _KEY_NAME)
        .outerjoin(Model, col(Model.id) == col(Checkpoint.run_id))
        .outerjoin(Session, col(Session.id) == col(Model.session_id))
        .outerjoin(ApiKey, col(ApiKey.id) == col(Session.key_id))
        .where(*owned_by(Checkpoint, owner))
    )
