"""Checkpoints and the training runs they come from, as their owners see them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from backend.errors import NotFoundError
from backend.journal.kinds import CheckpointKind
from backend.journal.search import PROJECT
from backend.journal.statements import get_owned, owned_by
from backend.journal.tables import Checkpoint, Model, Session
from backend.journal.views import CheckpointView, Page, RunView, checkpoint_view, model_view

_EXISTS = col(Checkpoint.deleted_at).is_(None)


def checkpoint(connection: sa.Connection, path: str, owner: str | None, now: datetime) -> CheckpointView:
    """The checkpoint at `path`: one's own, or a public one. Deleted and expired ones do not exist."""
    mine = sa.and_(sa.true(), *owned_by(Checkpoint, owner))
    visible = (_EXISTS, _unexpired(now), sa.or_(mine, col(Checkpoint.public).is_(True)))
    row = connection.execute(sa.select(Checkpoint).where(col(Checkpoint.path) == path, *visible)).one_or_none()
    if row is None:
        raise NotFoundError(f"checkpoint {path!r} does not exist")
    return checkpoint_view(row)


def checkpoints(
    connection: sa.Connection, owner: str | None, run_id: str | None, *, limit: int, offset: int, now: datetime
) -> Page[CheckpointView]:
    """An owner's checkpoints, newest first; with run_id those of one run. Three statements at most."""
    where = [_EXISTS, _unexpired(now), *owned_by(Checkpoint, owner)]
    if run_id is not None:
        get_owned(connection, Model, run_id, owner)
        where.append(col(Checkpoint.run_id) == run_id)
    total = connection.execute(sa.select(sa.func.count()).select_from(Checkpoint).where(*where)).scalar_one()
    newest = (col(Checkpoint.created_at).desc(), col(Checkpoint.path))
    rows = connection.execute(sa.select(Checkpoint).where(*where).order_by(*newest).limit(limit).offset(offset))
    return Page(tuple(checkpoint_view(row) for row in rows), total)


def delete_checkpoint(connection: sa.Connection, path: str, owner: str | None, now: datetime) -> CheckpointView:
    """Mark an owner's checkpoint as deleted, and return what it was."""
    row = connection.execute(
        sa.update(Checkpoint)
        .where(col(Checkpoint.path) == path, _EXISTS, *owned_by(Checkpoint, owner))
        .values(deleted_at=now)
        .returning(*sa.inspect(Checkpoint).local_table.columns)
    ).one_or_none()
    if row is None:
        raise NotFoundError(f"checkpoint {path!r} does not exist")
    return checkpoint_view(row)


def expired_checkpoints(connection: sa.Connection, now: datetime, limit: int) -> list[CheckpointView]:
    """Checkpoints past their time that nobody deleted yet, the longest expired first."""
    due = col(Checkpoint.expires_at)
    statement = sa.select(Checkpoint).where(_EXISTS, due <= now).order_by(due, col(Checkpoint.path)).limit(limit)
    return [checkpoint_view(row) for row in connection.execute(statement)]


def training_run(connection: sa.Connection, run_id: str, owner: str | None, now: datetime) -> RunView:
    """One run (its id is its model's) with its newest checkpoints."""
    return _with_checkpoints(connection, [get_owned(connection, Model, run_id, owner)], now)[0]


def training_runs(
    connection: sa.Connection, owner: str | None, project_id: str | None, limit: int, offset: int, now: datetime
) -> Page[RunView]:
    """An owner's runs, newest first; with project_id those of sessions in that project. Three statements."""
    mine = owned_by(Model, owner)
    if project_id is not None:
        in_project = sa.select(col(Session.id)).where(PROJECT.in_([project_id]), *owned_by(Session, owner))
        mine = (*mine, col(Model.session_id).in_(in_project))
    total = connection.execute(sa.select(sa.func.count()).select_from(Model).where(*mine)).scalar_one()
    newest = (col(Model.created_at).desc(), col(Model.id))
    rows = connection.execute(sa.select(Model).where(*mine).order_by(*newest).limit(limit).offset(offset)).all()
    return Page(tuple(_with_checkpoints(connection, rows, now)), total)


def _with_checkpoints(connection: sa.Connection, models: Sequence[sa.Row[Any]], now: datetime) -> list[RunView]:
    ids = [row.id for row in models]
    ranked = (
        sa.select(
            col(Checkpoint.path),
            sa.func.row_number()
            .over(
                partition_by=(col(Checkpoint.run_id), col(Checkpoint.kind)),
                order_by=(col(Checkpoint.created_at).desc(), col(Checkpoint.path)),
            )
            .label("age"),
        )
        .where(col(Checkpoint.run_id).in_(ids), _EXISTS, _unexpired(now))
        .subquery()
    )
    newest = sa.select(Checkpoint).join(ranked, ranked.c.path == col(Checkpoint.path)).where(ranked.c.age == 1)
    latest = {(row.run_id, row.kind): checkpoint_view(row) for row in connection.execute(newest)}
    return [
        RunView(
            model_view(row),
            latest.get((row.id, CheckpointKind.WEIGHTS)),
            latest.get((row.id, CheckpointKind.SAMPLER_WEIGHTS)),
        )
        for row in models
    ]


def _unexpired(now: datetime) -> sa.ColumnElement[bool]:
    due = col(Checkpoint.expires_at)
    return sa.or_(due.is_(None), due > now)
