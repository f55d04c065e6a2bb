"""Information about sessions (lists, search, project labels and timelines), and the audit log."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime
from typing import Annotated, Literal

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import AwareDatetime, Field

from tinkerflow.api.call import AccessScope, Authorized, PageLimit, PageOffset, Router
from tinkerflow.api.links import Linked, link
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import FinishedBecause, FinishReason, Names, Owner, OwnOwner, UserOwner, Wire
from tinkerflow.api.trace import trace
from tinkerflow.backend.journal import SessionFailure, SessionQuery, SessionState, SessionSummary, plain_metadata

router = Router(busy=2)
link_router = APIRouter()  # opened by a signed link instead of a key


class AssignProject(Wire):
    """The new project label of a session."""

    project_id: str = Field(min_length=1, max_length=128)


class PlainStatus(Wire):
    """Filter: sessions in this status."""

    type: Literal["active", "cancelled", "failed"]


class ClientFinishedStatus(Wire):
    """Filter: sessions that the client ended, for one of these reasons or for any reason."""

    type: Literal["client_finished"]
    reasons: tuple[FinishedBecause, ...] | None = Field(default=None, min_length=1, max_length=100)


class SearchCursor(Wire):
    """The last session of a page. The next page begins after it."""

    last_created_at: AwareDatetime
    last_session_id: str


class SearchSessions(Wire):
    """Filters of a search. A session must match all of them."""

    session_id: str | None = None
    project_ids: Names | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: str | None = Field(default=None, min_length=1)
    owner: Owner = OwnOwner()
    statuses: tuple[Annotated[PlainStatus | ClientFinishedStatus, Field(discriminator="type")], ...] | None = Field(
        default=None, min_length=1, max_length=100
    )
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None


class SessionDetails(Wire):
    """A session, and the ids of its models and samplers."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str]
    display_name: str | None = None


class SessionIds(Wire):
    """Ids of sessions, newest first."""

    sessions: list[str]


class ActiveStatus(Wire):
    """The session's client is connected."""

    type: Literal["active"] = "active"


class CancelledStatus(Wire):
    """The session's client stopped sending heartbeats, and none of its requests had failed."""

    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class FinishedStatus(Wire):
    """The session's client ended it."""

    type: Literal["client_finished"] = "client_finished"
    reason: FinishReason
    detail: str | None = None


class FailedReason(Wire):
    """The object that failed: its type, and the id for that type."""

    type: Literal["request", "training_run", "sampling_session"]
    request_id: str | None = None
    request_type: str | None = None
    training_run_id: str | None = None
    sampling_session_id: str | None = None


class FailedStatus(Wire):
    """The session's client stopped sending heartbeats after a failure."""

    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: FailedReason
    message: str


class FoundSession(Wire):
    """A session that was found. project_id: its label, or its owner if it has no label."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: ActiveStatus | CancelledStatus | FinishedStatus | FailedStatus
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str]
    checkpoint_storage_bytes: int


class FoundSessions(Wire):
    """A page of sessions, newest first. next_cursor: absent on the last page."""

    sessions: list[FoundSession]
    next_cursor: SearchCursor | None = None


class TraceExport(Wire):
    """A link to the trace. It is always ready, because the trace is created at download."""

    status: Literal["ready"] = "ready"
    url: str


class AuditEntry(Wire):
    """One event of the audit log."""

    timestamp: datetime
    event: str
    event_details: dict[str, object]
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditPage(Wire):
    """Events sorted by time."""

    entries: list[AuditEntry]


@router.get("/sessions")
async def sessions(
    call: Authorized,
    limit: PageLimit = 20,
    offset: PageOffset = 0,
    access_scope: AccessScope = "owned",
) -> SessionIds:
    """Ids of sessions, newest first."""
    owner = call.visible(access_scope)
    found = await asyncio.to_thread(call.journal.sessions.ids, owner, limit=limit, offset=offset)
    return SessionIds(sessions=found)


@router.post("/sessions/search", response_model_exclude_none=True, openapi_extra=takes(SearchSessions))
async def search(call: Authorized) -> FoundSessions:
    """Sessions that match all filters, newest first; 404 for a project without a visible session."""
    asked = await call.parsed(SearchSessions)
    query = SessionQuery(
        session_id=asked.session_id,
        display_name=asked.display_name,
        projects=asked.project_ids,
        user_metadata=asked.user_metadata,
        owners=asked.owner.owner_urns if isinstance(asked.owner, UserOwner) else None,
        statuses=None
        if asked.statuses is None
        else tuple((status.type, getattr(status, "reasons", None)) for status in asked.statuses),
        limit=asked.limit,
        after=None if asked.cursor is None else (asked.cursor.last_created_at, asked.cursor.last_session_id),
    )
    owner = call.visible("owned" if asked.owner.type == "own" else "accessible")
    found, more = await asyncio.to_thread(call.journal.sessions.search, query, owner)
    last = found[-1].session if more else None
    return FoundSessions(
        sessions=[_summary(one) for one in found],
        next_cursor=last and SearchCursor(last_created_at=last.created_at, last_session_id=last.id),
    )


@router.get("/sessions/{session_id}", response_model_exclude_none=True)
async def session(session_id: str, call: Authorized, access_scope: AccessScope = "owned") -> SessionDetails:
    """A session, with the ids of its models and samplers."""

    def read() -> SessionDetails:
        found = call.journal.sessions.get(session_id, call.visible(access_scope))
        return SessionDetails(
            training_run_ids=call.journal.models.of_session(session_id),
            sampler_ids=[sampler.id for sampler in call.journal.samplers.of_session(session_id)],
            user_metadata=plain_metadata(found.user_metadata),
            display_name=found.display_name,
        )

    return await asyncio.to_thread(read)


@router.put("/sessions/{session_id}/project", openapi_extra=takes(AssignProject))
async def assign_project(session_id: str, call: Authorized) -> dict[str, object]:
    """Assign a project label to a session and all its contents. Any label is allowed. The owner does not change."""
    asked = await call.parsed(AssignProject)
    await asyncio.to_thread(
        call.journal.sessions.assign_project, session_id, call.visible(), asked.project_id, key_id=call.key_id
    )
    return {}


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(session_id: str, call: Authorized) -> TraceExport:
    """A link to the session's timeline, which is created at each download."""
    await asyncio.to_thread(call.journal.sessions.get, session_id, call.visible())
    return TraceExport(url=link(call, f"session_traces/{session_id}")[0])


@link_router.get("/session_traces/{session_id}")
async def read_trace(session_id: str, services: Linked) -> Response:
    """The session's timeline, in a format that Perfetto opens."""

    def read() -> bytes:
        return trace(services.journal.sessions.timeline(session_id), datetime.now(UTC))

    headers = {"content-disposition": f'attachment; filename="{session_id}.pftrace"'}
    return Response(await asyncio.to_thread(read), media_type="application/json", headers=headers)


@router.get("/audit", response_model_exclude_none=True)
async def audit(
    call: Authorized,
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
    day: date | None = None,
) -> AuditPage:
    """The events of keys, sessions, checkpoints and uploaded images on a UTC day (default: today).

    An ordinary key sees its own project, an admin key all projects. Events of keys and of session labels are of the
    type `projects`. This server has no teams or organizations.
    """
    resource = None if event_type == "all" else event_type.removesuffix("s")
    entries = await asyncio.to_thread(call.journal.audit.entries, call.visible(), resource=resource, day=day)
    return AuditPage(
        entries=[AuditEntry.of(entry, timestamp=entry.at, event_details=entry.details) for entry in entries]
    )


def _summary(found: SessionSummary) -> FoundSession:
    session = found.session
    status: ActiveStatus | CancelledStatus | FinishedStatus | FailedStatus
    match session.state:
        case SessionState.ACTIVE:
            status = ActiveStatus()
        case SessionState.FINISHED:
            reason = FinishReason.model_validate({"type": session.finish_reason})
            status = FinishedStatus(reason=reason, detail=session.detail)
        case SessionState.EXPIRED if session.failure is not None:
            status = _failed(session.failure)
        case SessionState.EXPIRED:
            status = CancelledStatus(detail=session.detail)
    return FoundSession(
        session_id=session.id,
        created_at=session.created_at,
        owner=session.owner,
        project_id=session.project,
        status=status,
        checkpoints_count=found.checkpoints,
        display_name=session.display_name,
        user_metadata=plain_metadata(session.user_metadata),
        checkpoint_storage_bytes=found.stored_bytes,
    )


def _failed(failure: SessionFailure) -> FailedStatus:
    reason = FailedReason(type=failure.what, request_type=failure.request_kind, **{f"{failure.what}_id": failure.id})
    category: Literal["user", "internal"] = "user" if failure.category == "user" else "internal"
    return FailedStatus(category=category, reason=reason, message=failure.message)
