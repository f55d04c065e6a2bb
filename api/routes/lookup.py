"""Looking at sessions afterwards, and at what was done to them: lists, search, projects, the audit log."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import Response

from tinkerflow.api import session_models as models
from tinkerflow.api.deps import Authorised, PageLimit, PageOffset
from tinkerflow.api.links import Linked, link
from tinkerflow.api.openapi import takes
from tinkerflow.api.scope import AccessScope, visible
from tinkerflow.api.trace import trace
from tinkerflow.backend.journal import (
    AuditView,
    SessionFailure,
    SessionQuery,
    SessionState,
    SessionStatus,
    SessionSummary,
    plain_metadata,
)

router = APIRouter()
link_router = APIRouter()  # opened by a link's signature instead of a key

_RESOURCES = {
    "all": None,
    "checkpoints": "checkpoint",
    "projects": "project",
    "teams": "team",
    "organizations": "organization",
}


@router.get("/sessions")
async def sessions(
    call: Authorised,
    limit: PageLimit = 20,
    offset: PageOffset = 0,
    access_scope: AccessScope = "owned",
) -> models.SessionIds:
    """Ids of sessions, newest first."""
    owner = visible(call, access_scope)
    found = await asyncio.to_thread(call.journal.session_ids, owner, limit=limit, offset=offset)
    return models.SessionIds(sessions=found)


@router.post("/sessions/search", response_model_exclude_none=True, openapi_extra=takes(models.SearchSessions))
async def search(call: Authorised) -> models.FoundSessions:
    """Sessions that match all filters, newest first. A project that no visible session is in answers 404."""
    asked = await call.parsed(models.SearchSessions)
    query = SessionQuery(
        session_id=asked.session_id,
        display_name=asked.display_name,
        projects=asked.project_ids,
        user_metadata=asked.user_metadata,
        owners=asked.owner.owner_urns if isinstance(asked.owner, models.UserOwner) else None,
        statuses=None if asked.statuses is None else tuple(_status_query(status) for status in asked.statuses),
        limit=asked.limit,
        after=None if asked.cursor is None else (asked.cursor.last_created_at, asked.cursor.last_session_id),
    )
    owner = visible(call, "owned" if asked.owner.type == "own" else "accessible")
    found, more = await asyncio.to_thread(call.journal.search_sessions, query, owner)
    last = found[-1].session if more else None
    return models.FoundSessions(
        sessions=[_summary(one) for one in found],
        next_cursor=last and models.SearchCursor(last_created_at=last.created_at, last_session_id=last.id),
    )


@router.get("/sessions/{session_id}", response_model_exclude_none=True)
async def session(session_id: str, call: Authorised, access_scope: AccessScope = "owned") -> models.Session:
    """A session with the ids of all that it made."""

    def read() -> models.Session:
        found = call.journal.session(session_id, visible(call, access_scope))
        return models.Session(
            training_run_ids=call.journal.models_of(session_id),
            sampler_ids=[sampler.id for sampler in call.journal.samplers_of(session_id)],
            user_metadata=plain_metadata(found.user_metadata),
            display_name=found.display_name,
        )

    return await asyncio.to_thread(read)


@router.put("/sessions/{session_id}/project", openapi_extra=takes(models.AssignProject))
async def assign_project(session_id: str, call: Authorised) -> dict[str, object]:
    """Put a session, and what it made, under a project label. Any label is good: the owner stays what it is."""
    asked = await call.parsed(models.AssignProject)
    await asyncio.to_thread(
        call.journal.assign_project, session_id, visible(call), asked.project_id, key_id=call.key_id
    )
    return {}


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(session_id: str, call: Authorised) -> models.TraceExport:
    """A link to the session's timeline, which is made anew at each download."""
    await asyncio.to_thread(call.journal.session, session_id, visible(call))
    return models.TraceExport(url=link(call, f"session_traces/{session_id}")[0])


@link_router.get("/session_traces/{session_id}")
async def read_trace(session_id: str, services: Linked) -> Response:
    """The timeline, as Perfetto opens it."""

    def read() -> bytes:
        return trace(services.journal.timeline(session_id), datetime.now(UTC))

    headers = {"content-disposition": f'attachment; filename="{session_id}.pftrace"'}
    return Response(await asyncio.to_thread(read), media_type="application/json", headers=headers)


@router.get("/audit", response_model_exclude_none=True)
async def audit(
    call: Authorised,
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
    day: date | None = None,
) -> models.AuditLog:
    """What was done to keys, sessions and checkpoints on a UTC day (default: today): in one's project, or in all.

    A key and a session's label belong to `projects`. There are no teams and organizations here.
    """
    entries = await asyncio.to_thread(call.journal.audit_log, visible(call), resource=_RESOURCES[event_type], day=day)
    return models.AuditLog(entries=[_entry(entry) for entry in entries])


def _status_query(
    status: models.PlainStatus | models.ClientFinishedStatus,
) -> tuple[SessionStatus, tuple[str, ...] | None]:
    return (status.type, status.reasons if isinstance(status, models.ClientFinishedStatus) else None)


def _summary(found: SessionSummary) -> models.SessionSummary:
    session = found.session
    status: models.Active | models.Cancelled | models.ClientFinished | models.Failed
    match session.state:
        case SessionState.ACTIVE:
            status = models.Active()
        case SessionState.FINISHED:
            reason = models.FinishReason.model_validate({"type": session.finish_reason})
            status = models.ClientFinished(reason=reason, detail=session.detail)
        case SessionState.EXPIRED if session.failure is not None:
            status = _failed(session.failure)
        case SessionState.EXPIRED:
            status = models.Cancelled(detail=session.detail)
    return models.SessionSummary(
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


def _failed(failure: SessionFailure) -> models.Failed:
    reason = models.FailedReason(
        type=failure.what, request_type=failure.request_kind, **{f"{failure.what}_id": failure.id}
    )
    category: Literal["user", "internal"] = "user" if failure.category == "user" else "internal"
    return models.Failed(category=category, reason=reason, message=failure.message)


def _entry(entry: AuditView) -> models.AuditEntry:
    return models.AuditEntry(
        timestamp=entry.at,
        event=entry.event,
        event_details=dict(entry.details),
        model_id=entry.model_id,
        tinker_path=entry.tinker_path,
        purpose=entry.purpose,
    )
