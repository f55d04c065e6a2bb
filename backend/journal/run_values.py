"""Values of training runs in order, for mirrors that copy them: figures of steps, and metrics of clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.database import Aggregate, owned_by
from tinkerflow.backend.journal.run_metrics import RunMetric, RunMetricValue
from tinkerflow.backend.journal.tables import TAKES_WORK, Model, ModelState, TrainingStep
from tinkerflow.backend.spec.drift import DRIFT_FIGURES

_SEQ = col(TrainingStep.seq_id)
_LAST_SEQ = (
    sa.select(sa.func.max(_SEQ))
    .where(col(TrainingStep.model_id) == col(Model.id), _SEQ >= 0)
    .correlate(Model)
    .scalar_subquery()
)
_METRICS = (
    sa.select(sa.func.sum(col(RunMetric.number)))
    .where(col(RunMetric.model_id) == col(Model.id))
    .correlate(Model)
    .scalar_subquery()
)
_EXTENTS = sa.select(
    col(Model.id),
    col(Model.state),
    sa.func.coalesce(_LAST_SEQ, -1).label("last_seq"),
    sa.cast(sa.func.coalesce(_METRICS, 0), sa.BigInteger).label("metrics"),
)


@dataclass(frozen=True)
class Extent:
    """How many values a run has. last_seq: the newest step's; -1: no step. metrics: the number of client values."""

    id: str
    state: ModelState
    last_seq: int
    metrics: int


@dataclass(frozen=True)
class MadeStep:
    """A completed step. values: the measured figures by their names; the loss is per unit of weight."""

    seq_id: int
    step: int
    at: datetime
    values: Mapping[str, float]


class RunValues(Aggregate):
    """The values of training runs, in order."""

    def extents(self, projects: Collection[str], *, live_only: bool) -> list[Extent]:
        """The extent of each run of these projects, oldest first. No projects: all. live_only: only live runs."""
        with self._read() as connection:
            rows = connection.execute(chosen_runs(_EXTENTS, projects, live_only=live_only)).all()
        return [Extent(row.id, ModelState(row.state), row.last_seq, row.metrics) for row in rows]

    def steps(self, run_id: str, after_seq: int, limit: int) -> list[MadeStep]:
        """At most `limit` of a run's steps after a sequence id, in order."""
        seq_id = col(TrainingStep.seq_id)
        rows = (
            sa.select(TrainingStep)
            .where(col(TrainingStep.model_id) == run_id, seq_id > after_seq, seq_id >= 0)
            .order_by(seq_id)
            .limit(limit)
        )
        with self._read() as connection:
            return [_made(row) for row in connection.execute(rows)]

    def metrics(self, run_id: str) -> dict[str, int]:
        """The number of a run's client values, by metric."""
        names = sa.select(col(RunMetric.name), col(RunMetric.number)).where(col(RunMetric.model_id) == run_id)
        with self._read() as connection:
            return {row.name: row.number for row in connection.execute(names)}

    def metric(self, run_id: str, name: str, after_step: int, limit: int) -> list[tuple[int, float]]:
        """At most `limit` (step, value) pairs of a metric after the step `after_step`, in order."""
        step = col(RunMetricValue.step)
        rows = (
            sa.select(step, col(RunMetricValue.value))
            .where(col(RunMetricValue.model_id) == run_id, col(RunMetricValue.name) == name, step > after_step)
            .order_by(step)
            .limit(limit)
        )
        with self._read() as connection:
            return [(row[0], row[1]) for row in connection.execute(rows)]


def chosen_runs(runs: sa.Select[Any], projects: Collection[str], *, live_only: bool) -> sa.Select[Any]:
    """Select the runs of these projects from Model, oldest first. No projects: all. live_only: only live runs."""
    runs = runs.where(*owned_by(Model, None))
    if projects:
        runs = runs.where(col(Model.owner).in_(projects))
    if live_only:
        runs = runs.where(col(Model.state).in_(TAKES_WORK))
    return runs.order_by(col(Model.created_at), col(Model.id))


def _made(row: sa.Row[tuple[TrainingStep]]) -> MadeStep:
    figures = {
        "loss": row.loss / row.weight if row.loss is not None and row.weight else None,
        **{one.name: _mean(getattr(row, one.column), row.tokens) for one in DRIFT_FIGURES},
        "grad_norm": row.grad_norm,
        "learning_rate": row.learning_rate,
        "training_tokens": float(row.tokens),
    }
    return MadeStep(row.seq_id, row.step, row.at, {name: v for name, v in figures.items() if v is not None})


def _mean(total: float | None, tokens: int) -> float | None:
    return total / tokens if total is not None and tokens else None
