"""What can be executed now, in which order, and what waits for a sequence id that never came.

A model's requests run in order of seq_id from next_seq on. Ids whose request failed at once count as used; an id that
is not there yet holds back all later ones (chunks of one call arrive as 2..n, then 1: PROTOCOL.md 3.3). A request below
next_seq is a save that later ones have overtaken.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.orm import aliased
from sqlmodel import col

from tinkerflow.backend.journal.kinds import Kind
from tinkerflow.backend.journal.statements import IS_PENDING
from tinkerflow.backend.journal.tables import Model, Request, Sampler
from tinkerflow.backend.journal.views import Gap, Pending, pending_view, sampler_view

log = logging.getLogger(__name__)


_SINCE = sa.case((col(Request.seq_id).is_not(None), col(Request.created_at)))
# Per model with waiting requests: the first seq_id of them, since when they wait, how many unloads are among them.
_WAITING = (
    sa.select(
        col(Request.model_id).label("model_id"),
        sa.func.min(col(Request.seq_id)).label("first_seq"),
        sa.func.min(_SINCE).label("since"),
        (sa.func.count() - sa.func.count(col(Request.seq_id))).label("unloads"),
    )
    .where(IS_PENDING, col(Request.model_id).is_not(None))
    .group_by(col(Request.model_id))
    .subquery("waiting")
)
# How many requests a model has from next_seq on that are answered already, before its first waiting one.
_EARLIER = aliased(Request, name="earlier")
_USED = (
    sa.select(sa.func.count())
    .select_from(_EARLIER)
    .where(
        col(_EARLIER.model_id) == col(Model.id),
        col(_EARLIER.seq_id) >= col(Model.next_seq),
        col(_EARLIER.seq_id) < _WAITING.c.first_seq,
    )
    .correlate(Model, _WAITING)
    .scalar_subquery()
)
_WIDTH = _WAITING.c.first_seq - col(Model.next_seq)


def _of_base(table: type[Model] | type[Sampler]) -> sa.ColumnElement[bool]:
    base = sa.bindparam("of_base", type_=sa.String)
    return sa.or_(base.is_(None), col(table.base_model) == base)


_PENDING_MODELS = (
    sa.select(col(Model.id))
    .join(_WAITING, _WAITING.c.model_id == col(Model.id))
    .where(sa.or_(_WAITING.c.unloads > 0, _USED >= _WIDTH), _of_base(Model))
    .order_by(_WAITING.c.since, col(Model.id))
)
_GAPS = (
    sa.select(col(Model.id), col(Model.next_seq), _WAITING.c.first_seq, _WAITING.c.since, _USED.label("used"))
    .join(_WAITING, _WAITING.c.model_id == col(Model.id))
    .where(_WAITING.c.since <= sa.bindparam("before"), _USED < _WIDTH)
    .order_by(col(Model.id))
)
_READY = (
    sa.select(Request, col(Model.next_seq))
    .join(Model, col(Model.id) == col(Request.model_id))
    .where(col(Request.model_id) == sa.bindparam("model_id"), IS_PENDING)
    .order_by(col(Request.seq_id))
    .limit(sa.bindparam("at_most"))
)
_PENDING_SAMPLES = (
    sa.select(Request, *(column.label(f"its_{column.name}") for column in sa.inspect(Sampler).local_table.columns))
    .join(Sampler, col(Sampler.id) == col(Request.sampler_id))
    .where(
        IS_PENDING,
        col(Request.sampler_id).is_not(None),
        _of_base(Sampler),
        col(Request.id).not_in(sa.bindparam("exclude", expanding=True)),
        sa.or_(sa.bindparam("of_owner", type_=sa.String).is_(None), col(Request.owner) == sa.bindparam("of_owner")),
    )
    .order_by(col(Request.created_at), col(Request.seq_id), col(Request.id))
    .limit(sa.bindparam("at_most"))
)
_WAITING_SAMPLES = (
    sa.select(col(Request.owner), sa.func.count())
    .join(Sampler, col(Sampler.id) == col(Request.sampler_id))
    .where(IS_PENDING, col(Request.sampler_id).is_not(None), _of_base(Sampler))
    .group_by(col(Request.owner))
)


def pending_models(connection: sa.Connection, base_model: str | None) -> list[str]:
    """Ids of models that have something to execute now, longest waiting first. One statement."""
    return list(connection.execute(_PENDING_MODELS, {"of_base": base_model}).scalars())


def ready(connection: sa.Connection, model_id: str, limit: int) -> list[Pending]:
    """The requests to execute next, in order, at most `limit`; an unload comes last, when nothing else can run.

    One statement, and one more for each place where ids were used up by requests that failed at once.
    """
    rows = connection.execute(_READY, {"model_id": model_id, "at_most": limit}).all()
    run: list[Pending] = []
    cut = len(rows) == limit  # there may be more after this page
    for row in (row for row in rows if row.seq_id is not None):
        expected = max(row.next_seq, (run[-1].seq_id or 0) + 1 if run else 0)
        if row.seq_id > expected and _answered(connection, model_id, expected, row.seq_id) < row.seq_id - expected:
            cut = False
            break
        run.append(pending_view(row))
    unloads = [pending_view(row) for row in rows if row.kind == Kind.UNLOAD]
    return run if cut and run else run + unloads


def pending_samples(
    connection: sa.Connection, limit: int, base_model: str | None, exclude: Collection[str], owner: str | None
) -> list[Pending]:
    """Samples that wait (owner None: of everybody), oldest first, without those in `exclude`. One statement."""
    values = {"of_base": base_model, "exclude": list(exclude), "of_owner": owner, "at_most": limit}
    rows = connection.execute(_PENDING_SAMPLES, values)
    return [pending_view(row, sampler_view(row, prefix="its_")) for row in rows]


def waiting_samples(connection: sa.Connection, base_model: str | None) -> dict[str, int]:
    """How many samples of each owner wait, those that are being decoded too. One statement."""
    found = connection.execute(_WAITING_SAMPLES, {"of_base": base_model})
    return {str(owner): int(count) for owner, count in found}


def gaps(connection: sa.Connection, before: datetime) -> list[Gap]:
    """Gaps behind which something waits since `before` or longer. One statement."""
    return [
        Gap(row.id, row.next_seq, row.first_seq, row.first_seq - row.next_seq - row.used, row.since)
        for row in connection.execute(_GAPS, {"before": before})
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


def _answered(connection: sa.Connection, model_id: str, first: int, end: int) -> int:
    """How many of the ids are used up. What arrived since our page was read waits, and must not count as that."""
    return _count(connection, model_id, first, end, sa.not_(IS_PENDING))


def _count(connection: sa.Connection, model_id: str, first: int, end: int, *where: sa.ColumnElement[bool]) -> int:
    in_range = (col(Request.model_id) == model_id, col(Request.seq_id) >= first, col(Request.seq_id) < end)
    return connection.execute(sa.select(sa.func.count()).select_from(Request).where(*in_range, *where)).scalar_one()
