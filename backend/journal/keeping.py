"""What becomes of checkpoints after their save: published, kept for a time, deleted.

A checkpoint is deleted row first: from then on nobody can read it. Its files follow (`unpurged`, `purged`), at once or
after a crash, by whoever sweeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.checkpoints import exists, missing
from tinkerflow.backend.journal.statements import owned_by
from tinkerflow.backend.journal.tables import Checkpoint
from tinkerflow.backend.journal.views import CheckpointView, checkpoint_view

_ALL = sa.inspect(Checkpoint).local_table.columns


def delete_checkpoint(connection: sa.Connection, path: str, owner: str | None, now: datetime) -> CheckpointView:
    """Mark an owner's checkpoint as deleted, and return what it was."""
    return _change(connection, path, owner, now, audit.Event.CHECKPOINT_DELETED, {"deleted_at": now})


def publish(connection: sa.Connection, path: str, owner: str | None, public: bool, now: datetime) -> CheckpointView:
    """Let all keys read an owner's checkpoint, or its owner's alone again; repeating changes nothing."""
    event = audit.Event.CHECKPOINT_PUBLISHED if public else audit.Event.CHECKPOINT_UNPUBLISHED
    return _change(connection, path, owner, now, event, {"public": public, "noted": False})


def set_expiry(
    connection: sa.Connection, path: str, owner: str | None, expires_at: datetime | None, now: datetime
) -> CheckpointView:
    """Let an owner's checkpoint expire then, None: never."""
    when = None if expires_at is None else expires_at.isoformat()
    details = {"expires_at": when}
    event = audit.Event.CHECKPOINT_TTL_SET
    return _change(connection, path, owner, now, event, {"expires_at": expires_at, "noted": False}, details)


def delete_expired(connection: sa.Connection, now: datetime, limit: int) -> list[str]:
    """Mark at most `limit` checkpoints past their time as deleted, the longest expired first; their paths."""
    due = col(Checkpoint.expires_at)
    is_due = (col(Checkpoint.deleted_at).is_(None), due <= now)
    chosen = sa.select(col(Checkpoint.path)).where(*is_due).order_by(due, col(Checkpoint.path)).limit(limit)
    # Asked for again, because an owner may have cleared the time since the look.
    return delete_these(connection, (col(Checkpoint.path).in_(chosen), *is_due), now)


def delete_these(
    connection: sa.Connection,
    which: Sequence[sa.ColumnElement[bool]],
    now: datetime,
    details: Mapping[str, object] | None = None,
) -> list[str]:
    """Mark `which` checkpoints as deleted, as ones whose time is over; their paths."""
    statement = sa.update(Checkpoint).where(*which).values(deleted_at=now)
    rows = connection.execute(statement.returning(*_ALL)).all()
    for row in rows:
        _note(connection, row, audit.Event.CHECKPOINT_EXPIRED, now, details)
    return [row.path for row in rows]


def unpurged(connection: sa.Connection, limit: int) -> list[tuple[str, str]]:
    """(path, attempt) of deleted checkpoints whose files may still be there, the longest deleted first."""
    deleted = col(Checkpoint.deleted_at)
    statement = sa.select(col(Checkpoint.path), col(Checkpoint.attempt)).where(
        deleted.is_not(None), col(Checkpoint.purged_at).is_(None)
    )
    rows = connection.execute(statement.order_by(deleted, col(Checkpoint.path)).limit(limit))
    return [(row.path, row.attempt) for row in rows]


def purged(connection: sa.Connection, path: str, attempt: str, now: datetime) -> None:
    """Note that a deleted checkpoint's files are gone; one saved anew meanwhile stays as it is."""
    which = (col(Checkpoint.path) == path, col(Checkpoint.attempt) == attempt, col(Checkpoint.deleted_at).is_not(None))
    connection.execute(sa.update(Checkpoint).where(*which).values(purged_at=now))


def is_free(connection: sa.Connection, path: str, now: datetime) -> bool:
    """Whether a checkpoint was at `path` and is there no longer, so that files which remain may be replaced."""
    there = sa.select(exists(now)).where(col(Checkpoint.path) == path)
    return connection.execute(there).scalar() is False


def unnoted(connection: sa.Connection, limit: int) -> list[CheckpointView]:
    """Checkpoints that were published or given a time since their commit was written, and it does not say so yet."""
    # The condition of the partial index, word for word.
    changed = sa.text("deleted_at IS NULL AND NOT noted")
    rows = connection.execute(sa.select(Checkpoint).where(changed).order_by(col(Checkpoint.path)).limit(limit))
    return [checkpoint_view(row) for row in rows]


def noted(connection: sa.Connection, seen: CheckpointView) -> None:
    """The commit says what `seen` says; of a row that was changed again since, it does not."""
    same = (
        col(Checkpoint.path) == seen.path,
        col(Checkpoint.attempt) == seen.attempt,
        col(Checkpoint.public) == seen.public,
        col(Checkpoint.expires_at).is_not_distinct_from(seen.expires_at),
    )
    connection.execute(sa.update(Checkpoint).where(*same).values(noted=True))


def _change(
    connection: sa.Connection,
    path: str,
    owner: str | None,
    now: datetime,
    event: audit.Event,
    values: Mapping[str, object],
    details: Mapping[str, object] | None = None,
) -> CheckpointView:
    """Change an owner's checkpoint; NotFoundError when it is another's, or there is none."""
    which = (col(Checkpoint.path) == path, exists(now), *owned_by(Checkpoint, owner))
    row = connection.execute(sa.update(Checkpoint).where(*which).values(**values).returning(*_ALL)).one_or_none()
    if row is None:
        raise missing(path)
    _note(connection, row, event, now, details)
    return checkpoint_view(row)


def _note(
    connection: sa.Connection,
    row: sa.Row[Any],
    event: audit.Event,
    now: datetime,
    details: Mapping[str, object] | None = None,
) -> None:
    audit.note(
        connection, now, owner=row.owner, event=event, model_id=row.run_id, tinker_path=row.path, details=details
    )
