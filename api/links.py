"""Signed links, which open one resource without a key until they expire: for browsers, curl and the SDK's CLI.

A link is `{base}/api/v1/{path}?expires={unix seconds}&signature={...}`. It is signed with a secret that all API
processes share (Journal.service_secret).
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends, HTTPException, Request
from itsdangerous import Signer

from tinkerflow.api.call import Call, Services
from tinkerflow.api.schemas import API

SECRET = "links"
LIFETIME = timedelta(hours=1)


def link(call: Call, path: str) -> tuple[str, datetime]:
    """A link to `path` (below /api/v1/, unquoted) for this caller, and its time of expiry."""
    services = call.services
    expires = int((services.clock.now() + LIFETIME).timestamp())
    path = f"{API}/{path}"
    signature = _signer(services).get_signature(f"{expires}\n{path}").decode()
    url = f"{base_url(call.request)}{quote(path, safe='/:')}?expires={expires}&signature={signature}"
    return url, datetime.fromtimestamp(expires, UTC)


def base_url(request: Request) -> str:
    """The base of our URLs: the setting public_url, or else the base of the URL that the caller used."""
    services: Services = request.app.state.services
    return services.settings.public_url.rstrip("/") or str(request.base_url).rstrip("/")


async def linked(request: Request) -> Services:
    """The services, if the request's URL is a signed link. HTTPException 403: the link is invalid or has expired."""
    services: Services = request.app.state.services
    expires, signature = request.query_params.get("expires", ""), request.query_params.get("signature", "")
    if not _signer(services).verify_signature(f"{expires}\n{request.scope['path']}", signature):
        raise HTTPException(403, "this link is not valid: its signature does not match")
    if int(expires) <= services.clock.now().timestamp():
        raise HTTPException(403, "this link has expired; ask for a new one")
    return services


Linked = Annotated[Services, Depends(linked)]


def _signer(services: Services) -> Signer:
    return Signer(services.link_secret, salt="tinkerflow.links", key_derivation="hmac", digest_method=hashlib.sha256)
