"""What can be executed now, in which order, and what waits for a sequence id that never came.

A model's requests run in order of seq_id from next_seq on. Ids whose request failed at once count as used; an id that
is not there yet holds back all later ones (chunks of one call arrive as 2..n, then 1: PROTOCOL.md 3.3).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.orm import aliased
from sqlmodel import col

from backend.journal.kinds import Kind
from backend.journal.statements import IS_PENDING
from backend.journal.tables import Model, Request, Sampler
from backend.journal.views import Gap, Pending, pending_view, sampler_view

log = logging.getLogger(__name__)


_READY = (
    sa.select(Request, col(Model.next_seq))
    .join(Model, col(Model.id) == col(Request.model_id))
    .where(col(Request.model_id) == sa.bindparam("model_id"), IS_PENDING)
    .order_by(col(Request.seq_id))
    .limit(sa.bindparam("at_most"))
)


def pending_models(connection: sa.Connection, base_model: str | None) -> list[str]:
    """Ids of models that have something to execute now, longest waiting first. One statement."""
    waiting = _waiting()
    used = _used(waiting)
    reachable = used == waiting.c.first_seq - col(Model.next_seq)
    statement = (
        sa.select(col(Model.id))
        .join(waiting, waiting.c.model_id == col(Model.id))
        .where(sa.or_(waiting.c.unloads > 0, reachable))
        .order_by(waiting.c.since, col(Model.id))
    )
    if base_model is not None:
        statement = statement.where(col(Model.base_model) == base_model)
    return list(connection.execute(statement).scalars())


def ready(connection: sa.Connection, model_id: str, limit: int) -> list[Pending]:
    """The requests to execute next, in order, at most `limit`; an unload comes last, when nothing else can run.

    One statement, and one more for each place where ids were used up by requests that failed at once.
    """
    rows = connection.execute(_READY, {"model_id": model_id, "at_most": limit}).all()
    run: list[Pending] = []
    cut = len(rows) == limit  # there may be more after this page
    for row in (row for row in rows if row.seq_id is not None):
        expected = row.next_seq if not run else (run[-1].seq_id or 0) + 1
        if row.seq_id != expected and _answered(connection, model_id, expected, row.seq_id) < row.seq_id - expected:
            cut = False
            break
        run.append(pending_view(row))
    unloads = [pending_view(row) for row in rows if row.kind == Kind.UNLOAD]
    return run if cut and run else run + unloads


def pending_samples(
    connection: sa.Connection, limit: int, base_model: str | None, exclude: Collection[str]
) -> list[Pending]:
    """Samples that wait, oldest first, without those in `exclude`. One statement."""
    columns = [column.label(f"its_{column.name}") for column in sa.inspect(Sampler).local_table.columns]
    statement = (
        sa.select(Request, *columns)
        .join(Sampler, col(Sampler.id) == col(Request.sampler_id))
        .where(IS_PENDING, col(Request.sampler_id).is_not(None))
        .order_by(col(Request.created_at), col(Request.seq_id), col(Request.id))
        .limit(limit)
    )
    if base_model is not None:
        statement = statement.where(col(Sampler.base_model) == base_model)
    if exclude:
        statement = statement.where(col(Request.id).not_in(exclude))
    return [pending_view(row, sampler_view(row, prefix="its_")) for row in connection.execute(statement)]


def gaps(connection: sa.Connection, before: datetime) -> list[Gap]:
    """Gaps behind which something waits since `before` or longer. One statement."""
    waiting = _waiting()
    used = _used(waiting)
    width = waiting.c.first_seq - col(Model.next_seq)
    statement = (
        sa.select(col(Model.id), col(Model.next_seq), waiting.c.first_seq, waiting.c.since, used.label("used"))
        .join(waiting, waiting.c.model_id == col(Model.id))
        .where(waiting.c.since <= before, used < width)
        .order_by(col(Model.id))
    )
    return [
        Gap(row.id, row.next_seq, row.first_seq, row.first_seq - row.next_seq - row.used, row.since)
        for row in connection.execute(statement)
    ]


def skip_gap(connection: sa.Connection, gap: Gap) -> bool:
    """Count the gap's missing ids as used; False, and nothing done, when something of it came meanwhile."""
    used = gap.first_waiting - gap.next_seq - gap.missing
    locked = connection.execute(
        sa.select(col(Model.next_seq)).where(col(Model.id) == gap.model_id).with_for_update()
    ).scalar()
    if locked != gap.next_seq or _count(connection, gap.model_id, gap.next_seq, gap.first_waiting) != used:
        return False
    connection.execute(sa.update(Model).where(col(Model.id) == gap.model_id).values(next_seq=gap.first_waiting))
    log.warning(
        "model %s: %d of the sequence ids %d to %d never came: given up, requests wait since %s",
        gap.model_id,
        gap.missing,
        gap.next_seq,
        gap.first_waiting - 1,
        gap.since.isoformat(timespec="seconds"),
    )
    return True


def _waiting() -> sa.Subquery:
    """Per model with waiting requests: the first seq_id of them, since when they wait, how many unloads are there."""
    ordered = sa.case((col(Request.seq_id).is_not(None), col(Request.created_at)))
    return (
        sa.select(
            col(Request.model_id).label("model_id"),
            sa.func.min(col(Request.seq_id)).label("first_seq"),
            sa.func.min(ordered).label("since"),
            (sa.func.count() - sa.func.count(col(Request.seq_id))).label("unloads"),
        )
        .where(IS_PENDING, col(Request.model_id).is_not(None))
        .group_by(col(Request.model_id))
        .subquery("waiting")
    )


def _used(waiting: sa.Subquery) -> sa.ScalarSelect[int]:
    """How many requests a model has from next_seq on that are answered already, before its first waiting one."""
    earlier = aliased(Request, name="earlier")
    return (
        sa.select(sa.func.count())
        .select_from(earlier)
        .where(
            col(earlier.model_id) == col(Model.id),
            col(earlier.seq_id) >= col(Model.next_seq),
            col(earlier.seq_id) < waiting.c.first_seq,
        )
        .correlate(Model, waiting)
        .scalar_subquery()
    )


def _answered(connection: sa.Connection, model_id: str, first: int, end: int) -> int:
    """How many of the ids are used up. What arrived since our page was read waits, and must not count as that."""
    return _count(connection, model_id, first, end, sa.not_(IS_PENDING))


def _count(connection: sa.Connection, model_id: str, first: int, end: int, *where: sa.ColumnElement[bool]) -> int:
    in_range = (col(Request.model_id) == model_id, col(Request.seq_id) >= first, col(Request.seq_id) < end)
    return connection.execute(sa.select(sa.func.count()).select_from(Request).where(*in_range, *where)).scalar_one()
