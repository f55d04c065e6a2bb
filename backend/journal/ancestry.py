"""The ancestry of training runs: the runs that gave a run its first checkpoint, and those that began with its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.database import Aggregate, owned_by
from tinkerflow.backend.journal.run_values import chosen_runs
from tinkerflow.backend.journal.tables import Checkpoint, Model, ModelState
from tinkerflow.backend.journal.training_runs import RUN_NAME, WITH_SESSION

MOST_BEFORE, MOST_AFTER = 10, 20
_RUN = sa.select(col(Model.id), RUN_NAME.label("name"), col(Model.origin), col(Model.origin_run))
_OF_RUN = col(Checkpoint.run_id) == col(Model.id)
_NUMBER = sa.select(sa.func.count()).select_from(Checkpoint).where(_OF_RUN).correlate(Model).scalar_subquery()
_NEWEST = sa.select(sa.func.max(col(Checkpoint.created_at))).where(_OF_RUN).correlate(Model).scalar_subquery()
_SAVES = sa.select(col(Model.id), col(Model.state), _NUMBER.label("number"), _NEWEST.label("newest"))


@dataclass(frozen=True)
class RelatedRun:
    """A run of an ancestry. name: "" if it has none. origin: the checkpoint that it began with; None: a base model."""

    id: str
    name: str
    origin: str | None


@dataclass(frozen=True)
class RunSaves:
    """A run's number of checkpoints, including deleted ones. newest: when the newest was saved, or None."""

    id: str
    state: ModelState
    number: int
    newest: datetime | None


class Ancestries(Aggregate):
    """The relation of runs to the runs that gave them their first checkpoints."""

    def before(self, run_id: str, owner: str | None) -> list[RelatedRun]:
        """The run and at most MOST_BEFORE ancestors, oldest first, as far back as the owner may see them."""
        found: list[RelatedRun] = []
        wanted: str | None = run_id
        with self._read() as connection:
            while wanted is not None and len(found) <= MOST_BEFORE:
                one = _RUN.select_from(WITH_SESSION).where(col(Model.id) == wanted, *owned_by(Model, owner))
                row = connection.execute(one).one_or_none()
                if row is None:
                    break
                found.append(RelatedRun(row.id, row.name, row.origin))
                wanted = row.origin_run
        return found[::-1]

    def after(self, run_id: str, owner: str | None) -> list[RelatedRun]:
        """The newest MOST_AFTER runs that began with a checkpoint of this run. One statement."""
        newest = (col(Model.created_at).desc(), col(Model.id))
        later = _RUN.select_from(WITH_SESSION).where(col(Model.origin_run) == run_id, *owned_by(Model, owner))
        with self._read() as connection:
            rows = connection.execute(later.order_by(*newest).limit(MOST_AFTER)).all()
        return [RelatedRun(row.id, row.name, row.origin) for row in rows]

    def saves(self, projects: Collection[str], *, live_only: bool) -> list[RunSaves]:
        """The saves of each run of these projects, oldest run first. No projects: all projects. One statement.

        live_only: only runs that accept work.
        """
        with self._read() as connection:
            rows = connection.execute(chosen_runs(_SAVES, projects, live_only=live_only)).all()
        return [RunSaves(row.id, ModelState(row.state), row.number, row.newest) for row in rows]
