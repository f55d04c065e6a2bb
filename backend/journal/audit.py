"""Who did what to a project's keys, sessions, checkpoints and images: written in the transaction that does it.

The entries are read by day.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.database import Aggregate, owned_by
from tinkerflow.backend.journal.tables import AuditEvent

MOST = 10_000  # entries of one answer


class Event(StrEnum):
    """`{resource}_{action}`; the resource is what `GET audit?event_type=` chooses by. A key is one of its project's."""

    PROJECT_KEY_CREATED = "project_key_created"
    PROJECT_KEY_REVOKED = "project_key_revoked"
    PROJECT_SESSION_ASSIGNED = "project_session_assigned"
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_DELETED = "checkpoint_deleted"
    CHECKPOINT_EXPIRED = "checkpoint_expired"
    CHECKPOINT_PUBLISHED = "checkpoint_published"
    CHECKPOINT_UNPUBLISHED = "checkpoint_unpublished"
    CHECKPOINT_TTL_SET = "checkpoint_ttl_set"
    CHECKPOINT_COPIED = "checkpoint_copied"
    CHECKPOINT_IMPORTED = "checkpoint_imported"
    CHECKPOINT_SHARED = "checkpoint_shared"
    CHECKPOINT_UNSHARED = "checkpoint_unshared"
    CHECKPOINT_READ = "checkpoint_read"
    FEEDBACK_GIVEN = "feedback_given"
    ASSET_UPLOADED = "asset_uploaded"
    ASSET_DELETED = "asset_deleted"


@dataclass(frozen=True)
class AuditView:
    """An entry of the audit log. event: `{resource}_{action}`; details hold what else is known, and repeat the ids."""

    at: datetime
    owner: str
    event: str
    model_id: str | None
    tinker_path: str | None
    purpose: str | None
    details: Mapping[str, object]


def note(
    connection: sa.Connection,
    now: datetime,
    *,
    owner: str,
    event: Event,
    model_id: str | None = None,
    tinker_path: str | None = None,
    purpose: str | None = None,
    details: Mapping[str, object] | None = None,
) -> None:
    """Write an event into the caller's transaction: it is kept exactly when what it tells of happened.

    connection: of the caller's transaction. now: when it happened. owner: the project whose log it is in.
    model_id, tinker_path and purpose are repeated in the details, which is where clients are told to read them.
    details: JSON values.
    """
    named = {"model_id": model_id, "tinker_path": tinker_path, "purpose": purpose}
    known = {name: value for name, value in named.items() if value is not None}
    values = {"owner": owner, "at": now, "event": event, "details": {**known, **(details or {})}, **named}
    connection.execute(sa.insert(AuditEvent).values(values))


def note_checkpoint(
    connection: sa.Connection,
    now: datetime,
    event: Event,
    of: Any,
    details: Mapping[str, object] | None = None,
    purpose: str | None = None,
) -> None:
    """Write what happened to a checkpoint into its owner's log, in the caller's transaction.

    of: the checkpoint's row, or a view or effect with the same fields. The others are as in `note`: connection, now,
    event, details, purpose.
    """
    told = {"model_id": of.run_id, "tinker_path": of.path, "purpose": purpose, "details": details}
    note(connection, now, owner=of.owner, event=event, **told)


class Audit(Aggregate):
    """The audit log."""

    def entries(self, owner: str | None, *, resource: str | None = None, day: date | None = None) -> list[AuditView]:
        """What was done on a UTC day (default: today), oldest first, the latest MOST at most.

        owner: whose log, None: all. resource: the first word of the events, None: any.
        """
        start = datetime.combine(day or self._now().date(), time(), UTC)
        at = col(AuditEvent.at)
        where = [at >= start, at < start + timedelta(days=1), *owned_by(AuditEvent, owner)]
        if resource is not None:
            where.append(col(AuditEvent.event).startswith(f"{resource}_", autoescape=True))
        latest = (at.desc(), col(AuditEvent.id).desc())
        return self._views(AuditView, sa.select(AuditEvent).where(*where).order_by(*latest).limit(MOST))[::-1]
