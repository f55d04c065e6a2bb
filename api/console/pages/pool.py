"""`/pool`: heartbeats of the service's parts, worker groups with their compiled programs, and waiting requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from fastapi.responses import Response
from markupsafe import Markup

from tinkerflow.api.console.charts import bars
from tinkerflow.api.console.render import number, size
from tinkerflow.api.console.visit import Visit, Visiting, page_router
from tinkerflow.backend.catalog.model_card import ModelCard, public_name
from tinkerflow.backend.journal import LEASE_SECONDS, BaseModelView, UsageKind

_OTHERS = "other projects"
_TOKENS = frozenset(UsageKind) - {UsageKind.CHECKPOINT, UsageKind.CACHED_PREFILL}  # usage that the devices computed
router = page_router()


@dataclass(frozen=True)
class ShownGroup:
    """A base model with its card, and the memory of its worker group's devices as a bar."""

    model: BaseModelView
    card: ModelCard
    memory: Markup | None
    waiting: int


@router.get("/pool")
async def pool_page(visit: Visiting) -> Response:
    """The health of the service."""
    return visit.page("pool.html", **await _health(visit))


@router.get("/pool/now")
async def pool_part(visit: Visiting) -> Response:
    """The health of the service, as a fragment that updates the page."""
    return visit.page("pool_now.html", **await _health(visit))


async def _health(visit: Visit) -> dict[str, object]:
    now = visit.call.services.clock.now()

    def read() -> dict[str, object]:
        journal = visit.journal
        beats = journal.leases.beats()
        hour = now.replace(minute=0, second=0, microsecond=0)
        used: Counter[str] = Counter()
        for total in journal.usage.totals(None, hour - timedelta(hours=1), hour + timedelta(hours=1)):
            if total.kind in _TOKENS:
                used[_name(visit, total.owner)] += total.quantity
        waiting: Counter[str] = Counter()
        for owner, count in journal.queue.waiting_samples().items():
            waiting[_name(visit, owner)] += count
        return {
            "beats": [(beat, beat.beat_at > now - timedelta(seconds=LEASE_SECONDS)) for beat in beats],
            "groups": [_group(visit, model) for model in journal.base_models.all()],
            "waiting_models": len(journal.queue.pending_models()),
            "waiting_samples": waiting.most_common(),
            "shares": _shares(used),
        }

    return await asyncio.to_thread(read)


def _name(visit: Visit, owner: str) -> str:
    """A project's name if this visitor may see it, or "other projects"."""
    return owner if visit.owner in (None, owner) else _OTHERS


def _group(visit: Visit, model: BaseModelView) -> ShownGroup:
    memory: Mapping[str, int] = (model.worker_group or {}).get("memory", {})
    drawn = None
    if memory:
        parts = [(name.replace("_", " "), count, size(count)) for name, count in memory.items()]
        drawn = bars(f"Memory of each device of {public_name(model.name)}", parts)
    waiting = sum(visit.journal.queue.waiting_samples(model.name).values())
    return ShownGroup(model, ModelCard.from_json(model.card), drawn, waiting)


def _shares(used: Counter[str]) -> Markup | None:
    """How the tokens of the last one to two hours were shared."""
    if not used:
        return None
    whole = used.total()
    parts = [
        (name, count, f"{100 * count / whole:.0f} %, {number(count)} tokens") for name, count in used.most_common()
    ]
    return bars("Computed tokens by project", parts)
