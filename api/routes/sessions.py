"""Sessions of clients. Models and samplers belong to a session, which lives while the client sends heartbeats."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import HTTPException
from pydantic import Field

from tinkerflow.api.call import Authorized, Router
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import FinishReason, Wire
from tinkerflow.backend.journal import NewSession, SessionState
from tinkerflow.backend.wire.validation import MAX_DETAIL, AnyMetadata, Label, OptionalText, Texts

router = Router(busy=5)


class CreateSession(Wire):
    """The client's description of a new session."""

    sdk_version: Label
    tags: Texts = ()
    user_metadata: AnyMetadata = Field(default_factory=dict)
    project_id: OptionalText = None
    display_name: OptionalText = None


class SessionCreated(Wire):
    """The id of a new session."""

    type: Literal["create_session"] = "create_session"
    session_id: str


class Heartbeat(Wire):
    """The session to keep alive."""

    session_id: str


class HeartbeatHeard(Wire):
    """The session is active."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class Finish(Wire):
    """Why the client ends its session, with an optional explanation."""

    reason: FinishReason
    detail: Annotated[str, Field(max_length=MAX_DETAIL)] | None = None


@router.post("/create_session", openapi_extra=takes(CreateSession))
async def create_session(call: Authorized) -> SessionCreated:
    """Begin a session."""
    body = await call.parsed(CreateSession)
    session = NewSession(owner=call.owner, key_id=call.key_id, **dict(body))
    return SessionCreated(session_id=await asyncio.to_thread(call.journal.sessions.create, session, call.limits))


@router.post("/session_heartbeat", openapi_extra=takes(Heartbeat))
async def heartbeat(call: Authorized) -> HeartbeatHeard:
    """Keep a session alive. 410: the session has ended, and the client then silently stops its heartbeats."""
    body = await call.parsed(Heartbeat)
    loop, urgent = asyncio.get_running_loop(), call.services.urgent
    state = await loop.run_in_executor(urgent, call.journal.sessions.heartbeat, body.session_id, call.owner)
    if state is not SessionState.ACTIVE:
        raise HTTPException(410, f"session {body.session_id} is {state}")
    return HeartbeatHeard()


@router.post("/sessions/{session_id}/finish", openapi_extra=takes(Finish))
async def finish(session_id: str, call: Authorized) -> dict[str, object]:
    """End a session. Ending it again has no effect."""
    body = await call.parsed(Finish)
    reason = body.reason.type
    await asyncio.to_thread(call.journal.sessions.finish, session_id, call.owner, body.detail, reason=reason)
    return {}
