"""Metrics of training runs: values by name and step that clients measured, such as rewards. Each is stored once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlmodel import Field, col

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal.curves import EVERY_STEP, FIRST_STEP, LAST_STEP, Span
from tinkerflow.backend.journal.database import NAME_BYTES, Aggregate, Table, Text, get_owned, in_chunks
from tinkerflow.backend.journal.quotas import NO_LIMITS, Limits, count_kept, lock_project, text_bytes, uncount_kept
from tinkerflow.backend.journal.tables import Model

MOST_NAMES = 100  # of one run
MOST_POINTS = 200  # of one curve
REWARD = "reward"  # the metric that tables of runs show


class RunMetric(Table, table=True):
    """The name of a metric that a client stores for a run. number: how many values it has. last_step: the highest."""

    __tablename__ = "run_metric"

    model_id: str = Field(primary_key=True, foreign_key="model.id", sa_type=Text())
    name: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    number: int = Field(sa_type=sa.BigInteger)
    last_step: int = Field(sa_type=sa.BigInteger)


class RunMetricValue(Table, table=True):
    """The value of a metric of a run at one step. Rows never change."""

    __tablename__ = "run_metric_value"

    model_id: str = Field(primary_key=True, foreign_key="model.id", sa_type=Text())
    name: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    step: int = Field(primary_key=True, sa_type=sa.BigInteger)
    value: float


_STEP, _VALUE = col(RunMetricValue.step), col(RunMetricValue.value)
_ADD_NAME = sa.text(
    "INSERT INTO run_metric (model_id, name, number, last_step) VALUES (:model_id, :name, :number, :last_step)"
    " ON CONFLICT (model_id, name) DO UPDATE SET number = run_metric.number + :number,"
    " last_step = CASE WHEN :last_step > run_metric.last_step THEN :last_step ELSE run_metric.last_step END"
)
_NAMES = sa.select(RunMetric).where(col(RunMetric.model_id) == sa.bindparam("run_id")).order_by(col(RunMetric.name))
_NUMBER = sa.select(sa.func.coalesce(sa.func.sum(col(RunMetric.number)), 0)).where(
    col(RunMetric.model_id) == sa.bindparam("run_id")
)
_PART = (_STEP // sa.bindparam("width", type_=sa.BigInteger)).label("part")
_POINTS = (
    sa.select(sa.func.max(_STEP), sa.func.avg(_VALUE))
    .where(
        col(RunMetricValue.model_id) == sa.bindparam("run_id"),
        col(RunMetricValue.name) == sa.bindparam("name", type_=sa.String),
        _STEP.between(FIRST_STEP, LAST_STEP),
    )
    .group_by(_PART)
    .order_by(_PART)
)


@dataclass(frozen=True)
class Metric:
    """A metric of a run. points: (step, value); of many steps, means over neighboring ones, each at its last step."""

    name: str
    points: tuple[tuple[int, float], ...]


class RunMetrics(Aggregate):
    """The metrics that clients stored for their runs."""

    def record(
        self, run_id: str, owner: str, steps: Mapping[int, Mapping[str, float]], limits: Limits = NO_LIMITS
    ) -> int:
        """Store values by step and name, and return how many are new. Already stored values are kept.

        NotFoundError: unknown or foreign run. UserError: a step has a different value under that name, the run would
        have more than MOST_NAMES names, or the project has reached a limit. Then no value is stored.
        """
        sent = {(step, name): float(value) for step, values in steps.items() for name, value in values.items()}
        names = {name for _, name in sent}
        if len(names) > MOST_NAMES:
            raise UserError(f"values has {len(names)} names: must have at most {MOST_NAMES}")
        with self._write() as connection:
            lock_project(connection, owner)
            get_owned(connection, Model, run_id, owner)
            stored = _stored(connection, run_id, {step for step, _ in sent}, names)
            for (step, name), value in sent.items():
                if stored.get((step, name), value) != value:
                    raise UserError(
                        f"values.{name} {value!r}: step {step} of this run already has {stored[step, name]!r}, and a "
                        "stored value never changes"
                    )
            new = {key: value for key, value in sent.items() if key not in stored}
            if not new:
                return 0
            rows = [{"model_id": run_id, "name": name, "step": step, "value": v} for (step, name), v in new.items()]
            _add_names(connection, run_id, [(step, name) for step, name in new])
            connection.execute(sa.insert(RunMetricValue), rows)
            count_kept(connection, owner, "metrics", text_bytes(*(name for _, name in new)), limits, rows=len(new))
        return len(new)

    def of_run(
        self, run_id: str, owner: str | None, *, most: int = MOST_POINTS, steps: Span = EVERY_STEP
    ) -> list[Metric]:
        """A run's metrics by name, each with at most about `most` points. NotFoundError: unknown or foreign run.

        steps: the first and the last step of the points.
        """
        shown = {"run_id": run_id, "first_step": steps[0], "last_step": steps[1]}
        with self._read() as connection:
            get_owned(connection, Model, run_id, owner)
            found = []
            for row in connection.execute(_NAMES, {"run_id": run_id}).all():
                number = min(int(row.number), steps[1] - steps[0] + 1)
                last = min(int(row.last_step), steps[1])
                width = max(1, -(-(last - steps[0] + 1) // most)) if number > most else 1
                points = connection.execute(_POINTS, {**shown, "name": row.name, "width": width})
                found.append(Metric(row.name, tuple((point[0], point[1]) for point in points)))
        return found

    def number(self, run_id: str) -> int:
        """How many values a run has; changes with every new value. One statement."""
        with self._read() as connection:
            return int(connection.execute(_NUMBER, {"run_id": run_id}).scalar_one())


def delete_metrics(connection: sa.Connection, run_id: str, owner: str) -> None:
    """Delete the metrics of a run in the caller's transaction, and subtract them from the totals of its project."""
    names = connection.execute(_NAMES, {"run_id": run_id}).all()
    texts = sum(row.number * text_bytes(row.name) for row in names)  # as `record` counts them
    uncount_kept(connection, owner, "metrics", sum(row.number for row in names), texts)
    for table in (RunMetricValue, RunMetric):
        connection.execute(sa.delete(table).where(col(table.model_id) == run_id))


def _stored(connection: sa.Connection, run_id: str, steps: set[int], names: set[str]) -> dict[tuple[int, str], float]:
    """A run's stored values at these steps under these names."""
    found = {}
    for some in in_chunks(steps):
        rows = sa.select(_STEP, col(RunMetricValue.name), _VALUE).where(
            col(RunMetricValue.model_id) == run_id, col(RunMetricValue.name).in_(names), _STEP.in_(some)
        )
        found.update({(row[0], row[1]): row[2] for row in connection.execute(rows)})
    return found


def _add_names(connection: sa.Connection, run_id: str, new: list[tuple[int, str]]) -> None:
    """Count new values under their names. UserError: too many names."""
    for name in dict.fromkeys(name for _, name in new):
        its = [step for step, one in new if one == name]
        added = {"model_id": run_id, "name": name, "number": len(its), "last_step": max(its)}
        connection.execute(_ADD_NAME, added)
    names = connection.execute(sa.select(sa.func.count()).where(col(RunMetric.model_id) == run_id)).scalar_one()
    if names > MOST_NAMES:
        raise UserError(f"values has new names: this run would have {names} names, and must have at most {MOST_NAMES}")
