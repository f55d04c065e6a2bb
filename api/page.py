"""The front page: what this server is, and how to use it. It needs no key, and holds nothing that is anybody's own."""

from __future__ import annotations

import asyncio
import os
from html import escape
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from tinkerflow import __version__
from tinkerflow.api.call import API, Services
from tinkerflow.backend.ids import KEY_PREFIX
from tinkerflow.backend.settings import Settings

router = APIRouter()

_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Tinkerflow</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 42rem; margin: 3rem auto; padding: 0 1rem }}
pre {{ padding: .75rem 1rem; overflow-x: auto; border: 1px solid color-mix(in srgb, currentcolor 25%, transparent);
  border-radius: .5rem }}
</style>
</head>
<body>
<h1>Tinkerflow {version}</h1>
<p>This server fine-tunes and samples language models for programs that use the tinker SDK.{served}</p>
<p>Point the SDK here:</p>
<pre>export TINKER_BASE_URL={base}
export TINKER_API_KEY={key}</pre>
<p>{key_help}</p>
<ul>
<li><a href="/openapi.json">OpenAPI document</a> of all endpoints under <code>{api}</code></li>
{prefect}</ul>
</body>
</html>
"""


@router.get("/", include_in_schema=False)
async def front_page(request: Request) -> Response:
    """The page, or the same facts as JSON for a client that asks for application/json and not for HTML."""
    services: Services = request.app.state.services
    is_open = await services.auth.is_open()
    facts: dict[str, str | int] = {
        "service": "tinkerflow",
        "version": __version__,
        "base_url": services.settings.public_url.rstrip("/") or str(request.base_url).rstrip("/"),
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
    return HTMLResponse(_html(facts, is_open))


def _html(facts: dict[str, str | int], is_open: bool) -> str:
    count = facts.get("base_models")
    link = escape(str(facts.get("prefect", "")))
    return _HTML.format(
        version=escape(__version__),
        served="" if count is None else f" It serves {count} base model{'' if count == 1 else 's'}.",
        base=escape(str(facts["base_url"])),
        key=f"{KEY_PREFIX}any" if is_open else f"{KEY_PREFIX}...",
        key_help=f"No key has been made, so any key that starts with {KEY_PREFIX} works, and only from this machine."
        if is_open
        else "Ask whoever runs this server for a key; <code>tinkerflow key create</code> makes one.",
        api=API,
        prefect=f'<li><a href="{link}">Prefect</a>, which shows the runs</li>\n' if link else "",
    )


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
