"""Giving up a sample that waits. The engine hears of it by the bell, and frees its place in the decode batch."""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.errors import UserError
from tinkerflow.backend.journal.finishing import finish
from tinkerflow.backend.journal.kinds import Kind, RequestState
from tinkerflow.backend.journal.records import Outcome
from tinkerflow.backend.journal.statements import is_owned, missing
from tinkerflow.backend.journal.tables import Request

CANCELLED = "cancelled by the client"

_FIND = sa.select(col(Request.kind), col(Request.state), col(Request.sampler_id), col(Request.seq_id)).where(
    is_owned(Request)
)


def cancel(connection: sa.Connection, request_id: str, owner: str | None, now: datetime) -> list[str]:
    """Fail the sample if it waits, as its first answer; the bell's topics, none when it was answered before.

    UserError for what is not a sample: a model's operations run in order of their sequence ids, and what was submitted
    after one counts on it, so an accepted one is always executed.
    """
    found = connection.execute(_FIND, {"row_id": request_id, "as_owner": owner}).one_or_none()
    if found is None:
        raise missing(Request, request_id)
    if found.kind != Kind.SAMPLE:
        raise UserError(f"request {request_id} is a {found.kind}: only samples can be cancelled once they are accepted")
    if found.state != RequestState.PENDING:
        return []
    outcome = Outcome(request_id, error=CANCELLED, category="user", sampler_id=found.sampler_id, seq_id=found.seq_id)
    answered, topics = finish(connection, [outcome], now)
    return [*topics, f"cancel:{request_id}"] if answered else []
