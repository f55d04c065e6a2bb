"""Rows of checkpoints that no client saved here: copies, imports, and checkpoints found only in the store.

Their runs and sessions are created as ended, and contain only checkpoints. Quotas are checked before files are
copied or uploaded, and not again when the rows are inserted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.ids import session_of
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.checkpoints import CheckpointSaved, put_checkpoint
from tinkerflow.backend.journal.database import Aggregate
from tinkerflow.backend.journal.quotas import NO_LIMITS
from tinkerflow.backend.journal.sessions import NewSession, insert_session
from tinkerflow.backend.journal.tables import Checkpoint, ModelState, SessionState
from tinkerflow.backend.journal.training_runs import NewModel, insert_model


class Imports(Aggregate):
    """Inserts the rows of checkpoints that no save of this service created."""

    def record_copy(
        self,
        session_id: str,
        saved: CheckpointSaved,
        source_path: str,
        *,
        key_id: str = "",
        project_id: str | None = None,
    ) -> str:
        """Insert the rows of a copied checkpoint with its own run and session. Returns its path. Repeating is harmless.

        session_id: the id of the new session. saved: the commit in the store. source_path: the original checkpoint.
        key_id, project_id: as in NewSession.
        """
        session = NewSession(saved.owner, "", key_id=key_id, project_id=project_id)
        details = {"source_path": source_path}
        with self._write() as connection:
            event, detail = audit.AuditedEvent.CHECKPOINT_COPIED, f"its checkpoint is a copy of {source_path}"
            record(connection, self._now(), session_id, session, saved, event, detail, details)
        return saved.path

    def record_import(self, session_id: str, saved: CheckpointSaved) -> str:
        """Insert the rows of an imported adapter with its own run and session. Returns its path.

        session_id: the id of the new session. saved: the commit in the store.
        """
        with self._write() as connection:
            record_import(connection, self._now(), session_id, NewSession(saved.owner, ""), saved)
        return saved.path

    def attempt_of(self, path: str) -> str | None:
        """The attempt in the row of a checkpoint, even if it is deleted; None if there is no row."""
        with self._read() as connection:
            return _attempt_of(connection, path)

    def restore(
        self, saved: CheckpointSaved, public: bool, run_metadata: Mapping[str, str], before: str | None
    ) -> bool:
        """Insert the rows of a checkpoint in the store that has no row, or a row that describes another save.

        public, run_metadata: further fields of the store's commit. before: `attempt_of` the path before the commit was
        read. If the row has changed since, it describes a later save. Returns whether rows were inserted. Existing runs
        and sessions are left unchanged. So is the row of a deleted checkpoint, whose files will be removed.
        """
        at = saved.created_at or self._now()
        detail = "its row was restored from the store"
        with self._write() as connection:
            if _attempt_of(connection, saved.path, lock=True) != before or before == saved.attempt:
                return False
            _insert_session(connection, session_of(saved.run_id), NewSession(saved.owner, ""), detail, at)
            _insert_run(connection, saved, run_metadata, detail, at)
            put_checkpoint(connection, saved, at, public=public)
        return True


def _attempt_of(connection: sa.Connection, path: str, *, lock: bool = False) -> str | None:
    of_path = sa.select(col(Checkpoint.attempt)).where(col(Checkpoint.path) == path)
    return connection.execute(of_path.with_for_update() if lock else of_path).scalar()


def record_import(
    connection: sa.Connection, now: datetime, session_id: str, session: NewSession, saved: CheckpointSaved
) -> None:
    """Insert the rows of an imported adapter in the caller's transaction.

    connection, now: the transaction and its time. session_id, session: the import's session. saved: the commit in the
    store.
    """
    event, detail = audit.AuditedEvent.CHECKPOINT_IMPORTED, "its checkpoint is an adapter imported from elsewhere"
    record(connection, now, session_id, session, saved, event, detail, {})


def record(
    connection: sa.Connection,
    now: datetime,
    session_id: str,
    session: NewSession,
    saved: CheckpointSaved,
    event: audit.AuditedEvent,
    detail: str,
    details: Mapping[str, object],
) -> None:
    """Insert the rows of a checkpoint that no client saved. If its session already exists, nothing is inserted.

    connection, now: the caller's transaction and its time. session_id, session: the checkpoint's own session. saved:
    the commit in the store. event, details: for the audit log. detail: the run's detail, for people.
    """
    if _insert_session(connection, session_id, session, detail, now):
        _insert_run(connection, saved, {}, detail, now)
        put_checkpoint(connection, saved, now)
        actor, details = audit.actor_of_key(session.key_id), {**details, "size_bytes": saved.size_bytes}
        audit.write_checkpoint_event(connection, now, event, saved, actor=actor, details=details)


def _insert_session(connection: sa.Connection, session_id: str, session: NewSession, detail: str, at: datetime) -> bool:
    over = {"state": SessionState.FINISHED, "detail": detail, "finish_reason": "success", "ended_at": at}
    return insert_session(connection, session_id, session, at, NO_LIMITS, **over)


def _insert_run(
    connection: sa.Connection, saved: CheckpointSaved, user_metadata: Mapping[str, str], detail: str, at: datetime
) -> None:
    shared = {field.name: getattr(saved, field.name) for field in fields(NewModel) if hasattr(saved, field.name)}
    made = {"id": saved.run_id, "session_id": session_of(saved.run_id), "user_metadata": user_metadata}
    insert_model(connection, NewModel(**shared | made), ModelState.UNLOADED, detail, at, saved.step)
