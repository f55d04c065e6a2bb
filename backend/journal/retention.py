"""Which checkpoints a deployment keeps when it does not keep all: the last ones of a run, and every so many steps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal import keeping
from tinkerflow.backend.journal.checkpoints import exists
from tinkerflow.backend.journal.kinds import CheckpointKind, SamplerState
from tinkerflow.backend.journal.shares import opens_any
from tinkerflow.backend.journal.tables import Checkpoint, Sampler, WeightsShare

_KINDS = (CheckpointKind.WEIGHTS, CheckpointKind.SAMPLER_WEIGHTS)


@dataclass(frozen=True)
class Retention:
    """Of each run and kind the `last` newest are kept (0: all), and those with a step of n times `every` (0: none).

    Exports are not counted. Kept in any case: what is published, what a valid token opens, what a live sampler samples,
    and what was given a time of its own, until then. Recovery has snapshots of its own and needs no checkpoint.
    """

    last: int = 0
    every: int = 0


def delete_retired(connection: sa.Connection, rule: Retention, now: datetime, limit: int) -> list[str]:
    """Mark at most `limit` checkpoints that `rule` does not keep as deleted, the oldest first; their paths."""
    if rule.last == 0:
        return []
    newest = (col(Checkpoint.created_at).desc(), col(Checkpoint.step).desc(), col(Checkpoint.path))
    age = sa.func.row_number().over(partition_by=(col(Checkpoint.run_id), col(Checkpoint.kind)), order_by=newest)
    ranked = (
        sa.select(col(Checkpoint.path), col(Checkpoint.created_at), age.label("age"))
        .where(exists(now), col(Checkpoint.kind).in_(_KINDS))
        .subquery()
    )
    old = (
        sa.select(ranked.c.path)
        .join(Checkpoint, col(Checkpoint.path) == ranked.c.path)
        .where(ranked.c.age > rule.last, _may_go(rule, now))
        .order_by(ranked.c.created_at, ranked.c.path)
        .limit(limit)
    )
    # Asked for again, because it may have been published since the look.
    which = (col(Checkpoint.path).in_(old), col(Checkpoint.deleted_at).is_(None), _may_go(rule, now))
    return keeping.delete_these(connection, which, now, {"retention": f"last {rule.last}, every {rule.every}"})


def _may_go(rule: Retention, now: datetime) -> sa.ColumnElement[bool]:
    sampled = sa.exists().where(
        col(Sampler.model_path) == col(Checkpoint.path), col(Sampler.state) == SamplerState.LIVE
    )
    shared = sa.select(col(WeightsShare.id)).where(opens_any(now)).correlate(Checkpoint).exists()
    may = [col(Checkpoint.public).is_(False), col(Checkpoint.expires_at).is_(None), sa.not_(sampled), sa.not_(shared)]
    return sa.and_(*may, *([col(Checkpoint.step) % rule.every != 0] if rule.every else []))
