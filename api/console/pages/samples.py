"""`/samples`: recent samples, their tokens by hour, and one sample with its texts."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from fastapi.responses import Response

from tinkerflow.api.console import samples
from tinkerflow.api.console.charts import chart
from tinkerflow.api.console.pages.keys import NAMES
from tinkerflow.api.console.visit import Visiting, page_router
from tinkerflow.backend.core.plot import Line
from tinkerflow.backend.journal import UsageKind

_HOURS = 48
_KINDS = (UsageKind.SAMPLE, UsageKind.PREFILL, UsageKind.CACHED_PREFILL)
router = page_router()


@router.get("/samples")
async def samples_page(visit: Visiting) -> Response:
    """The newest samples, and the tokens by hour in the last two days."""
    now = visit.call.services.clock.now().replace(minute=0, second=0, microsecond=0)
    start, end = now - timedelta(hours=_HOURS - 1), now + timedelta(hours=1)
    totals = await asyncio.to_thread(visit.journal.usage.totals, visit.owner, start, end)
    lines = []
    for kind in _KINDS:
        by_hour = dict.fromkeys(range(1 - _HOURS, 1), 0)
        for used in totals:
            if used.kind is kind:
                by_hour[round((used.bucket_start - now) / timedelta(hours=1))] += used.quantity
        if any(by_hour.values()):
            lines.append(Line(NAMES[kind], list(by_hour.items())))
    figure = chart("Tokens by hour", lines, across="hours from now") if lines else None
    return visit.page("samples.html", samples=await samples.shown(visit, limit=50), figure=figure)


@router.get("/samples/{request_id}")
async def sample_page(request_id: str, visit: Visiting) -> Response:
    found = await asyncio.to_thread(visit.journal.samples.get, request_id, visit.owner)
    return visit.page("sample.html", shown=await samples.read(visit, found))
