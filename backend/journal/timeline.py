"""When a session's requests came, began and were answered."""

from __future__ import annotations

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.kinds import Kind
from tinkerflow.backend.journal.tables import Model, Request, Sampler
from tinkerflow.backend.journal.views import Timed


def timeline(connection: sa.Connection, session_id: str) -> list[Timed]:
    """All requests of the session's models and samplers, in order of submission. Two statements, without payloads."""
    found: list[Timed] = []
    for table, of in ((Model, col(Request.model_id)), (Sampler, col(Request.sampler_id))):
        columns = (
            col(Request.id), col(Request.kind), col(Request.model_id), col(Request.sampler_id), col(Request.seq_id),
            col(Request.state), col(Request.created_at), col(Request.started_at), col(Request.finished_at),
        )  # fmt: skip
        owned = sa.select(*columns, col(table.base_model)).join(table, of == col(table.id))
        rows = connection.execute(owned.where(col(table.session_id) == session_id))
        found += [Timed(**{**row._mapping, "kind": Kind(row.kind)}) for row in rows]
    return sorted(found, key=lambda one: (one.created_at, one.id))
