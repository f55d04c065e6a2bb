"""Figures of the whole service for its metrics. They contain no data of projects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.database import Aggregate
from tinkerflow.backend.journal.tables import (
    IS_PENDING,
    Model,
    ModelState,
    RecoverySnapshot,
    Request,
    TrainingStep,
    UsageBucket,
)
from tinkerflow.backend.spec.drift import DRIFT_FIGURES

_USED = sa.select(
    col(UsageBucket.base_model), col(UsageBucket.kind), sa.cast(sa.func.sum(col(UsageBucket.quantity)), sa.BigInteger)
).group_by(col(UsageBucket.base_model), col(UsageBucket.kind))
_LAST = (
    sa.select(
        col(RecoverySnapshot.model_id),
        sa.func.max(col(RecoverySnapshot.seq_id)).label("seq_id"),
        sa.func.max(col(RecoverySnapshot.created_at)).label("at"),
    )
    .where(col(RecoverySnapshot.snapshot_id).is_(None))
    .group_by(col(RecoverySnapshot.model_id))
    .subquery()
)
_OLDEST = (
    sa.select(col(Model.base_model), sa.func.min(sa.func.coalesce(_LAST.c.at, col(Model.created_at))))
    .outerjoin(_LAST, _LAST.c.model_id == col(Model.id))
    .where(col(Model.state) == ModelState.LIVE, col(Model.next_seq) > sa.func.coalesce(_LAST.c.seq_id, 0) + 1)
    .group_by(col(Model.base_model))
)
_LIVE = (
    sa.select(col(Model.base_model), sa.func.count())
    .where(col(Model.state) == ModelState.LIVE)
    .group_by(col(Model.base_model))
)
_NEWEST_STEP = (
    sa.select(sa.func.max(col(TrainingStep.seq_id)))
    .where(col(TrainingStep.model_id) == col(Model.id))
    .correlate(Model)
    .scalar_subquery()
)
_DRIFT = (
    sa.select(
        col(Model.base_model),
        *(
            (sa.func.min if one.falls else sa.func.max)(
                col(getattr(TrainingStep, one.column)) / col(TrainingStep.tokens)
            )
            for one in DRIFT_FIGURES
        ),
    )
    .join(TrainingStep, sa.and_(col(TrainingStep.model_id) == col(Model.id), col(TrainingStep.seq_id) == _NEWEST_STEP))
    .where(col(Model.state) == ModelState.LIVE, col(TrainingStep.tokens) > 0)
    .group_by(col(Model.base_model))
)
_FIRST = sa.func.min(col(Request.created_at))
_WAITING = sa.union_all(
    *(
        sa.select(sa.literal(kind), _FIRST).where(IS_PENDING, of.is_not(None))
        for kind, of in {"samples": col(Request.sampler_id), "training": col(Request.model_id)}.items()
    )
)


@dataclass(frozen=True)
class ServiceFigures:
    """Figures of the service.

    used: by base model and UsageKind, since the beginning. live: live models by base model. unsaved_since: by base
    model, the last recovery snapshot (or the creation) of the live model with the oldest unsaved changes; absent
    without such changes. waiting_since: for `samples` and `training`, when the oldest unanswered request was submitted,
    or None. drift: by name of DRIFT_FIGURES and base model, the worst value at the newest steps of its models; absent
    if not measured.
    """

    used: Mapping[tuple[str, str], int]
    live: Mapping[str, int]
    unsaved_since: Mapping[str, datetime]
    waiting_since: Mapping[str, datetime | None]
    drift: Mapping[str, Mapping[str, float]]


class ServiceMetrics(Aggregate):
    """Figures of the whole service."""

    def now(self) -> ServiceFigures:
        """The current figures. Five statements."""
        with self._read() as connection:
            return ServiceFigures(
                {(base, kind): int(sum_) for base, kind, sum_ in connection.execute(_USED)},
                {base: int(count) for base, count in connection.execute(_LIVE)},
                {row[0]: row[1] for row in connection.execute(_OLDEST)},
                {row[0]: row[1] for row in connection.execute(_WAITING)},
                _drift(connection.execute(_DRIFT).all()),
            )


def _drift(rows: Sequence[sa.Row[Any]]) -> dict[str, dict[str, float]]:
    return {
        one.name: {base: float(values[place]) for base, *values in rows if values[place] is not None}
        for place, one in enumerate(DRIFT_FIGURES)
    }
