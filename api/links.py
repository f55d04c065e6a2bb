"""Links that stand for themselves: whoever has one may read the one thing it names, without a key, until it expires.

A link is `{base}/api/v1/{path}?expires={unix seconds}&signature={...}`; the signature is the HMAC-SHA256 of path and
expiry under a secret that all API processes share (Journal.service_secret). For programs that download by plain HTTP:
browsers, curl, the SDK's CLI.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from datetime import UTC, datetime, timedelta
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends, HTTPException, Request

from tinkerflow.api.call import Call, Services

SECRET = "links"
LIFETIME = timedelta(hours=1)
PREFIX = "/api/v1/"


def link(call: Call, path: str) -> tuple[str, datetime]:
    """A link to `path` (below /api/v1/, undecorated) for this caller, and when it expires.

    Its base is the setting public_url, or else the URL by which the caller reached us.
    """
    services = call.services
    expires = int((services.clock.now() + LIFETIME).timestamp())
    base = services.settings.public_url.rstrip("/") or str(call.request.base_url).rstrip("/")
    signature = _signature(services.link_secret, PREFIX + path, str(expires))
    url = f"{base}{quote(PREFIX + path, safe='/:')}?expires={expires}&signature={signature}"
    return url, datetime.fromtimestamp(expires, UTC)


async def linked(request: Request) -> Services:
    """The services, when the request's URL is one of our links; HTTPException 403 when it is not, or has expired."""
    services: Services = request.app.state.services
    expires, signature = request.query_params.get("expires", ""), request.query_params.get("signature", "")
    right = _signature(services.link_secret, request.scope["path"], expires)
    if not hmac.compare_digest(signature.encode(), right.encode()):
        raise HTTPException(403, "this link is not one of ours: its signature does not fit")
    if int(expires) <= services.clock.now().timestamp():
        raise HTTPException(403, "this link has expired; ask for a new one")
    return services


Linked = Annotated[Services, Depends(linked)]


def _signature(secret: bytes, path: str, expires: str) -> str:
    digest = hmac.digest(secret, f"{expires}\n{path}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
