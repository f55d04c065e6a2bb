"""The audit log: actions on a project's keys, sessions, checkpoints, images and samples, with their actors.

The event of a change is written in the transaction of the change. Entries are read by day.
"""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.ids import LOCAL_OWNER
from tinkerflow.backend.journal.database import Aggregate, as_view, fetch_page, owned_by
from tinkerflow.backend.journal.tables import ApiKey, AuditEvent

MOST_ENTRIES = 10_000  # in one answer
SERVICE = "service"  # the actor of the service's own actions, such as the expiry of a checkpoint
_REFUSALS_PER_HOUR = 1_000  # entries for refused keys; further attempts are not recorded


class AuditedEvent(StrEnum):
    """`{resource}_{action}`. `GET audit?event_type=` filters by resource. Keys belong to the resource `project`."""

    PROJECT_KEY_CREATED = "project_key_created"
    PROJECT_KEY_REVOKED = "project_key_revoked"
    PROJECT_KEY_REFUSED = "project_key_refused"
    PROJECT_LIMITS_SET = "project_limits_set"
    PROJECT_SIGNED_IN = "project_signed_in"
    PROJECT_SIGNED_OUT = "project_signed_out"
    PROJECT_SAMPLE_READ = "project_sample_read"
    PROJECT_SESSION_ASSIGNED = "project_session_assigned"
    TRAINING_RUN_DELETED = "training_run_deleted"
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
    """An entry of the audit log.

    owner: the project that the log belongs to; "" for refused keys that belong to no project. actor: see `write_event`.
    details: JSON values, which repeat the actor, model_id, tinker_path and purpose.
    """

    at: datetime
    owner: str
    event: str
    actor: str
    model_id: str | None
    tinker_path: str | None
    purpose: str | None
    details: Mapping[str, object]


def actor_of_key(key_id: str) -> str:
    """The actor of a request: its key, or LOCAL_OWNER on a server that needs no keys."""
    return key_id or LOCAL_OWNER


def command_line_actor() -> str:
    """The actor of a command: the operating-system user who runs it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = "unknown"
    return f"command line: {user}"


def write_event(
    connection: sa.Connection,
    now: datetime,
    *,
    owner: str,
    event: AuditedEvent,
    actor: str,
    model_id: str | None = None,
    tinker_path: str | None = None,
    purpose: str | None = None,
    details: Mapping[str, object] | None = None,
) -> None:
    """Write an event in the caller's transaction, so that the entry is stored if and only if the change is stored.

    connection: the caller's transaction. now: the time of the event. owner: the project that the log belongs to. actor:
    the id of an API key, LOCAL_OWNER, SERVICE, or `command_line_actor()`. details: JSON values.
    The details repeat the actor, model_id, tinker_path and purpose, because clients read them there.
    """
    named = {"model_id": model_id, "tinker_path": tinker_path, "purpose": purpose}
    repeated = {name: value for name, value in named.items() if value is not None}
    row = {"owner": owner, "at": now, "event": event, "actor": actor, **named}
    all_details = {**repeated, **(details or {}), "actor": actor}
    connection.execute(sa.insert(AuditEvent).values(**row, details=all_details))


def write_checkpoint_event(
    connection: sa.Connection,
    now: datetime,
    event: AuditedEvent,
    checkpoint: Any,
    *,
    actor: str,
    details: Mapping[str, object] | None = None,
    purpose: str | None = None,
) -> None:
    """Write an event of a checkpoint into its owner's log, in the caller's transaction.

    checkpoint: its row, or a view or effect with the same fields. For the other arguments see `write_event`.
    """
    write_event(
        connection,
        now,
        owner=checkpoint.owner,
        event=event,
        actor=actor,
        model_id=checkpoint.run_id,
        tinker_path=checkpoint.path,
        purpose=purpose,
        details=details,
    )


class Audit(Aggregate):
    def record(
        self, event: AuditedEvent, *, owner: str, actor: str, model_id: str | None = None, details: Mapping[str, object]
    ) -> None:
        """Write an event that changes no other row, such as a sign-in. For the arguments see `write_event`."""
        with self._write() as connection:
            write_event(
                connection, self._now(), owner=owner, event=event, actor=actor, model_id=model_id, details=details
            )

    def record_refused_key(self, key_hash: str, address: str) -> None:
        """Record that a request from `address` was refused because of its key.

        key_hash: see keys.hash_key. The entry of a revoked key is in its project's log, and names the key. The entry of
        an unknown key belongs to no project, so only admins read it. After _REFUSALS_PER_HOUR entries in one hour,
        nothing more is written, because strangers must not fill the database.
        """
        refused = (col(AuditEvent.event) == AuditedEvent.PROJECT_KEY_REFUSED, col(AuditEvent.at) > self._ago(3600))
        recent = sa.select(sa.literal(1)).where(*refused).limit(_REFUSALS_PER_HOUR).subquery()
        revoked = sa.select(ApiKey).where(col(ApiKey.key_hash) == key_hash)
        with self._read() as connection:
            full = connection.execute(sa.select(sa.func.count()).select_from(recent)).scalar_one() >= _REFUSALS_PER_HOUR
            key = connection.execute(revoked).one_or_none()
        if full:
            return
        owner, actor = ("", "unknown key") if key is None else (key.project, key.id)
        known = {} if key is None else {"key_id": key.id, "name": key.name, "prefix": key.prefix}
        self.record(AuditedEvent.PROJECT_KEY_REFUSED, owner=owner, actor=actor, details={**known, "address": address})

    def entries(self, owner: str | None, *, resource: str | None = None, day: date | None = None) -> list[AuditView]:
        """The entries of a UTC day (default: today), oldest first; only the latest MOST_ENTRIES, or PAGE_BYTES of them.

        owner: the project of the log; None: all. resource: the first word of the events; None: any.
        """
        start = datetime.combine(day or self._now().date(), time(), UTC)
        at = col(AuditEvent.at)
        where = [at >= start, *owned_by(AuditEvent, owner)]
        if start.date() < date.max:  # there is no day after the last day of the calendar
            where.append(at < start + timedelta(days=1))
        if resource is not None:
            where.append(col(AuditEvent.event).startswith(f"{resource}_", autoescape=True))
        latest = (at.desc(), col(AuditEvent.id).desc())
        with self._read() as connection:
            rows, _ = fetch_page(connection, sa.select(AuditEvent).where(*where).order_by(*latest).limit(MOST_ENTRIES))
        return [as_view(AuditView, row) for row in reversed(rows)]
