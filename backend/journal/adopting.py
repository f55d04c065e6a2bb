"""Checkpoints that come into the journal otherwise than by a save: copies, and what only the store knows of.

Their runs and sessions are over from the start: nobody trains or samples in them, they only hold checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.ids import session_of
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.effects import checkpoint_row
from tinkerflow.backend.journal.kinds import ModelState, SessionState
from tinkerflow.backend.journal.records import CheckpointFound, CheckpointSaved, CopyMade
from tinkerflow.backend.journal.statements import insert_if_absent
from tinkerflow.backend.journal.tables import Checkpoint, Model, Session


def record_copy(connection: sa.Connection, copy: CopyMade, now: datetime) -> str:
    """Make the rows of a copied checkpoint, its run and that run's session; its path. Repeating changes nothing."""
    saved, detail = copy.checkpoint, f"it holds a copy of {copy.source_path}"
    more = {"key_id": copy.key_id, "project_id": copy.project_id}
    if not _session(connection, copy.session_id, saved.owner, detail, now, more):
        return saved.path
    _run(connection, copy.session_id, saved, {}, detail, now)
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


def restore(connection: sa.Connection, found: CheckpointFound, now: datetime) -> bool:
    """Make the rows of what the store holds and the journal does not know, or knows another save of; whether it did.

    A deleted checkpoint's row is known: its files are only waiting to be removed. A run or session that is there stays.
    """
    saved = found.checkpoint
    known = connection.execute(sa.select(col(Checkpoint.attempt)).where(col(Checkpoint.path) == saved.path)).scalar()
    if known == saved.attempt:
        return False
    at = saved.created_at or now
    session_id, detail = session_of(saved.run_id), "its row was made again from what the store holds"
    _session(connection, session_id, saved.owner, detail, at, {"key_id": "", "project_id": None})
    _run(connection, session_id, saved, found.run_metadata, detail, at)
    checkpoint_row(connection, saved, at)
    connection.execute(sa.update(Checkpoint).where(col(Checkpoint.path) == saved.path).values(public=found.public))
    return True


def _session(
    connection: sa.Connection, session_id: str, owner: str, detail: str, at: datetime, more: Mapping[str, object]
) -> bool:
    session: dict[str, object] = {
        "id": session_id,
        "owner": owner,
        "tags": [],
        "user_metadata": {},
        "sdk_version": "",
        "state": SessionState.FINISHED,
        "detail": detail,
        "finish_reason": "success",
        "created_at": at,
        "last_seen_at": at,
        "ended_at": at,
        **more,
    }
    return insert_if_absent(connection, Session, session)


def _run(
    connection: sa.Connection,
    session_id: str,
    saved: CheckpointSaved,
    user_metadata: Mapping[str, str],
    detail: str,
    at: datetime,
) -> None:
    model: dict[str, object] = {
        "id": saved.run_id,
        "session_id": session_id,
        "owner": saved.owner,
        "base_model": saved.base_model,
        "rank": saved.rank,
        "train_attn": saved.train_attn,
        "train_mlp": saved.train_mlp,
        "train_unembed": saved.train_unembed,
        "optimizer": saved.optimizer,
        "user_metadata": dict(user_metadata),
        "state": ModelState.UNLOADED,
        "detail": detail,
        "next_seq": 0,
        "step": saved.step,
        "created_at": at,
        "last_request_at": at,
    }
    insert_if_absent(connection, Model, model)
