"""Sessions: a client's presence, to which its models and samplers belong."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, HTTPException

from tinkerflow.api.deps import Authorised
from tinkerflow.api.models import CreateSession, Finish, Heartbeat, HeartbeatHeard, SessionCreated
from tinkerflow.api.openapi import takes
from tinkerflow.backend.journal import NewSession, SessionState

router = APIRouter()


@router.post("/create_session", openapi_extra=takes(CreateSession))
async def create_session(call: Authorised) -> SessionCreated:
    """Begin a session."""
    body = await call.parsed(CreateSession)
    session = NewSession(
        owner=call.owner,
        sdk_version=body.sdk_version,
        tags=body.tags,
        user_metadata=body.user_metadata or {},
        project_id=body.project_id,
        display_name=body.display_name,
        key_id=call.key_id,
    )
    return SessionCreated(session_id=await asyncio.to_thread(call.journal.create_session, session))


@router.post("/session_heartbeat", openapi_extra=takes(Heartbeat))
async def heartbeat(call: Authorised) -> HeartbeatHeard:
    """Keep a session alive. 410 once it is over: the client then stops beating, quietly."""
    body = await call.parsed(Heartbeat)
    loop, urgent = asyncio.get_running_loop(), call.services.urgent
    state = await loop.run_in_executor(urgent, call.journal.heartbeat, body.session_id, call.owner)
    if state is not SessionState.ACTIVE:
        raise HTTPException(410, f"session {body.session_id} is {state}")
    return HeartbeatHeard()


@router.post("/sessions/{session_id}/finish", openapi_extra=takes(Finish))
async def finish(session_id: str, call: Authorised) -> dict[str, object]:
    """End a session; ending it again changes nothing."""
    body = await call.parsed(Finish)
    reason = body.reason.type
    await asyncio.to_thread(call.journal.finish_session, session_id, call.owner, body.detail, reason=reason)
    return {}
