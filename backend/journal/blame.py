"""What a session that fell silent had failed at, if at anything: people look for it when they search their sessions."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import aliased
from sqlmodel import col

from tinkerflow.backend.errors import StateLostError
from tinkerflow.backend.journal.kinds import ModelState, RequestState, SamplerState
from tinkerflow.backend.journal.tables import Model, Request, Sampler
from tinkerflow.backend.journal.views import SessionFailure

_NEWER = aliased(Request, name="newer")


def what_failed(connection: sa.Connection, session_id: str) -> SessionFailure | None:
    """A training run or sampling session that was lost with its worker group; else the newest of its last requests.

    The last request of each model and sampler counts, and only when it failed: what failed earlier the client got over.
    """
    run = _lost(connection, Model, col(Model.state) == ModelState.LOST, session_id)
    if run is not None:
        return SessionFailure(StateLostError.category, "training_run", run.id, None, str(run.detail))
    sampler = _lost(connection, Sampler, col(Sampler.state) == SamplerState.LOST, session_id)
    if sampler is not None:
        return SessionFailure(StateLostError.category, "sampling_session", sampler.id, None, str(sampler.detail))
    failed = [*_last(connection, Model, session_id), *_last(connection, Sampler, session_id)]
    if not failed:
        return None
    last = max(failed, key=lambda row: (row.finished_at, row.id))
    return SessionFailure(last.category, "request", last.id, last.kind, last.error)


def _lost(
    connection: sa.Connection, table: type[Model] | type[Sampler], is_lost: sa.ColumnElement[bool], session_id: str
) -> sa.Row[Any] | None:
    columns = (col(table.id), col(table.detail))
    first = sa.select(*columns).where(col(table.session_id) == session_id, is_lost).order_by(col(table.id)).limit(1)
    return connection.execute(first).first()


def _last(connection: sa.Connection, table: type[Model] | type[Sampler], session_id: str) -> list[sa.Row[Any]]:
    """The last request of each of the session's models or samplers, where it failed. Walks the unique constraint."""
    of = col(Request.model_id) if table is Model else col(Request.sampler_id)
    of_newer = col(_NEWER.model_id) if table is Model else col(_NEWER.sampler_id)
    last_seq = sa.select(sa.func.max(col(_NEWER.seq_id))).where(of_newer == col(table.id)).scalar_subquery()
    # One that was dropped reads as failed in any case: its result expired.
    failed = (col(Request.state) == RequestState.FAILED, col(Request.dropped_at).is_(None))
    columns = (col(Request.id), col(Request.kind), col(Request.error), col(Request.category), col(Request.finished_at))
    statement = (
        sa.select(*columns)
        .join(table, sa.and_(of == col(table.id), col(Request.seq_id) == last_seq))
        .where(col(table.session_id) == session_id, *failed)
    )
    return list(connection.execute(statement).all())
