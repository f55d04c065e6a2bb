"""Tokens that open one checkpoint to whoever has them: of 256 random bits each, only the SHA-256 is kept.

That hash is what the journal's own requests carry, too: no token is ever stored.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.ids import new_id
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.statements import missing
from tinkerflow.backend.journal.tables import Checkpoint, WeightsShare
from tinkerflow.backend.journal.views import CheckpointView, ShareView, share_view

PREFIX = "tfw-"


def access_hash(token: str) -> str:
    """What is known of a token here: the SHA-256 of it, in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


def opens(access: str, now: datetime) -> sa.ColumnElement[bool]:
    """The filter for checkpoints that the token behind the hash `access` opens now."""
    return sa.exists().where(col(WeightsShare.token_hash) == access, opens_any(now))


def opens_any(now: datetime) -> sa.ColumnElement[bool]:
    """The filter for tokens that open the checkpoint of the query around it now."""
    due = col(WeightsShare.expires_at)
    return sa.and_(
        col(WeightsShare.path) == col(Checkpoint.path),
        col(WeightsShare.attempt) == col(Checkpoint.attempt),
        col(WeightsShare.revoked_at).is_(None),
        sa.or_(due.is_(None), due > now),
    )


def share(
    connection: sa.Connection, checkpoint: CheckpointView, expires_at: datetime | None, now: datetime
) -> tuple[ShareView, str]:
    """Make a token for a checkpoint; what is stored of it, and the token, which can never be shown again."""
    token = PREFIX + secrets.token_urlsafe(32)
    row = connection.execute(
        sa.insert(WeightsShare)
        .values(
            id=new_id("share"),
            token_hash=access_hash(token),
            path=checkpoint.path,
            attempt=checkpoint.attempt,
            created_at=now,
            expires_at=expires_at,
        )
        .returning(*sa.inspect(WeightsShare).local_table.columns)
    ).one()
    _note(connection, row, checkpoint.owner, audit.Event.CHECKPOINT_SHARED, now)
    return share_view(row), token


def shares(connection: sa.Connection, path: str | None) -> list[ShareView]:
    """The tokens of one checkpoint or of all, revoked and expired ones too, oldest first."""
    where = [] if path is None else [col(WeightsShare.path) == path]
    oldest = (col(WeightsShare.created_at), col(WeightsShare.id))
    return [share_view(row) for row in connection.execute(sa.select(WeightsShare).where(*where).order_by(*oldest))]


def unshare(connection: sa.Connection, share_id: str, now: datetime) -> ShareView:
    """Make a token useless from now on; a revoked one stays as it is. NotFoundError for an unknown id."""
    revoked = col(WeightsShare.revoked_at)
    owner = sa.select(col(Checkpoint.owner)).where(col(Checkpoint.path) == col(WeightsShare.path)).scalar_subquery()
    before = connection.execute(sa.select(owner).where(col(WeightsShare.id) == share_id, revoked.is_(None))).scalar()
    row = connection.execute(
        sa.update(WeightsShare)
        .where(col(WeightsShare.id) == share_id)
        .values(revoked_at=sa.case((revoked.is_(None), now), else_=revoked))
        .returning(*sa.inspect(WeightsShare).local_table.columns)
    ).one_or_none()
    if row is None:
        raise missing(WeightsShare, share_id)
    if before is not None:
        _note(connection, row, before, audit.Event.CHECKPOINT_UNSHARED, now)
    return share_view(row)


def _note(connection: sa.Connection, row: sa.Row[Any], owner: str, event: audit.Event, now: datetime) -> None:
    due = row.expires_at
    details = {"share_id": row.id, "expires_at": None if due is None else due.isoformat()}
    audit.note(connection, now, owner=owner, event=event, tinker_path=row.path, details=details)
