"""Searches for checkpoints by label, metadata, kind, owner and base model, newest first, page by page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.ids import CheckpointKind
from tinkerflow.backend.journal.checkpoints import CheckpointView, exists
from tinkerflow.backend.journal.database import Aggregate, as_view, newest_page, owned_by
from tinkerflow.backend.journal.sessions import PROJECT, check_projects
from tinkerflow.backend.journal.tables import Checkpoint, Model, Session


@dataclass(frozen=True)
class CheckpointQuery:
    """The conditions of a search; None and empty metadata mean no condition.

    projects: labels of sessions, or owners of sessions without a label. user_metadata: required pairs. owners: the
    owning projects. after: created_at and path of the previous page's last checkpoint.
    """

    projects: tuple[str, ...] | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    kind: CheckpointKind | None = None
    owners: tuple[str, ...] | None = None
    base_models: tuple[str, ...] | None = None
    limit: int = 50
    after: tuple[datetime, str] | None = None


class CheckpointSearch(Aggregate):
    def search(self, query: CheckpointQuery, owner: str | None) -> tuple[list[CheckpointView], bool]:
        """At most query.limit checkpoints that match, newest first, and whether there are more.

        NotFoundError: a project of the query has no sessions of the owner.
        """
        matching = sa.select(Checkpoint).where(exists(self._now()), *owned_by(Checkpoint, owner), *_conditions(query))
        wanted = query.user_metadata.items()
        matches = (lambda row: wanted <= row.user_metadata.items()) if wanted else None
        with self._read() as connection:
            check_projects(connection, query.projects, owned_by(Session, owner))
            page, more = newest_page(
                connection, matching, "path", limit=query.limit, after=query.after, matches=matches
            )
        return [as_view(CheckpointView, row) for row in page], more


def _conditions(query: CheckpointQuery) -> list[sa.ColumnElement[bool]]:
    where: list[sa.ColumnElement[bool]] = []
    if query.projects is not None:
        labeled = sa.select(col(Model.id)).join(Session, col(Session.id) == col(Model.session_id))
        where.append(col(Checkpoint.run_id).in_(labeled.where(PROJECT.in_(query.projects))))
    if query.kind is not None:
        where.append(col(Checkpoint.kind) == query.kind)
    if query.owners is not None:
        where.append(col(Checkpoint.owner).in_(query.owners))
    if query.base_models is not None:
        where.append(col(Checkpoint.base_model).in_(query.base_models))
    return where
