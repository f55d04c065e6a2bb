"""Sessions: they begin, beat, and end; its samplers close with it, its models are unloaded in order."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.ids import new_id
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.blame import what_failed
from tinkerflow.backend.journal.effects import end_samplers
from tinkerflow.backend.journal.kinds import TAKES_WORK, Kind, SamplerState, SessionState
from tinkerflow.backend.journal.records import NewSession
from tinkerflow.backend.journal.statements import IS_PENDING, get_owned, is_owned, locked_ids, missing
from tinkerflow.backend.journal.submitting import session_over
from tinkerflow.backend.journal.tables import Model, Request, Sampler, Session
from tinkerflow.backend.journal.views import SamplerView, SessionFailure, sampler_view

_IS_ACTIVE = col(Session.state) == SessionState.ACTIVE
_HEARTBEAT = (
    sa.update(Session)
    .where(is_owned(Session))
    .values(last_seen_at=sa.case((_IS_ACTIVE, sa.bindparam("now")), else_=col(Session.last_seen_at)))
    .returning(col(Session.state))
)


def create_session(connection: sa.Connection, session: NewSession, now: datetime) -> str:
    """Store a new active session; its id."""
    session_id = new_id("sess")
    connection.execute(
        sa.insert(Session).values(
            **{**asdict(session), "tags": list(session.tags), "user_metadata": dict(session.user_metadata)},
            id=session_id,
            state=SessionState.ACTIVE,
            created_at=now,
            last_seen_at=now,
        )
    )
    return session_id


def heartbeat(connection: sa.Connection, session_id: str, owner: str | None, now: datetime) -> SessionState:
    """Note that an active session's client lives; the session's state. One statement."""
    beat = {"row_id": session_id, "as_owner": owner, "now": now}
    state = connection.execute(_HEARTBEAT, beat).scalar()
    if state is None:
        raise missing(Session, session_id)
    return SessionState(state)


def end_session(
    connection: sa.Connection,
    session_id: str,
    state: SessionState,
    detail: str | None,
    now: datetime,
    *,
    finish_reason: str | None = None,
    failure: SessionFailure | None = None,
) -> list[str]:
    """End an active session and close its samplers; the bell's topics, none when it was over already."""
    said = {"detail": detail, "finish_reason": finish_reason, "failure": None if failure is None else asdict(failure)}
    ended = connection.execute(
        sa.update(Session)
        .where(col(Session.id) == session_id, _IS_ACTIVE)
        .values(state=state, ended_at=now, **said)
        .returning(col(Session.id))
    ).first()
    if ended is None:
        return []
    live = (col(Sampler.session_id) == session_id, col(Sampler.state) == SamplerState.LIVE)
    why, _ = session_over(session_id, state, detail)
    topics = end_samplers(connection, locked_ids(connection, Sampler, *live), SamplerState.CLOSED, why, now)
    return [*topics, f"session:{session_id}"]


def finish_session(
    connection: sa.Connection, session_id: str, owner: str | None, reason: str, detail: str | None, now: datetime
) -> list[str]:
    """The client says that it is done; the bell's topics."""
    get_owned(connection, Session, session_id, owner)
    return end_session(connection, session_id, SessionState.FINISHED, detail, now, finish_reason=reason)


def assign_project(
    connection: sa.Connection, session_id: str, owner: str | None, project_id: str, key_id: str, now: datetime
) -> None:
    """Put a session under another label; what it used and stores counts there from now on. key_id: who asks."""
    before = get_owned(connection, Session, session_id, owner)
    connection.execute(sa.update(Session).where(col(Session.id) == session_id).values(project_id=project_id))
    details = {
        "session_id": session_id,
        "project_id": project_id,
        "previous_project_id": before.project_id,
        "key_id": key_id,
    }
    audit.note(connection, now, owner=before.owner, event=audit.Event.PROJECT_SESSION_ASSIGNED, details=details)


def expire_sessions(connection: sa.Connection, before: datetime, now: datetime) -> tuple[list[str], list[str]]:
    """End the sessions from which neither a heartbeat nor a training request came since `before`; (ids, topics)."""
    busy = sa.exists().where(col(Model.session_id) == col(Session.id), col(Model.last_request_at) >= before)
    silent = (_IS_ACTIVE, col(Session.last_seen_at) < before, sa.not_(busy))
    expired = locked_ids(connection, Session, *silent)
    topics: list[str] = []
    for session_id in expired:
        why = f"no heartbeat since {before.isoformat(timespec='seconds')}"
        failure = what_failed(connection, session_id)
        topics += end_session(connection, session_id, SessionState.EXPIRED, why, now, failure=failure)
    return expired, topics


def models_of(connection: sa.Connection, session_id: str) -> list[str]:
    """Ids of the session's models, in any state, oldest first."""
    oldest = (col(Model.created_at), col(Model.id))
    statement = sa.select(col(Model.id)).where(col(Model.session_id) == session_id).order_by(*oldest)
    return list(connection.execute(statement).scalars())


def live_models(connection: sa.Connection, session_id: str) -> list[str]:
    """Ids of the session's models that are being created or live."""
    of_session = (col(Model.session_id) == session_id, col(Model.state).in_(TAKES_WORK))
    return list(connection.execute(sa.select(col(Model.id)).where(*of_session).order_by(col(Model.id))).scalars())


def abandoned_models(connection: sa.Connection) -> list[str]:
    """Ids of models that still take work although their session is over, and that nobody unloads yet."""
    unloading = sa.exists().where(col(Request.model_id) == col(Model.id), col(Request.kind) == Kind.UNLOAD, IS_PENDING)
    statement = (
        sa.select(col(Model.id))
        .join(Session, col(Session.id) == col(Model.session_id))
        .where(col(Model.state).in_(TAKES_WORK), col(Session.state) != SessionState.ACTIVE, sa.not_(unloading))
        .order_by(col(Model.id))
    )
    return list(connection.execute(statement).scalars())


def samplers_of(connection: sa.Connection, session_id: str) -> list[SamplerView]:
    """The session's samplers, in any state."""
    statement = sa.select(Sampler).where(col(Sampler.session_id) == session_id).order_by(col(Sampler.id))
    return [sampler_view(row) for row in connection.execute(statement)]
