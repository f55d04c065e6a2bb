"""`/`: what this server is, what was done lately, and what to do next. Signing in and out, and the static files."""

from __future__ import annotations

import asyncio
import os
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from tinkerflow import __version__
from tinkerflow.api.call import API, Services
from tinkerflow.api.console.render import STATIC, static_file
from tinkerflow.api.console.visit import (
    COOKIE,
    SIGNED_IN,
    SignInError,
    Visiting,
    base_of,
    form,
    page_router,
    sign_in_page,
    visiting,
)
from tinkerflow.api.links import base_url
from tinkerflow.backend.core.ids import KEY_PREFIX
from tinkerflow.backend.settings import Settings

_RECENT = 8
router = page_router()


@router.get("/")
async def front_page(request: Request) -> Response:
    """The overview, or what signs a visitor in; the server's facts as JSON for who asks for application/json alone."""
    services: Services = request.app.state.services
    is_open = await services.auth.is_open()
    facts: dict[str, str | int] = {
        "service": "tinkerflow",
        "version": __version__,
        "base_url": base_url(request),
        "api": API,
        "openapi": "/openapi.json",
    }
    if prefect := _prefect_page(services.settings):
        facts["prefect"] = prefect
    if is_open:
        facts["base_models"] = len(await asyncio.to_thread(services.journal.base_models.all))
    accept = request.headers.get("accept", "")
    if "application/json" in accept and "text/html" not in accept:
        return JSONResponse(facts)
    try:
        visit = await visiting(request)
    except SignInError as error:  # the front page itself is everybody's
        return sign_in_page(request, 200, error.reason)

    def read() -> dict[str, object]:
        journal = visit.journal
        return {
            "runs": journal.models.runs(visit.owner, limit=_RECENT, offset=0),
            "samples": journal.samples.recent(visit.owner, limit=_RECENT, texts_first=False),
            "base_models": journal.base_models.all(),
        }

    key = f"{KEY_PREFIX}any" if is_open else f"{KEY_PREFIX}..."
    found = await asyncio.to_thread(read)
    return visit.page("overview.html", facts=facts, prefect=facts.get("prefect"), key=key, is_open=is_open, **found)


@router.post("/sign-in")
async def sign_in(request: Request) -> Response:
    """Take a key, and lead to the page that was asked for; 401 and the form again for a key that is none."""
    services: Services = request.app.state.services
    fields = await form(request)
    key = fields.get("key", "").strip()
    if not key.startswith(KEY_PREFIX):
        return sign_in_page(request, 401, f"a key starts with {KEY_PREFIX}")
    try:
        identity = await services.auth.identity(key)
    except HTTPException as error:
        return sign_in_page(request, 401, str(error.detail))
    base, wanted = base_of(services), fields.get("next", "/")
    local = (
        wanted.startswith("/") and not wanted.startswith(("//", "/\\")) and "\n" not in wanted and "\r" not in wanted
    )
    answer = RedirectResponse(base + (wanted if local else "/"), 303)
    secure = request.url.scheme == "https" or services.settings.public_url.startswith("https:")
    answer.set_cookie(
        COOKIE,
        services.auth.token(identity, SIGNED_IN),
        max_age=int(SIGNED_IN.total_seconds()),
        path=base or "/",
        secure=secure,
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/sign-out")
async def sign_out(visit: Visiting) -> Response:
    """Forget who was signed in on this browser."""
    answer = visit.go("/")
    answer.delete_cookie(COOKIE, path=base_of(visit.call.services) or "/", httponly=True, samesite="strict")
    return answer


@router.get("/console/{name}")
async def static(name: str) -> Response:
    """The style sheet or the script. Their URLs change with their content."""
    if name not in STATIC:
        raise HTTPException(404, f"there is no file {name!r}")
    content, mark = static_file(name)
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "ETag": f'"{mark}"'}
    return Response(content, media_type=STATIC[name], headers=headers)


def _prefect_page(settings: Settings) -> str | None:
    """Where Prefect's page is, None when that is not known here or there is none."""
    if settings.prefect == "embedded":
        return f"http://127.0.0.1:{settings.prefect_port}" if settings.prefect_port else None
    if settings.prefect == "external":
        url = os.environ.get("PREFECT_UI_URL") or os.environ.get("PREFECT_API_URL", "").removesuffix("/api")
        parts = urlsplit(url)
        # A user and password in the URL are for our own requests: strangers see this page.
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() or None
    return None
