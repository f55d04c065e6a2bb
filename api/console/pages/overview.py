"""`/`: facts about the server, recent work and next steps. Also sign-in, sign-out and the static files."""

from __future__ import annotations

import asyncio
import time
from uuid import UUID

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from tinkerflow import __version__
from tinkerflow.api.bodies import SMALL
from tinkerflow.api.call import Call, Services
from tinkerflow.api.connections import accept, peer_of
from tinkerflow.api.console.prefect_links import page_of, prefect_link, prefect_pages
from tinkerflow.api.console.render import STATIC, static_file
from tinkerflow.api.console.visit import (
    COOKIE,
    SIGNED_IN,
    SignInError,
    Visiting,
    base_of,
    form,
    page_router,
    record,
    sign_in_page,
    visiting,
)
from tinkerflow.api.identity import STRANGER
from tinkerflow.api.links import base_url
from tinkerflow.api.schemas import API
from tinkerflow.backend.catalog.model_card import public_name
from tinkerflow.backend.core.ids import KEY_PREFIX, new_id
from tinkerflow.backend.core.prefect_access import find_server
from tinkerflow.backend.journal import AuditedEvent, RunQuery

_RECENT = 8
router = page_router()


@router.get("/")
async def front_page(request: Request) -> Response:
    """The overview, or the sign-in form. A client that accepts application/json but not HTML gets facts as JSON."""
    services: Services = request.app.state.services
    is_open = await services.auth.is_open()
    facts: dict[str, str | int] = {
        "service": "tinkerflow",
        "version": __version__,
        "base_url": base_url(request),
        "api": API,
        "openapi": "/openapi.json",
    }
    if prefect := await asyncio.to_thread(prefect_pages, services.settings):
        facts["prefect"] = prefect
    if is_open:
        facts["base_models"] = len(await asyncio.to_thread(services.journal.base_models.all))
    accept = request.headers.get("accept", "")
    if "application/json" in accept and "text/html" not in accept:
        return JSONResponse(facts)
    try:
        visit = await visiting(request)
    except SignInError as error:  # the front page itself is public
        return sign_in_page(request, 200, error.reason)

    def read() -> dict[str, object]:
        journal = visit.journal
        return {
            "runs": journal.run_table.page(visit.owner, RunQuery(), limit=_RECENT, offset=0),
            "samples": journal.samples.recent(visit.owner, limit=_RECENT, texts_first=False),
            "base_models": [public_name(row.name) for row in journal.base_models.all()],
        }

    key = f"{KEY_PREFIX}any" if is_open else f"{KEY_PREFIX}..."
    found = await asyncio.to_thread(read)
    link = prefect_link(visit, prefect)
    values = {"facts": facts, "prefect": prefect, "prefect_link": link, "key": key, "is_open": is_open}
    return visit.page("overview.html", **values, **found)


@router.post("/sign-in")
async def sign_in(request: Request) -> Response:
    """Sign in with a key, and redirect to the requested page. For an invalid key, send the form again with 401."""
    services: Services = request.app.state.services
    fields = await form(Call(request, STRANGER, services), SMALL)
    key, wanted = fields.get("key", "").strip(), fields.get("next", "/")
    if not key.startswith(KEY_PREFIX):
        return sign_in_page(request, 401, f"a key must start with {KEY_PREFIX}", wanted)
    try:
        identity = await services.auth.identity(key, peer_of(request))
    except HTTPException as error:
        return sign_in_page(request, 401, str(error.detail), wanted)
    accept(request)
    sign_in = new_id("signin")
    await record(services, AuditedEvent.PROJECT_SIGNED_IN, identity, identity.owner, address=peer_of(request))
    base = base_of(services)
    local = (
        wanted.startswith("/") and not wanted.startswith(("//", "/\\")) and "\n" not in wanted and "\r" not in wanted
    )
    answer = RedirectResponse(base + (wanted if local else "/"), 303)
    secure = request.url.scheme == "https" or services.settings.public_url.startswith("https:")
    answer.set_cookie(
        COOKIE,
        services.auth.token(identity, SIGNED_IN, sign_in=sign_in),
        max_age=int(SIGNED_IN.total_seconds()),
        path=base or "/",
        secure=secure,
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/sign-out")
async def sign_out(visit: Visiting) -> Response:
    """End the sign-in, in the browser and on the server."""
    services, identity = visit.call.services, visit.identity
    if identity.sign_in:
        await services.auth.sign_out(identity)
        await record(services, AuditedEvent.PROJECT_SIGNED_OUT, identity, identity.owner)
    answer = visit.go("/")
    answer.delete_cookie(COOKIE, path=base_of(visit.call.services) or "/", httponly=True, samesite="strict")
    return answer


@router.get("/prefect")
async def prefect(visit: Visiting, flow_run: UUID | None = None) -> Response:
    """Sign an admin in to the embedded Prefect server, and redirect to the page of a flow run or to the first page.

    HTTPException 403: the visitor has no admin key, as on a server that is open to all users of its machine. Prefect's
    credential is only for the service's user.
    """
    server = await asyncio.to_thread(find_server, visit.call.services.settings.data_dir)
    if server is None:
        raise HTTPException(404, "no embedded Prefect server is running here")
    if not (visit.identity.admin and visit.identity.key_id):
        raise HTTPException(
            403, "only admin keys open Prefect here; on the server's machine, `tinkerflow prefect` prints a link"
        )
    return RedirectResponse(server.link(page_of(str(flow_run or "")), time.time()), 303)


@router.get("/console/{name}")
async def static(name: str) -> Response:
    """The style sheet or the script. Their URLs change with their content."""
    if name not in STATIC:
        raise HTTPException(404, f"file {name!r} does not exist")
    content, mark = static_file(name)
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "ETag": f'"{mark}"'}
    return Response(content, media_type=STATIC[name], headers=headers)
