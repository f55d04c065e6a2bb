"""Looking for sessions: lists and searches, newest first.

A session's project is its label `project_id`, or its owner when it has none. The owner (the project of the key that
made it) is the tenant boundary; labels only sort what is inside.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.errors import NotFoundError
from tinkerflow.backend.journal.kinds import SessionState
from tinkerflow.backend.journal.statements import owned_by
from tinkerflow.backend.journal.tables import Checkpoint, Model, Session
from tinkerflow.backend.journal.views import SessionSummary, session_view

PROJECT: sa.ColumnElement[str] = sa.func.coalesce(col(Session.project_id), col(Session.owner))
_NEWEST = (col(Session.created_at).desc(), col(Session.id).desc())
_BATCH = 500  # rows read at once when texts decide, which SQL does not compare alike everywhere

SessionStatus = Literal["active", "cancelled", "failed", "client_finished"]


@dataclass(frozen=True)
class SessionQuery:
    """What to look for; None and empty mean anything.

    statuses: status, and for client_finished the reasons that count (None: all). text fields: see `_matches`.
    after: created_at and id of the last session of the page before.
    """

    session_id: str | None = None
    display_name: str | None = None
    projects: tuple[str, ...] | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    owners: tuple[str, ...] | None = None
    statuses: tuple[tuple[SessionStatus, tuple[str, ...] | None], ...] | None = None
    limit: int = 50
    after: tuple[datetime, str] | None = None


def session_ids(connection: sa.Connection, owner: str | None, limit: int, offset: int) -> list[str]:
    """Ids of sessions, newest first. One statement."""
    mine = sa.select(col(Session.id)).where(*owned_by(Session, owner))
    return list(connection.execute(mine.order_by(*_NEWEST).limit(limit).offset(offset)).scalars())


def search_sessions(
    connection: sa.Connection, query: SessionQuery, owner: str | None, now: datetime
) -> tuple[list[SessionSummary], bool]:
    """At most query.limit sessions that match, and whether there are more.

    NotFoundError for a project that no session of the caller's carries.
    """
    mine = owned_by(Session, owner)
    _check_projects(connection, query, mine)
    matching = sa.select(Session).where(*mine, *_conditions(query)).order_by(*_NEWEST)
    found: list[sa.Row[Any]] = []
    by_text = bool(query.user_metadata) or query.display_name is not None
    size, after = (_BATCH if by_text else query.limit + 1), query.after
    while len(found) <= query.limit:
        rows = connection.execute(matching.where(*_older(after)).limit(size)).all()
        found += [row for row in rows if _matches(row, query)]
        if len(rows) < size:
            break
        after = (rows[-1].created_at, rows[-1].id)
    page = found[: query.limit]
    stored = _stored(connection, [row.id for row in page], now)
    return [SessionSummary(session_view(row), *stored.get(row.id, (0, 0))) for row in page], len(found) > query.limit


def plain_metadata(metadata: Mapping[str, object]) -> dict[str, str]:
    """Metadata as clients read it: what is no text (old SDKs send any JSON) is its JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}


def _check_projects(connection: sa.Connection, query: SessionQuery, mine: tuple[sa.ColumnElement[bool], ...]) -> None:
    wanted = query.projects
    if not wanted:
        return
    known = set(connection.execute(sa.select(PROJECT).where(*mine, PROJECT.in_(wanted)).distinct()).scalars())
    for project in wanted:
        if project not in known:
            raise NotFoundError(f"project {project!r} does not exist")


def _conditions(query: SessionQuery) -> list[sa.ColumnElement[bool]]:
    where: list[sa.ColumnElement[bool]] = []
    if query.session_id is not None and query.display_name is None:
        where.append(col(Session.id) == query.session_id)
    if query.projects is not None:
        where.append(PROJECT.in_(query.projects))
    if query.owners is not None:
        where.append(col(Session.owner).in_(query.owners))
    if query.statuses is not None:
        where.append(sa.or_(*(_has_status(status, reasons) for status, reasons in query.statuses)))
    return where


def _has_status(status: SessionStatus, reasons: tuple[str, ...] | None) -> sa.ColumnElement[bool]:
    state = col(Session.state)
    match status:
        case "active":
            return state == SessionState.ACTIVE
        case "cancelled":
            return sa.and_(state == SessionState.EXPIRED, col(Session.failure).is_(None))
        case "failed":
            return sa.and_(state == SessionState.EXPIRED, col(Session.failure).is_not(None))
        case "client_finished":
            finished = state == SessionState.FINISHED
            return finished if reasons is None else sa.and_(finished, col(Session.finish_reason).in_(reasons))


def _older(after: tuple[datetime, str] | None) -> tuple[sa.ColumnElement[bool], ...]:
    if after is None:
        return ()
    created_at, session_id = after
    same = sa.and_(col(Session.created_at) == created_at, col(Session.id) < session_id)
    return (sa.or_(col(Session.created_at) < created_at, same),)


def _matches(row: sa.Row[Any], query: SessionQuery) -> bool:
    """All metadata pairs equal; and the id equal, or every word of display_name in the name, whatever its case."""
    metadata = plain_metadata(row.user_metadata)
    if any(metadata.get(key) != value for key, value in query.user_metadata.items()):
        return False
    if query.display_name is None or row.id == query.session_id:
        return True
    name = (row.display_name or "").casefold()
    return all(word in name for word in query.display_name.casefold().split())


def _stored(connection: sa.Connection, session_ids: list[str], now: datetime) -> dict[str, tuple[int, int]]:
    """Of each session: how many checkpoints its runs have, and their bytes. One statement."""
    due = col(Checkpoint.expires_at)
    size = sa.cast(sa.func.sum(col(Checkpoint.size_bytes)), sa.BigInteger)
    statement = (
        sa.select(col(Model.session_id), sa.func.count(), size)
        .select_from(Checkpoint)
        .join(Model, col(Model.id) == col(Checkpoint.run_id))
        .where(
            col(Model.session_id).in_(session_ids),
            col(Checkpoint.deleted_at).is_(None),
            sa.or_(due.is_(None), due > now),
        )
        .group_by(col(Model.session_id))
    )
    return {session_id: (count, size) for session_id, count, size in connection.execute(statement)}
