"""`/sessions`: clients' sessions, and one session with its runs and samplers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from fastapi.responses import Response

from tinkerflow.api.console.visit import Visiting, page_router
from tinkerflow.api.links import link
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.journal import RunQuery, SessionQuery, plain_metadata

_MOST = 200  # runs, and samplers, shown for one session
router = page_router()


@router.get("/sessions")
async def sessions_page(visit: Visiting, after: str = "") -> Response:
    """Sessions, newest first. after: `{created_at} {id}` of the last session on the previous page."""
    found, more = await asyncio.to_thread(
        visit.journal.sessions.search, SessionQuery(after=_cursor(after), limit=50), visit.owner
    )
    last = found[-1].session if more else None
    following = None if last is None else f"{last.created_at.isoformat()} {last.id}"
    return visit.page("sessions.html", sessions=found, following=following, first=not after)


@router.get("/sessions/{session_id}")
async def session_page(session_id: str, visit: Visiting) -> Response:
    def read() -> dict[str, object]:
        journal = visit.journal
        session = journal.sessions.get(session_id, visit.owner)
        return {
            "session": session,
            "metadata": plain_metadata(session.user_metadata),
            "runs": journal.run_table.page(visit.owner, RunQuery(session_id=session_id), limit=_MOST, offset=0),
            "samplers": journal.samplers.of_session(session_id, _MOST),
        }

    found = await asyncio.to_thread(read)
    return visit.page("session.html", trace=link(visit.call, f"session_traces/{session_id}")[0], **found)


def _cursor(after: str) -> tuple[datetime, str] | None:
    if not after:
        return None
    moment, _, session_id = after.partition(" ")
    try:
        return datetime.fromisoformat(moment).astimezone(UTC), session_id
    except (ValueError, OverflowError):
        raise UserError(
            f"after is {after!r}: must be a time and a session id, as in the link to the next page"
        ) from None
