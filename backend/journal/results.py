"""Reading answers. They stay re-readable until they expire; then their bytes go, and the id answers with that fact."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.kinds import RequestState
from tinkerflow.backend.journal.statements import IS_PENDING, in_chunks, is_owned, missing
from tinkerflow.backend.journal.tables import Request
from tinkerflow.backend.journal.views import Result, result_view

# Without the payload: answers are read thousands of times a second, and a payload can have megabytes.
_SIZE = sa.func.length(col(Request.result))
_MOST = sa.bindparam("at_most", type_=sa.BigInteger)
_READ = sa.select(
    col(Request.id),
    col(Request.kind),
    col(Request.state),
    col(Request.result_type),
    col(Request.error),
    col(Request.category),
    col(Request.read_at),
    _SIZE.label("size"),
    sa.case((sa.or_(_MOST.is_(None), _SIZE <= _MOST), col(Request.result))).label("result"),
).where(is_owned(Request))
_MARK_READ = (
    sa.update(Request)
    .where(col(Request.id) == sa.bindparam("request_id"), col(Request.read_at).is_(None))
    .values(read_at=sa.bindparam("now"))
)
_FINISHED = sa.select(col(Request.id)).where(
    col(Request.id).in_(sa.bindparam("ids", expanding=True)), sa.not_(IS_PENDING)
)


def read_result(
    connection: sa.Connection, request_id: str, owner: str | None, at_most: int | None
) -> tuple[Result | None, bool]:
    """The answer (None: not yet), and whether it is read for the first time. One statement.

    A result of more than `at_most` bytes is left where it is, and not read: only its size is told.
    """
    parameters = {"row_id": request_id, "as_owner": owner, "at_most": at_most}
    row = connection.execute(_READ, parameters).one_or_none()
    if row is None:
        raise missing(Request, request_id)
    if row.state == RequestState.PENDING:
        return None, False
    told_only = row.size is not None and row.result is None
    return result_view(row), row.read_at is None and not told_only


def mark_read(connection: sa.Connection, request_id: str, now: datetime) -> None:
    """Note when an answer was read first. One statement."""
    connection.execute(_MARK_READ, {"request_id": request_id, "now": now})


def finished(connection: sa.Connection, request_ids: Collection[str]) -> set[str]:
    """Which of these are answered. One statement per ten thousand ids."""
    found: set[str] = set()
    for ids in in_chunks(request_ids):
        found |= set(connection.execute(_FINISHED, {"ids": ids}).scalars())
    return found


def expire_results(connection: sa.Connection, before: datetime, now: datetime, limit: int) -> int:
    """Drop the bytes of at most `limit` requests that were read (or, unread, answered) before `before`; how many."""
    last_use = sa.func.coalesce(col(Request.read_at), col(Request.finished_at))
    old = (
        sa.select(col(Request.id))
        .where(col(Request.dropped_at).is_(None), col(Request.finished_at) < before, last_use < before)
        .order_by(col(Request.finished_at))
        .limit(limit)
    )
    text = "the result expired: it was kept until " + before.isoformat(timespec="seconds") + " and is dropped now"
    dropped = connection.execute(
        sa.update(Request)
        .where(col(Request.id).in_(old))
        .values(
            dropped_at=now,
            payload=sa.case((col(Request.replays), col(Request.payload)), else_=b""),
            result=None,
            state=RequestState.FAILED,
            error=sa.case((col(Request.state) == RequestState.DONE, text), else_=col(Request.error)),
            category=sa.case((col(Request.state) == RequestState.DONE, "user"), else_=col(Request.category)),
        )
    )
    return dropped.rowcount
