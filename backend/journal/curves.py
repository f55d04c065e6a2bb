"""Curves of training runs: the figures of each optimizer step, averaged over neighboring steps when there are many.

results.py writes a row for each step in the transaction that answers its optim_step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.database import Aggregate, get_owned
from tinkerflow.backend.journal.tables import UNMADE, Model, TrainingStep
from tinkerflow.backend.spec.drift import DRIFT_FIGURES

MOST = 500  # points in one curve, more than a screen shows
Span = tuple[int, int]  # the first and the last step
EVERY_STEP: Span = (0, 2**62)
FIRST_STEP, LAST_STEP = (sa.bindparam(name, type_=sa.BigInteger) for name in ("first_step", "last_step"))

_OF_RUN = (col(TrainingStep.model_id) == sa.bindparam("run_id"), col(TrainingStep.seq_id) >= 0)
_SEQ = col(TrainingStep.seq_id)
_SHOWN = (*_OF_RUN, col(TrainingStep.step).between(FIRST_STEP, LAST_STEP))
_BOUNDS = sa.select(sa.func.count(), sa.func.min(_SEQ), sa.func.max(_SEQ)).where(*_SHOWN)
_TOKENS_BEFORE = sa.select(sa.cast(sa.func.coalesce(sa.func.sum(col(TrainingStep.tokens)), 0), sa.BigInteger)).where(
    *_OF_RUN, col(TrainingStep.step) < FIRST_STEP
)
_LOSS = col(TrainingStep.loss) / sa.func.nullif(col(TrainingStep.weight), 0.0)


def _mean(name: str) -> sa.ColumnElement[Any]:
    """The mean of a figure over the tokens of the steps that measured it. name: the name of its column."""
    column = col(getattr(TrainingStep, name))
    tokens = sa.func.sum(sa.case((column.is_not(None), col(TrainingStep.tokens))))
    return sa.func.sum(column) / sa.func.nullif(tokens, 0)


_PART = ((_SEQ - sa.bindparam("first")) // sa.bindparam("width")).label("part")
_FIGURES = (
    sa.select(
        _PART,
        sa.func.max(col(TrainingStep.step)).label("step"),
        sa.func.max(col(TrainingStep.at)).label("at"),
        sa.cast(sa.func.sum(col(TrainingStep.tokens)), sa.BigInteger).label("tokens"),
        sa.func.avg(_LOSS).label("loss"),
        sa.func.min(_LOSS).label("loss_low"),
        sa.func.max(_LOSS).label("loss_high"),
        *(_mean(one.column).label(one.column) for one in DRIFT_FIGURES),
        sa.func.avg(col(TrainingStep.grad_norm)).label("grad_norm"),
        sa.func.avg(col(TrainingStep.learning_rate)).label("learning_rate"),
    )
    .where(*_SHOWN)
    .group_by("part")
    .order_by("part")
)


_TOKENS_OF_RUN = sa.select(
    sa.cast(sa.func.coalesce(sa.func.sum(col(TrainingStep.tokens)).filter(_SEQ >= 0), 0), sa.BigInteger),
    sa.cast(sa.func.coalesce(sa.func.sum(col(TrainingStep.tokens)).filter(_SEQ == UNMADE), 0), sa.BigInteger),
).where(col(TrainingStep.model_id) == sa.bindparam("run_id"))
_TOKENS_OF_LAST = sa.select(col(TrainingStep.tokens)).where(*_OF_RUN).order_by(_SEQ.desc()).limit(1)

_FIGURES_OF = tuple(
    col(getattr(TrainingStep, name)) for name in ("step", "tokens", "weight", "loss", "grad_norm", "learning_rate")
)
_OF_OTHER = (col(TrainingStep.model_id) == sa.bindparam("other_id"), _SEQ >= 0)
_LASTS = [
    sa.select(sa.func.coalesce(sa.func.max(col(TrainingStep.step)), 0).label("step")).where(*which)
    for which in (_OF_RUN, _OF_OTHER)
]
_COMMON = sa.select(sa.func.min(sa.union_all(*_LASTS).subquery().c.step))
_DIFFERENT = sa.except_(sa.select(*_FIGURES_OF).where(*_OF_RUN), sa.select(*_FIGURES_OF).where(*_OF_OTHER)).subquery()
_DIFFERS = sa.select(sa.func.min(_DIFFERENT.c.step)).where(_DIFFERENT.c.step <= sa.bindparam("common"))


@dataclass(frozen=True)
class Trained:
    """Training tokens of a run. made: in all steps; last: in the newest step; begun: in the unfinished next step."""

    made: int = 0
    last: int = 0
    begun: int = 0


@dataclass(frozen=True)
class StepFigures:
    """The figures of one step, or the means over neighboring steps up to this one.

    loss: per unit of weight, with loss_low and loss_high as its range. The fields from kl to supported:
    `DRIFT_FIGURES`. tokens_per_second: since the previous point; None for the first. A figure that was not measured is
    None.
    """

    step: int
    at: datetime
    tokens: int
    loss: float | None
    loss_low: float | None
    loss_high: float | None
    kl: float | None
    agreement: float | None
    first_agreement: float | None
    supported: float | None
    grad_norm: float | None
    learning_rate: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class Curve:
    """The points of a run, oldest first. steps: how many steps they cover. tokens_before: in earlier steps."""

    points: tuple[StepFigures, ...]
    steps: int
    tokens_before: int = 0


@dataclass(frozen=True)
class Parting:
    """Two runs compared. common: the last step that both made. first: the first different step; None: there is none."""

    common: int
    first: int | None


class Curves(Aggregate):
    """The figures of training runs by step."""

    def of_run(self, run_id: str, owner: str | None, *, most: int = MOST, steps: Span = EVERY_STEP) -> Curve:
        """A run's curve with at most about `most` points. Four statements. NotFoundError: unknown or foreign run.

        steps: the first and the last step of the curve.
        """
        shown = {"run_id": run_id, "first_step": steps[0], "last_step": steps[1]}
        with self._read() as connection:
            get_owned(connection, Model, run_id, owner)
            number, first, last = connection.execute(_BOUNDS, shown).one()
            if not number:
                return Curve((), 0)
            before = connection.execute(_TOKENS_BEFORE, shown).scalar_one() if steps[0] > 0 else 0
            # In a run of few steps, each step is a point. In a run of many steps, sequence ids are evenly spaced.
            width = 1 if number <= most else -(-(last - first + 1) // most)
            rows = connection.execute(_FIGURES, {**shown, "first": first, "width": width}).all()
        return Curve(tuple(_figures(rows)), number, before)

    def trained(self, run_id: str) -> Trained:
        """How many tokens a run was trained on. Two statements."""
        with self._read() as connection:
            made, begun = connection.execute(_TOKENS_OF_RUN, {"run_id": run_id}).one()
            last = connection.execute(_TOKENS_OF_LAST, {"run_id": run_id}).scalar()
        return Trained(made, last or 0, begun)

    def parting(self, run_id: str, other_id: str) -> Parting:
        """The first step at which the figures of two runs differ, among the steps that both made. Two statements."""
        parameters = {"run_id": run_id, "other_id": other_id}
        with self._read() as connection:
            common = connection.execute(_COMMON, parameters).scalar_one()
            first = connection.execute(_DIFFERS, {**parameters, "common": common}).scalar_one()
        return Parting(common, first)

    def last_seq(self, run_id: str, owner: str | None) -> int:
        """The sequence id of the newest step; -1 if there is none. Two statements. NotFoundError as in `of_run`."""
        with self._read() as connection:
            get_owned(connection, Model, run_id, owner)
            newest = sa.select(_SEQ).where(*_OF_RUN).order_by(_SEQ.desc()).limit(1)
            found = connection.execute(newest, {"run_id": run_id}).scalar()
            return -1 if found is None else int(found)


def _figures(rows: Sequence[sa.Row[tuple[object, ...]]]) -> list[StepFigures]:
    found: list[StepFigures] = []
    for row in rows:
        seconds = (row.at - found[-1].at).total_seconds() if found else 0.0
        values = {name: value for name, value in row._mapping.items() if name != "part"}
        found.append(StepFigures(**values, tokens_per_second=row.tokens / seconds if seconds > 0 else None))
    return found
