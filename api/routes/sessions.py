"""Sessions: a client's presence, to which its models and samplers belong."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException

from api.deps import JournalDep, Owner, parsed
from api.models import CreateSession, Finish, Heartbeat, HeartbeatHeard, SessionCreated
from backend.journal import NewSession, SessionState

router = APIRouter()


@router.post("/create_session")
async def create_session(
    body: Annotated[CreateSession, Depends(parsed(CreateSession))], owner: Owner, journal: JournalDep
) -> SessionCreated:
    """Begin a session."""
    session = NewSession(
        owner=owner,
        sdk_version=body.sdk_version,
        tags=body.tags,
        user_metadata=body.user_metadata or {},
        project_id=body.project_id,
        display_name=body.display_name,
    )
    return SessionCreated(session_id=await asyncio.to_thread(journal.create_session, session))


@router.post("/session_heartbeat")
async def heartbeat(
    body: Annotated[Heartbeat, Depends(parsed(Heartbeat))], owner: Owner, journal: JournalDep
) -> HeartbeatHeard:
    """Keep a session alive. 410 once it is over: the client then stops beating, quietly."""
    state = await asyncio.to_thread(journal.heartbeat, body.session_id, owner)
    if state is not SessionState.ACTIVE:
        raise HTTPException(410, f"session {body.session_id} is {state}")
    return HeartbeatHeard()


@router.post("/sessions/{session_id}/finish")
async def finish(
    session_id: str, body: Annotated[Finish, Depends(parsed(Finish))], owner: Owner, journal: JournalDep
) -> dict[str, object]:
    """End a session; ending it again changes nothing."""
    detail = f"{body.reason.type}: {body.detail}" if body.detail else body.reason.type
    await asyncio.to_thread(journal.finish_session, session_id, owner, detail)
    return {}
