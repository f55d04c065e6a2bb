"""Rows of checkpoints that no client saved here: copies, and checkpoints found only in the store.

Their runs and sessions are over from the start: nobody trains or samples in them, they only hold checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.ids import session_of
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.database import Aggregate
from tinkerflow.backend.journal.effects import CheckpointSaved, put_checkpoint
from tinkerflow.backend.journal.models import NewModel, insert_model
from tinkerflow.backend.journal.sessions import NewSession, insert_session
from tinkerflow.backend.journal.tables import Checkpoint, ModelState, SessionState


@dataclass(frozen=True)
class CopyMade:
    """`checkpoint`, committed to the store, is a copy of `source_path`, in a run of its own of the session named.

    key_id and project_id: as in NewSession.
    """

    session_id: str
    checkpoint: CheckpointSaved
    source_path: str
    key_id: str = ""
    project_id: str | None = None


@dataclass(frozen=True)
class CheckpointFound:
    """A checkpoint as the store's commit describes it, with what else the commit knows of it and of its run."""

    checkpoint: CheckpointSaved
    public: bool
    run_metadata: Mapping[str, str]


class Imports(Aggregate):
    """Checkpoints that come in otherwise than by a save."""

    def record_copy(self, copy: CopyMade) -> str:
        """Make the rows of a copied checkpoint, in a run and session made for it; its path. Repeating is fine."""
        saved, detail, now = copy.checkpoint, f"it holds a copy of {copy.source_path}", self._now()
        session = NewSession(saved.owner, "", key_id=copy.key_id, project_id=copy.project_id)
        with self._write() as connection:
            if _insert(connection, copy.session_id, session, detail, now):
                _insert_run(connection, copy.session_id, saved, {}, detail, now)
                put_checkpoint(connection, saved, now)
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

    def restore(self, found: CheckpointFound) -> bool:
        """Make the rows of what the store holds and the journal does not know, or knows another save of.

        Whether it did. A deleted checkpoint's row is known: its files are only waiting to be removed. A run or session
        that is there stays.
        """
        saved = found.checkpoint
        at = saved.created_at or self._now()
        session_id, detail = session_of(saved.run_id), "its row was made again from what the store holds"
        with self._write() as connection:
            of_path = sa.select(col(Checkpoint.attempt)).where(col(Checkpoint.path) == saved.path)
            if connection.execute(of_path).scalar() == saved.attempt:
                return False
            _insert(connection, session_id, NewSession(saved.owner, ""), detail, at)
            _insert_run(connection, session_id, saved, found.run_metadata, detail, at)
            put_checkpoint(connection, saved, at, public=found.public)
        return True


def _insert(connection: sa.Connection, session_id: str, session: NewSession, detail: str, at: datetime) -> bool:
    over = {"state": SessionState.FINISHED, "detail": detail, "finish_reason": "success", "ended_at": at}
    return insert_session(connection, session_id, session, at, **over)


def _insert_run(
    connection: sa.Connection,
    session_id: str,
    saved: CheckpointSaved,
    user_metadata: Mapping[str, str],
    detail: str,
    at: datetime,
) -> None:
    run = NewModel(
        saved.run_id,
        session_id,
        saved.owner,
        saved.base_model,
        saved.rank,
        train_attn=saved.train_attn,
        train_mlp=saved.train_mlp,
        train_unembed=saved.train_unembed,
        expert_rank=saved.expert_rank,
        optimizer=saved.optimizer,
        user_metadata=user_metadata,
    )
    insert_model(connection, run, ModelState.UNLOADED, detail, at, saved.step)
