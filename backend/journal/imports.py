"""Rows of checkpoints that no client saved here: copies, imports, and checkpoints found only in the store.

Their runs and sessions are over from the start: nobody trains or samples in them, they only hold checkpoints. Quotas
are checked before files are copied or uploaded, and not again when their rows are made.
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
    """Checkpoints that come in otherwise than by a save."""

    def record_copy(
        self,
        session_id: str,
        saved: CheckpointSaved,
        source_path: str,
        *,
        key_id: str = "",
        project_id: str | None = None,
    ) -> str:
        """Make the rows of a copied checkpoint, in a run and session made for it; its path. Repeating is fine.

        session_id: of that session. saved: what the store has committed, a copy of the checkpoint at source_path.
        key_id, project_id: as in NewSession.
        """
        session = NewSession(saved.owner, "", key_id=key_id, project_id=project_id)
        details = {"source_path": source_path}
        with self._write() as connection:
            event, detail = audit.AuditedEvent.CHECKPOINT_COPIED, f"it holds a copy of {source_path}"
            record(connection, self._now(), session_id, session, saved, event, detail, details)
        return saved.path

    def record_import(self, session_id: str, saved: CheckpointSaved) -> str:
        """Make the rows of an adapter that was made elsewhere, in a run and session made for it; its path.

        session_id: of that session. saved: what the store has committed.
        """
        with self._write() as connection:
            record_import(connection, self._now(), session_id, NewSession(saved.owner, ""), saved)
        return saved.path

    def restore(self, saved: CheckpointSaved, public: bool, run_metadata: Mapping[str, str]) -> bool:
        """Make the rows of what the store holds and the journal does not know, or knows another save of.

        public, run_metadata: what else the store's commit knows of the checkpoint and of its run. Returns whether rows
        were made. A deleted checkpoint's row is known: its files are only waiting to be removed. A run or session that
        is there stays.
        """
        at = saved.created_at or self._now()
        detail = "its row was made again from what the store holds"
        with self._write() as connection:
            of_path = sa.select(col(Checkpoint.attempt)).where(col(Checkpoint.path) == saved.path)
            if connection.execute(of_path).scalar() == saved.attempt:
                return False
            _insert_session(connection, session_of(saved.run_id), NewSession(saved.owner, ""), detail, at)
            _insert_run(connection, saved, run_metadata, detail, at)
            put_checkpoint(connection, saved, at, public=public)
        return True


def record_import(
    connection: sa.Connection, now: datetime, session_id: str, session: NewSession, saved: CheckpointSaved
) -> None:
    """Make the rows of an imported adapter in the caller's transaction.

    connection, now: of that transaction. session_id, session: made for the import. saved: what the store has committed.
    """
    event, detail = audit.AuditedEvent.CHECKPOINT_IMPORTED, "it holds an adapter that was made elsewhere"
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
    """Make the rows of a checkpoint that no client saved, unless its session is there: then they are, too.

    connection, now: of the caller's transaction. session_id, session: of the session that is made for it. saved: what
    the store has committed. event, details: for the audit log. detail: of the run, for people.
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
