"""`/training_runs/{run_id}/events`: a run's events, as a fragment of its page that updates while the run trains."""

from __future__ import annotations

import asyncio
import logging

from fastapi.responses import Response

from tinkerflow.api.console.visit import Visit, Visiting, page_router
from tinkerflow.backend.journal import ModelView, RunEvent
from tinkerflow.backend.journal.tables import TAKES_WORK

router = page_router()


@router.get("/training_runs/{run_id}/events")
async def events_part(run_id: str, visit: Visiting, seen: str = "") -> Response:
    """The events of a run, newest first; 204 if there are none since `seen`."""
    run = await asyncio.to_thread(visit.journal.models.get, run_id, visit.owner)
    if seen and seen == await asyncio.to_thread(_state, visit, run):
        return Response(status_code=204)
    return visit.page("events.html", run=run, **await asyncio.to_thread(events_of, visit, run))


def events_of(visit: Visit, run: ModelView) -> dict[str, object]:
    """The values for events.html, read with two statements."""
    state = _state(visit, run)  # read first, so that later events count as new
    events = visit.journal.run_events.newest(run.id)
    begin = f"created from {run.origin}" if run.origin else f"created on {run.base_model}"
    if refused := not run.base_model:  # the request named an unknown checkpoint, or was invalid
        begin = f"not created: {run.detail}"
    events.append(RunEvent(run.created_at, logging.ERROR if refused else logging.INFO, begin))
    return {"events": events, "events_state": state, "events_live": run.state in TAKES_WORK}


def _state(visit: Visit, run: ModelView) -> str:
    return f"{run.state}{visit.journal.run_events.last(run.id)}"
