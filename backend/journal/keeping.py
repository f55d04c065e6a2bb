"""What becomes of checkpoints after their save: published, kept for a time, copied, deleted.

A checkpoint is deleted row first: from then on nobody can read it. Its files follow (`unpurged`, `purged`), at once or
after a crash, by whoever sweeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from backend.journal import audit
from backend.journal.checkpoints import exists, missing
from backend.journal.effects import checkpoint_row
from backend.journal.kinds import ModelState, SessionState
from backend.journal.records import CopyMade
from backend.journal.statements import insert_if_absent, owned_by
from backend.journal.tables import Checkpoint, Model, Session
from backend.journal.views import CheckpointView, checkpoint_view

_ALL = sa.inspect(Checkpoint).local_table.columns


def delete_checkpoint(connection: sa.Connection, path: str, owner: str | None, now: datetime) -> CheckpointView:
    """Mark an owner's checkpoint as deleted, and return what it was."""
    return _change(connection, path, owner, now, audit.Event.CHECKPOINT_DELETED, {"deleted_at": now})


def publish(connection: sa.Connection, path: str, owner: str | None, public: bool, now: datetime) -> CheckpointView:
    """Let all keys read an owner's checkpoint, or its owner's alone again; repeating changes nothing."""
    event = audit.Event.CHECKPOINT_PUBLISHED if public else audit.Event.CHECKPOINT_UNPUBLISHED
    return _change(connection, path, owner, now, event, {"public": public})


def set_expiry(
    connection: sa.Connection, path: str, owner: str | None, expires_at: datetime | None, now: datetime
) -> CheckpointView:
    """Let an owner's checkpoint expire then, None: never."""
    when = None if expires_at is None else expires_at.isoformat()
    details = {"expires_at": when}
    event = audit.Event.CHECKPOINT_TTL_SET
    return _change(connection, path, owner, now, event, {"expires_at": expires_at}, details)


def delete_expired(connection: sa.Connection, now: datetime, limit: int) -> list[str]:
    """Mark at most `limit` checkpoints past their time as deleted, the longest expired first; their paths."""
    due = col(Checkpoint.expires_at)
    is_due = (col(Checkpoint.deleted_at).is_(None), due <= now)
    chosen = sa.select(col(Checkpoint.path)).where(*is_due).order_by(due, col(Checkpoint.path)).limit(limit)
    # Asked for again, because an owner may have cleared the time since the look.
    statement = sa.update(Checkpoint).where(col(Checkpoint.path).in_(chosen), *is_due).values(deleted_at=now)
    rows = connection.execute(statement.returning(*_ALL)).all()
    for row in rows:
        _note(connection, row, audit.Event.CHECKPOINT_EXPIRED, now)
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


def record_copy(connection: sa.Connection, copy: CopyMade, now: datetime) -> str:
    """Make the rows of a copied checkpoint, its run and that run's session; its path. Repeating changes nothing.

    Run and session are over from the start: nobody trains or samples in them, they only hold the copy.
    """
    saved, detail = copy.checkpoint, f"it holds a copy of {copy.source_path}"
    session: dict[str, object] = {
        "id": copy.session_id,
        "owner": saved.owner,
        "key_id": copy.key_id,
        "project_id": copy.project_id,
        "tags": [],
        "user_metadata": {},
        "sdk_version": "",
        "state": SessionState.FINISHED,
        "detail": detail,
        "finish_reason": "success",
        "created_at": now,
        "last_seen_at": now,
        "ended_at": now,
    }
    if not insert_if_absent(connection, Session, session):
        return saved.path
    model: dict[str, object] = {
        "id": saved.run_id,
        "session_id": copy.session_id,
        "owner": saved.owner,
        "base_model": saved.base_model,
        "rank": saved.rank,
        "train_attn": saved.train_attn,
        "train_mlp": saved.train_mlp,
        "train_unembed": saved.train_unembed,
        "optimizer": saved.optimizer,
        "user_metadata": {},
        "state": ModelState.UNLOADED,
        "detail": detail,
        "next_seq": 0,
        "step": saved.step,
        "created_at": now,
        "last_request_at": now,
    }
    insert_if_absent(connection, Model, model)
    checkpoint_row(connection, saved, now)
    audit.note(
        connection,
        now,
        owner=saved.owner,
        event=audit.Event.CHECKPOINT_COPIED,
        model_id=saved.run_id,
        tinker_path=saved.path,
        details={"source_path": copy.source_path, "size_bytes": saved.size_bytes},
    )
    return saved.path


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
