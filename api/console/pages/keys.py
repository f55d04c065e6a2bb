"""`/keys` and `/usage`: admins create, list and revoke the keys of all projects; every project sees its usage."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta

from fastapi.responses import Response

from tinkerflow.api.call import PageOffset
from tinkerflow.api.console.charts import chart
from tinkerflow.api.console.visit import Visit, Visiting, page_router
from tinkerflow.api.identity import Identity
from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.core.plot import LINES, Line
from tinkerflow.backend.journal import KeyView, UsageKind, actor_of_key
from tinkerflow.backend.journal.project_limits import LONGEST_NAME, LimitUse

PAGE = 50
_DAYS = 30
_PROJECTS = 20  # projects with their own limits that are shown; `tinkerflow limit list` prints all
NAMES = {  # kinds of usage, as pages show them
    UsageKind.TRAINING: "trained",
    UsageKind.PREFILL: "prompt",
    UsageKind.CACHED_PREFILL: "prompt, cached",
    UsageKind.SAMPLE: "sampled",
    UsageKind.CHECKPOINT: "checkpoints",
}
router = page_router()


@router.get("/keys")
async def keys_page(visit: Visiting, offset: PageOffset = 0, new_key: bool = False, key_name: str = "") -> Response:
    """The keys. new_key, key_name: filled in by the SDK's link to this page."""
    keys = await asyncio.to_thread(_visible, visit)
    return _keys_page(visit, keys, offset, key_name=key_name[:LONGEST_NAME], opened=new_key)


@router.get("/keys/{key_id}")
async def key_page(key_id: str, visit: Visiting) -> Response:
    """One key, by its id or by the number that the SDK uses for it."""
    keys = [key for key in await asyncio.to_thread(_visible, visit) if key_id in (key.id, str(_number(key)))]
    if not keys:
        raise NotFoundError(f"key {key_id!r} does not exist")
    return _keys_page(visit, keys, only=key_id)


@router.post("/keys")
async def create_key(visit: Visiting) -> Response:
    """Create a key. Only the response to this request ever shows its secret."""
    _only_admins(visit)
    name, project = (visit.fields.get(field, "") for field in ("name", "project"))
    admin = visit.fields.get("admin") == "yes"
    actor = actor_of_key(visit.call.key_id)
    made, secret = await asyncio.to_thread(visit.journal.keys.create, name, project, admin=admin, actor=actor)
    keys = await asyncio.to_thread(_visible, visit)
    return _keys_page(visit, keys, made=made, secret=secret)


@router.post("/keys/{key_id}/revoke")
async def revoke_key(key_id: str, visit: Visiting) -> Response:
    """Revoke a key. Only admins may revoke keys other than their own."""
    if key_id != visit.call.key_id:
        _only_admins(visit)
    await asyncio.to_thread(visit.journal.keys.revoke, key_id, actor=actor_of_key(visit.call.key_id))
    visit.call.services.auth.forget(key_id)
    return visit.go("/keys" if key_id != visit.call.key_id else "/")


@router.get("/keys/{key_id}/revoke")
async def confirm_revoke_page(key_id: str, visit: Visiting) -> Response:
    """The consequences of revoking a key, and the button that revokes it."""
    key = next((key for key in await asyncio.to_thread(_visible, visit) if key.id == key_id), None)
    if key is None or key.revoked_at is not None:
        raise NotFoundError(f"key {key_id!r} does not exist")
    return visit.page("revoke.html", key=key)


@router.get("/usage")
async def usage_page(visit: Visiting) -> Response:
    """The usage of the last thirty days, by day and by project."""
    today = visit.call.services.clock.now().replace(hour=0, minute=0, second=0, microsecond=0)
    start, end = today - timedelta(days=_DAYS - 1), today + timedelta(days=1)

    def read() -> dict[str, object]:
        totals = visit.journal.usage.totals(visit.owner, start, end)
        by_project: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(NAMES.values(), 0))
        by_day: dict[str, dict[int, int]] = defaultdict(lambda: dict.fromkeys(range(1 - _DAYS, 1), 0))
        for used in totals:
            by_project[used.project][NAMES[used.kind]] += used.quantity
            if used.kind is not UsageKind.CHECKPOINT:
                by_day[NAMES[used.kind]][(used.bucket_start - today) // timedelta(days=1)] += used.quantity
        lines = [Line(name, list(days.items())) for name, days in by_day.items()][:LINES]
        return {
            "kinds": list(NAMES.values()),
            "projects": sorted(by_project.items()),
            "figure": chart("Tokens by day", lines, across="days, 0 is today") if lines else None,
            "limited": _limited(visit),
            "stored": visit.journal.usage.stored_now(visit.owner),
        }

    return visit.page("usage.html", **await asyncio.to_thread(read))


def _limited(visit: Visit) -> list[tuple[str, list[LimitUse]]]:
    """The visitor's project with its limits and their use; for admins, also projects with limits of their own."""
    limits, projects = visit.journal.project_limits, [visit.call.owner]
    if visit.owner is None:
        projects += [project for project in limits.all() if project not in projects][:_PROJECTS]
    return [(project, limits.use(project, visit.call.services.limits)) for project in projects]


def _keys_page(visit: Visit, keys: Sequence[KeyView], offset: int = 0, **values: object) -> Response:
    """The page with the keys from `offset` on. values: the form's, a new key with its secret, or the only key's id."""
    defaults = {"key_name": "", "opened": False, "made": None, "secret": "", "only": ""}
    shown = {"keys": keys[offset : offset + PAGE], "total": len(keys), "offset": offset, "size": PAGE}
    return visit.page("keys.html", **(defaults | shown | values))


def _visible(visit: Visit) -> list[KeyView]:
    """The keys that the visitor may see, newest first and revoked ones last. Admins see all keys."""
    keys = visit.journal.keys.all()
    mine = [key for key in keys if visit.call.admin or key.id == visit.call.key_id]
    return sorted(mine, key=lambda key: (key.revoked_at is not None, -key.created_at.timestamp()))


def _number(key: KeyView) -> int:
    return Identity(key.owner, key.id, key.admin).number


def _only_admins(visit: Visit) -> None:
    if not visit.call.admin:
        raise NotFoundError("this page needs an admin's key")
