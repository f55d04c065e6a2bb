"""Sessions: creation, heartbeats, ends, lists, searches and timelines.

A session's samplers close with it. Its models are unloaded by requests, after earlier requests. The owner is the
project of the key that created it, and separates tenants. The label `project_id` only groups sessions
within an owner. The project of a session is its label, or its owner if it has no label.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.orm import aliased
from sqlmodel import col

from tinkerflow.backend.core.errors import Category, NotFoundError, StateLostError
from tinkerflow.backend.core.ids import new_id
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.checkpoints import exists
from tinkerflow.backend.journal.database import (
    Aggregate,
    UtcDateTime,
    as_view,
    get_owned,
    insert_if_absent,
    is_owned,
    locked_ids,
    missing,
    newest_page,
    owned_by,
)
from tinkerflow.backend.journal.effects import close_samplers
from tinkerflow.backend.journal.leases import answering_since
from tinkerflow.backend.journal.quotas import NO_LIMITS, Limits, count_kept, text_bytes
from tinkerflow.backend.journal.tables import (
    Checkpoint,
    Model,
    ModelState,
    Request,
    RequestState,
    SamplerRow,
    Session,
    SessionState,
    session_over,
)
from tinkerflow.backend.spec.history import Kind

PROJECT: sa.ColumnElement[str] = sa.func.coalesce(col(Session.project_id), col(Session.owner))
MOST_TIMED = 100_000  # requests in one timeline
SessionStatus = Literal["active", "cancelled", "failed", "client_finished"]

_IS_ACTIVE = col(Session.state) == SessionState.ACTIVE
_HEARTBEAT = (
    sa.update(Session)
    .where(is_owned(Session))
    .values(last_seen_at=sa.case((_IS_ACTIVE, sa.bindparam("now", type_=UtcDateTime)), else_=col(Session.last_seen_at)))
    .returning(col(Session.state))
)
_NEWEST = (col(Session.created_at).desc(), col(Session.id).desc())
_NEWER = aliased(Request, name="newer")


@dataclass(frozen=True)
class NewSession:
    """A client's session, as in create_session. key_id: the key that created it; "" if the server has no keys.

    owner: the tenant. project_id: the client's label within the tenant.
    """

    owner: str
    sdk_version: str
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, object] = field(default_factory=dict)
    project_id: str | None = None
    display_name: str | None = None
    key_id: str = ""


@dataclass(frozen=True)
class SessionFailure:
    """The failure before a session expired, in the `training_run`, `sampling_session` or `request` with this id.

    request_kind: the Kind of the request; None for a training run or sampling session. message: the error, or the
    reason of the loss.
    """

    category: Category
    what: Literal["training_run", "sampling_session", "request"]
    id: str
    request_kind: str | None
    message: str


@dataclass(frozen=True, kw_only=True)
class SessionView(NewSession):
    """A session. finish_reason: given by the client. detail: given by the client, or the reason of expiry.

    failure: for expired sessions; None if nothing had failed.
    """

    id: str
    state: SessionState
    detail: str | None
    finish_reason: str | None
    failure: SessionFailure | None
    created_at: datetime
    last_seen_at: datetime
    ended_at: datetime | None

    @property
    def project(self) -> str:
        """The label, or the owner if there is no label."""
        return self.project_id or self.owner


@dataclass(frozen=True)
class SessionSummary:
    """A session with the number and total bytes of its runs' existing checkpoints."""

    session: SessionView
    checkpoints: int
    stored_bytes: int


@dataclass(frozen=True)
class SessionQuery:
    """The conditions of a search. None and empty values mean no condition.

    statuses: pairs of a status and, for client_finished, the accepted reasons (None: all). For texts see `_matches`.
    after: created_at and id of the previous page's last session.
    """

    session_id: str | None = None
    display_name: str | None = None
    projects: tuple[str, ...] | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    owners: tuple[str, ...] | None = None
    statuses: tuple[tuple[SessionStatus, tuple[str, ...] | None], ...] | None = None
    limit: int = 50
    after: tuple[datetime, str] | None = None


@dataclass(frozen=True)
class Timed:
    """The times of a request: created, started (None if it has not started), finished."""

    id: str
    kind: Kind
    model_id: str | None
    sampler_id: str | None
    seq_id: int | None
    state: str
    base_model: str
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


_TIMED = [column.name for column in fields(Timed) if column.name != "base_model"]


class Sessions(Aggregate):
    def create(self, session: NewSession, limits: Limits = NO_LIMITS) -> str:
        """Create a session and return its id. UserError: the project has reached a limit of kept rows or bytes."""
        session_id = new_id("sess")
        with self._write() as connection:
            insert_session(connection, session_id, session, self._now(), limits)
        return session_id

    def get(self, session_id: str, owner: str | None) -> SessionView:
        """A session. NotFoundError: unknown or foreign session."""
        with self._read() as connection:
            return _view(get_owned(connection, Session, session_id, owner))

    def heartbeat(self, session_id: str, owner: str | None) -> SessionState:
        """Record a heartbeat of an active session. Returns the session's state, which is not changed. One statement.

        NotFoundError: unknown or foreign session.
        """
        with self._write(lasting=False) as connection:
            beat = {"row_id": session_id, "as_owner": owner, "now": self._now()}
            state = connection.execute(_HEARTBEAT, beat).scalar()
        if state is None:
            raise missing(Session, session_id)
        return SessionState(state)

    def finish(self, session_id: str, owner: str | None, detail: str | None = None, *, reason: str = "success") -> None:
        """End a session for its client. Its samplers close, and its models wait to be unloaded. Repeating changes
        nothing.

        detail, reason: given by the client. NotFoundError: unknown or foreign session.
        """
        said = {"detail": detail, "finish_reason": reason}
        with self._write() as connection:
            get_owned(connection, Session, session_id, owner)
            topics = _end(connection, session_id, SessionState.FINISHED, self._now(), said)
        self._publish(*topics)

    def expire(self, timeout: float) -> list[str]:
        """End sessions that sent no heartbeat or training request for `timeout` seconds. Returns their ids.

        Each ends in its own transaction, because others wait for the write lock, and thousands may expire at once. No
        session is ended unless clients could reach the API during all of that time.
        """
        before, now = self._ago(timeout), self._now()
        busy = sa.exists().where(col(Model.session_id) == col(Session.id), col(Model.last_request_at) >= before)
        silent = (_IS_ACTIVE, col(Session.last_seen_at) < before, sa.not_(busy))
        with self._read() as connection:
            since = answering_since(connection, now)
            if since is not None and since > before:
                return []
            found = list(
                connection.execute(sa.select(col(Session.id)).where(*silent).order_by(col(Session.id))).scalars()
            )
        why = f"no heartbeat since {before.isoformat(timespec='seconds')}"
        return [session_id for session_id in found if self._expire(session_id, silent, why, now)]

    def _expire(self, session_id: str, silent: Sequence[sa.ColumnElement[bool]], why: str, now: datetime) -> bool:
        """End a session unless its client has sent something since. Returns whether it was ended."""
        with self._write() as connection:
            if not locked_ids(connection, Session, col(Session.id) == session_id, *silent):
                return False
            failure = what_failed(connection, session_id)
            said = {"detail": why, "failure": None if failure is None else asdict(failure)}
            topics = _end(connection, session_id, SessionState.EXPIRED, now, said)
        self._publish(*topics)
        return True

    def assign_project(self, session_id: str, owner: str | None, project_id: str, *, key_id: str = "") -> None:
        """Give a session another label within its owner's project. Its usage and storage then count for that label.

        key_id: the key of the request, for the audit log. NotFoundError: unknown or foreign session.
        """
        with self._write() as connection:
            before = get_owned(connection, Session, session_id, owner)
            connection.execute(sa.update(Session).where(col(Session.id) == session_id).values(project_id=project_id))
            details = {
                "session_id": session_id,
                "project_id": project_id,
                "previous_project_id": before.project_id,
                "key_id": key_id,
            }
            event = audit.AuditedEvent.PROJECT_SESSION_ASSIGNED
            actor = audit.actor_of_key(key_id)
            audit.write_event(connection, self._now(), owner=before.owner, event=event, actor=actor, details=details)

    def ids(self, owner: str | None, *, limit: int, offset: int) -> list[str]:
        """Ids of the owner's sessions, newest first. One statement."""
        mine = sa.select(col(Session.id)).where(*owned_by(Session, owner))
        return self._column(mine.order_by(*_NEWEST).limit(limit).offset(offset))

    def search(self, query: SessionQuery, owner: str | None) -> tuple[list[SessionSummary], bool]:
        """At most query.limit sessions that match, newest first, and whether there are more.

        NotFoundError: a project of the query has no sessions of the owner.
        """
        mine = owned_by(Session, owner)
        matching = sa.select(Session).where(*mine, *_conditions(query))
        by_text = bool(query.user_metadata) or query.display_name is not None
        matches = partial(_matches, query) if by_text else None
        with self._read() as connection:
            check_projects(connection, query.projects, mine)
            page, more = newest_page(connection, matching, "id", limit=query.limit, after=query.after, matches=matches)
            stored = _stored(connection, [row.id for row in page], self._now())
        return [SessionSummary(_view(row), *stored.get(row.id, (0, 0))) for row in page], more

    def timeline(self, session_id: str) -> list[Timed]:
        """The times of the requests of the session's models and samplers, in order of submission.

        At most the newest MOST_TIMED of the models, and of the samplers. Two statements, without payloads.
        """
        found: list[Timed] = []
        with self._read() as connection:
            for table, of in ((Model, col(Request.model_id)), (SamplerRow, col(Request.sampler_id))):
                columns = [col(getattr(Request, name)) for name in _TIMED]
                owned = sa.select(*columns, col(table.base_model)).join(table, of == col(table.id))
                newest = owned.where(col(table.session_id) == session_id).order_by(col(Request.created_at).desc())
                found += [as_view(Timed, row) for row in connection.execute(newest.limit(MOST_TIMED))]
        return sorted(found, key=lambda request: (request.created_at, request.id))


def insert_session(
    connection: sa.Connection,
    session_id: str,
    session: NewSession,
    now: datetime,
    limits: Limits = NO_LIMITS,
    **over: object,
) -> bool:
    """Insert the row of a session unless its id exists. Returns whether it was inserted.

    over: additional columns, for a session that has already ended.
    """
    row = {
        **asdict(session),
        "id": session_id,
        "tags": list(session.tags),
        "user_metadata": dict(session.user_metadata),
        "state": SessionState.ACTIVE,
        "created_at": now,
        "last_seen_at": now,
        **over,
    }
    made = insert_if_absent(connection, Session, row)
    if made:
        named = (session.sdk_version, session.project_id, session.display_name, *session.tags)
        texts = text_bytes(*named, json.dumps(dict(session.user_metadata)))
        count_kept(connection, session.owner, "sessions", texts, limits)
    return made


def _view(row: sa.Row[Any]) -> SessionView:
    view = as_view(SessionView, row)
    return view if row.failure is None else replace(view, failure=SessionFailure(**row.failure))


def _end(
    connection: sa.Connection, session_id: str, state: SessionState, now: datetime, said: Mapping[str, Any]
) -> list[str]:
    """End an active session and close its samplers. Returns the topics; none if it had already ended.

    said: the columns with the reason.
    """
    ended = connection.execute(
        sa.update(Session)
        .where(col(Session.id) == session_id, _IS_ACTIVE)
        .values(state=state, ended_at=now, **said)
        .returning(col(Session.id))
    ).first()
    if ended is None:
        return []
    why, _ = session_over(session_id, state, said["detail"])
    topics = close_samplers(connection, session_id, why, now)
    return [*topics, f"session:{session_id}"]


# ------------------------------------------------------------------ failures of expired sessions
def what_failed(connection: sa.Connection, session_id: str) -> SessionFailure | None:
    """The failure of an expired session: a training run that was lost with its worker group, or a failed request.

    Only the last request of each model and sampler counts: after earlier failures, the client continued.
    """
    lost = (col(Model.session_id) == session_id, col(Model.state) == ModelState.LOST)
    run = connection.execute(sa.select(col(Model.id), col(Model.detail)).where(*lost).order_by(col(Model.id))).first()
    if run is not None:
        return SessionFailure(StateLostError.category, "training_run", run.id, None, str(run.detail))
    failed = [*_last(connection, Model, session_id), *_last(connection, SamplerRow, session_id)]
    if not failed:
        return None
    last = max(failed, key=lambda row: (row.finished_at, row.id))
    return SessionFailure(last.category, "request", last.id, last.kind, last.error)


def _last(connection: sa.Connection, table: type[Model] | type[SamplerRow], session_id: str) -> list[sa.Row[Any]]:
    """The last requests of the session's models or samplers, if they failed. Uses the unique constraint's index."""
    of = col(Request.model_id) if table is Model else col(Request.sampler_id)
    of_newer = col(_NEWER.model_id) if table is Model else col(_NEWER.sampler_id)
    last_seq = sa.select(sa.func.max(col(_NEWER.seq_id))).where(of_newer == col(table.id)).scalar_subquery()
    # A request whose result expired is also in state failed.
    failed = (col(Request.state) == RequestState.FAILED, col(Request.dropped_at).is_(None))
    columns = (col(Request.id), col(Request.kind), col(Request.error), col(Request.category), col(Request.finished_at))
    statement = (
        sa.select(*columns)
        .join(table, sa.and_(of == col(table.id), col(Request.seq_id) == last_seq))
        .where(col(table.session_id) == session_id, *failed)
    )
    return list(connection.execute(statement).all())


# ------------------------------------------------------------------ searching
def plain_metadata(metadata: Mapping[str, object]) -> dict[str, str]:
    """Metadata with texts as values. Old SDKs send any JSON: values that are not texts become JSON texts."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}


def check_projects(
    connection: sa.Connection, wanted: tuple[str, ...] | None, mine: tuple[sa.ColumnElement[bool], ...]
) -> None:
    """NotFoundError: a `wanted` project has no session that meets the conditions `mine`."""
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


def _matches(query: SessionQuery, row: sa.Row[Any]) -> bool:
    """Whether all metadata pairs are equal, and the id is equal or the name contains all words of display_name.

    Names are compared without regard to case.
    """
    metadata = plain_metadata(row.user_metadata)
    if any(metadata.get(key) != value for key, value in query.user_metadata.items()):
        return False
    if query.display_name is None or row.id == query.session_id:
        return True
    name = (row.display_name or "").casefold()
    return all(word in name for word in query.display_name.casefold().split())


def _stored(connection: sa.Connection, session_ids: list[str], now: datetime) -> dict[str, tuple[int, int]]:
    """The number and total bytes of checkpoints by session. One statement."""
    size = sa.cast(sa.func.sum(col(Checkpoint.size_bytes)), sa.BigInteger)
    statement = (
        sa.select(col(Model.session_id), sa.func.count(), size)
        .select_from(Checkpoint)
        .join(Model, col(Model.id) == col(Checkpoint.run_id))
        .where(col(Model.session_id).in_(session_ids), exists(now))
        .group_by(col(Model.session_id))
    )
    return {session_id: (count, size) for session_id, count, size in connection.execute(statement)}
