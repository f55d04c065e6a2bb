"""The queue of pending requests of all models and samplers, and gaps in their sequence ids."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.orm import aliased
from sqlmodel import col

from tinkerflow.backend.journal.database import Aggregate
from tinkerflow.backend.journal.leases import answering_since
from tinkerflow.backend.journal.recovery import of_unstored
from tinkerflow.backend.journal.requests import count_in_range, of_base
from tinkerflow.backend.journal.tables import IS_PENDING, BaseModelRow, Model, Request, SamplerRow

log = logging.getLogger(__name__)

_SINCE = sa.case((col(Request.seq_id).is_not(None), col(Request.created_at)))
# For each model with pending requests: the first seq_id, the oldest time of submission, and the number of unloads.
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
# For each model: the number of answered requests between next_seq and its first pending request.
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


_PENDING_MODELS = (
    sa.select(col(Model.id))
    .join(_WAITING, _WAITING.c.model_id == col(Model.id))
    .where(sa.or_(_WAITING.c.unloads > 0, _USED >= _WIDTH), of_base(Model))
    .order_by(_WAITING.c.since, col(Model.id))
)
_GAPS = (
    sa.select(col(Model.id), col(Model.next_seq), _WAITING.c.first_seq, _WAITING.c.since, _USED.label("used"))
    .join(_WAITING, _WAITING.c.model_id == col(Model.id))
    .where(_WAITING.c.since <= sa.bindparam("before"), _USED < _WIDTH)
    .order_by(col(Model.id))
)
_WAITING_SAMPLES = (
    sa.select(col(Request.owner), sa.func.count())
    .join(SamplerRow, col(SamplerRow.id) == col(Request.sampler_id))
    .where(IS_PENDING, col(Request.sampler_id).is_not(None), of_base(SamplerRow))
    .group_by(col(Request.owner))
)
_WANTED = sa.union_all(
    sa.select(col(Model.base_model).label("base"), _WAITING.c.since.label("since"))
    .join(_WAITING, _WAITING.c.model_id == col(Model.id))
    .where(_USED >= _WIDTH, col(Model.paused).is_(None)),
    sa.select(col(SamplerRow.base_model), sa.func.min(col(Request.created_at)))
    .join(Request, col(SamplerRow.id) == col(Request.sampler_id))
    .where(IS_PENDING)
    .group_by(col(SamplerRow.base_model)),
    of_unstored(col(Model.base_model), col(Request.created_at)),
).subquery("wanted")
_WAITS_FOR = (
    sa.select(sa.func.coalesce(col(Model.paused), col(Model.progress), col(BaseModelRow.progress)))
    .select_from(Request)
    .outerjoin(Model, col(Model.id) == col(Request.model_id))
    .outerjoin(SamplerRow, col(SamplerRow.id) == col(Request.sampler_id))
    .outerjoin(
        BaseModelRow, col(BaseModelRow.name) == sa.func.coalesce(col(Model.base_model), col(SamplerRow.base_model))
    )
    .where(col(Request.id) == sa.bindparam("request_id"))
)


@dataclass(frozen=True)
class Gap:
    """`missing` of a model's sequence ids [next_seq, first_waiting) never came. Later ids have waited since `since`."""

    model_id: str
    next_seq: int
    first_waiting: int
    missing: int
    since: datetime


class Queue(Aggregate):
    """The pending requests of all models and samplers."""

    def pending_models(self, base_model: str | None = None) -> list[str]:
        """Ids of models with an executable request, longest waiting first. One statement."""
        with self._read() as connection:
            return list(connection.execute(_PENDING_MODELS, {"of_base": base_model}).scalars())

    def waiting_samples(self, base_model: str | None = None) -> dict[str, int]:
        """The number of unanswered samples by owner, including samples in the decode batch. One statement."""
        with self._read() as connection:
            rows = connection.execute(_WAITING_SAMPLES, {"of_base": base_model})
            return {str(owner): int(count) for owner, count in rows}

    def wanted(self) -> list[str]:
        """Base models with executable requests or with weights to store, longest waiting first. One statement.

        Unload requests do not count.
        """
        since = sa.func.min(_WANTED.c.since)
        return self._column(sa.select(_WANTED.c.base).group_by(_WANTED.c.base).order_by(since, _WANTED.c.base))

    def gaps(self, timeout: float) -> list[Gap]:
        """Models that have waited at least `timeout` seconds for a sequence id that never came.

        There are none unless clients could reach the API during all of that time. One statement if no model has waited.
        """
        before, now = self._ago(timeout), self._now()
        with self._read() as connection:
            rows = connection.execute(_GAPS, {"before": before}).all()
            since = answering_since(connection, now) if rows else None
        if since is not None and since > before:
            return []
        return [
            Gap(row.id, row.next_seq, row.first_seq, row.first_seq - row.next_seq - row.used, row.since) for row in rows
        ]

    def skip_gap(self, gap: Gap) -> bool:
        """Count the gap's missing ids as used, and log a warning. Returns False if a missing request came meanwhile."""
        used = gap.first_waiting - gap.next_seq - gap.missing
        with self._write() as connection:
            locked = connection.execute(
                sa.select(col(Model.next_seq)).where(col(Model.id) == gap.model_id).with_for_update()
            ).scalar()
            if locked != gap.next_seq or used != count_in_range(
                connection, gap.model_id, gap.next_seq, gap.first_waiting
            ):
                return False
            connection.execute(sa.update(Model).where(col(Model.id) == gap.model_id).values(next_seq=gap.first_waiting))
        log.warning(
            "model %s: %d of the sequence ids %d to %d never arrived: skipped, because requests have waited since %s",
            gap.model_id,
            gap.missing,
            gap.next_seq,
            gap.first_waiting - 1,
            gap.since.isoformat(timespec="seconds"),
        )
        self._publish(f"model:{gap.model_id}")
        return True

    def waits_for(self, request_id: str) -> str | None:
        """The reason why a pending request is not executed; None if it is only queued."""
        with self._read() as connection:
            reason: str | None = connection.execute(_WAITS_FOR, {"request_id": request_id}).scalar()
            return reason
