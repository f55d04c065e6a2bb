"""Upkeep of checkpoints: expiry, files to remove, and commits that differ from their rows.

The sweep of the store uses these lists. Nothing here removes a file. A list begins with the latest, because some of the
earlier files may be impossible to change or remove, such as files of another user, and must not delay others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.ids import CheckpointKind
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.checkpoints import CheckpointView, exists, is_shared, mark_deleted
from tinkerflow.backend.journal.database import Aggregate
from tinkerflow.backend.journal.tables import Checkpoint, SamplerRow, SamplerState, WeightsShare

_KINDS = (CheckpointKind.WEIGHTS, CheckpointKind.SAMPLER_WEIGHTS)


@dataclass(frozen=True)
class Retention:
    """Keep the newest checkpoints of each run and kind, and those of regular steps.

    Exports are not counted. Published checkpoints are never deleted. Checkpoints with a valid share, a live sampler or
    their own time of expiry are kept until that ends. Recovery uses its own snapshots and needs no checkpoints.

    last: how many of the newest are kept (0: all). every: steps that are multiples of this number are kept (0: none).
    """

    last: int = 0
    every: int = 0


class Upkeep(Aggregate):
    """Deletes checkpoints by time or rule, and lists checkpoints whose files or commits need upkeep."""

    def delete_expired(self, limit: int = 100) -> list[str]:
        """Mark at most `limit` expired checkpoints as deleted, in order of expiry. Returns their paths."""
        due, now = col(Checkpoint.expires_at), self._now()
        is_due = (col(Checkpoint.deleted_at).is_(None), due <= now)
        chosen = sa.select(col(Checkpoint.path)).where(*is_due).order_by(due, col(Checkpoint.path)).limit(limit)
        return self._delete(chosen, is_due, now)

    def delete_retired(self, rule: Retention, limit: int = 100) -> list[str]:
        """Mark at most `limit` checkpoints as deleted that `rule` does not keep, oldest first. Returns their paths."""
        if rule.last == 0:
            return []
        now = self._now()
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
        still = (col(Checkpoint.deleted_at).is_(None), _may_go(rule, now))
        return self._delete(old, still, now, {"retention": f"last {rule.last}, every {rule.every}"})

    def unpurged(self, limit: int = 100) -> list[tuple[str, str]]:
        """(path, attempt) of deleted checkpoints whose files may still exist, latest deletion first."""
        deleted = col(Checkpoint.deleted_at)
        statement = sa.select(col(Checkpoint.path), col(Checkpoint.attempt)).where(
            deleted.is_not(None), col(Checkpoint.purged_at).is_(None)
        )
        with self._read() as connection:
            rows = connection.execute(statement.order_by(deleted.desc(), col(Checkpoint.path)).limit(limit))
            return [(row.path, row.attempt) for row in rows]

    def purged(self, path: str, attempt: str) -> None:
        """Record that a deleted checkpoint's files were removed. A checkpoint that was saved again is not changed."""
        deleted = col(Checkpoint.deleted_at).is_not(None)
        which = (col(Checkpoint.path) == path, col(Checkpoint.attempt) == attempt, deleted)
        with self._write() as connection:
            connection.execute(sa.update(Checkpoint).where(*which).values(purged_at=self._now()))

    def unnoted(self, limit: int = 100) -> list[CheckpointView]:
        """The newest checkpoints whose commit in the store does not yet contain their publication or expiry."""
        # The condition of the partial index, word for word.
        changed = sa.text("deleted_at IS NULL AND NOT noted")
        newest = (col(Checkpoint.created_at).desc(), col(Checkpoint.path))
        return self._views(CheckpointView, sa.select(Checkpoint).where(changed).order_by(*newest).limit(limit))

    def noted(self, seen: CheckpointView) -> None:
        """Record that the store's commit agrees with `seen`. A row that has changed since stays in `unnoted`."""
        same = (
            col(Checkpoint.path) == seen.path,
            col(Checkpoint.attempt) == seen.attempt,
            col(Checkpoint.public) == seen.public,
            col(Checkpoint.expires_at).is_not_distinct_from(seen.expires_at),
        )
        with self._write() as connection:
            connection.execute(sa.update(Checkpoint).where(*same).values(noted=True))

    def _delete(
        self,
        chosen: sa.Select[tuple[str]],
        still: Sequence[sa.ColumnElement[bool]],
        now: datetime,
        details: Mapping[str, object] | None = None,
    ) -> list[str]:
        """Mark the checkpoints with the `chosen` paths as expired and deleted. Returns their paths.

        They are chosen without the write lock, so `still` is checked again, because an owner may have changed a
        checkpoint.
        """
        if not (paths := self._column(chosen)):
            return []
        with self._write() as connection:
            event = audit.AuditedEvent.CHECKPOINT_EXPIRED
            which = (col(Checkpoint.path).in_(paths), *still)
            rows = mark_deleted(connection, which, now, event, actor=audit.SERVICE, details=details)
        return [row.path for row in rows]


def _may_go(rule: Retention, now: datetime) -> sa.ColumnElement[bool]:
    # Read once. With EXISTS, SQLite reads all live samplers again for each checkpoint.
    live = (col(SamplerRow.model_path).is_not(None), col(SamplerRow.state) == SamplerState.LIVE)
    sampled = col(Checkpoint.path).in_(sa.select(col(SamplerRow.model_path)).where(*live))
    shared = sa.select(col(WeightsShare.id)).where(is_shared(now)).correlate(Checkpoint).exists()
    may = [col(Checkpoint.public).is_(False), col(Checkpoint.expires_at).is_(None), sa.not_(sampled), sa.not_(shared)]
    return sa.and_(*may, *([col(Checkpoint.step) % rule.every != 0] if rule.every else []))
