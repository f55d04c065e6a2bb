"""Checkpoints and the training runs they come from, as their readers see them; `keeping` changes them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.errors import NotFoundError
from tinkerflow.backend.journal.kinds import CheckpointKind
from tinkerflow.backend.journal.search import PROJECT
from tinkerflow.backend.journal.shares import opens
from tinkerflow.backend.journal.statements import get_owned, owned_by
from tinkerflow.backend.journal.tables import Checkpoint, Model, Session
from tinkerflow.backend.journal.views import CheckpointView, Page, RunView, checkpoint_view, model_view


def exists(now: datetime) -> sa.ColumnElement[bool]:
    """The filter for checkpoints that are neither deleted nor past their time: for clients there are no others."""
    due = col(Checkpoint.expires_at)
    return sa.and_(col(Checkpoint.deleted_at).is_(None), sa.or_(due.is_(None), due > now))


def missing(path: str) -> NotFoundError:
    """The one error for checkpoints that do not exist, expired ones, and those of others."""
    return NotFoundError(f"checkpoint {path!r} does not exist")


def checkpoint(
    connection: sa.Connection, path: str, owner: str | None, access: str | None, now: datetime
) -> CheckpointView:
    """The checkpoint at `path`: one's own, a public one, or one that the token behind the hash `access` opens."""
    mine = sa.and_(sa.true(), *owned_by(Checkpoint, owner))
    readable = [mine, col(Checkpoint.public).is_(True)] + ([] if access is None else [opens(access, now)])
    where = (col(Checkpoint.path) == path, exists(now), sa.or_(*readable))
    row = connection.execute(sa.select(Checkpoint).where(*where)).one_or_none()
    if row is None:
        raise missing(path)
    return checkpoint_view(row)


def checkpoints(
    connection: sa.Connection, owner: str | None, run_id: str | None, *, limit: int, offset: int, now: datetime
) -> Page[CheckpointView]:
    """An owner's checkpoints, newest first; with run_id those of one run. Three statements at most."""
    where = [exists(now), *owned_by(Checkpoint, owner)]
    if run_id is not None:
        get_owned(connection, Model, run_id, owner)
        where.append(col(Checkpoint.run_id) == run_id)
    total = connection.execute(sa.select(sa.func.count()).select_from(Checkpoint).where(*where)).scalar_one()
    newest = (col(Checkpoint.created_at).desc(), col(Checkpoint.path))
    rows = connection.execute(sa.select(Checkpoint).where(*where).order_by(*newest).limit(limit).offset(offset))
    return Page(tuple(checkpoint_view(row) for row in rows), total)


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
        .where(col(Checkpoint.run_id).in_(ids), exists(now))
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
