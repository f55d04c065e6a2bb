"""Restricts the host names of requests, and the web pages that may change something through a visitor's browser.

A server that needs no key accepts only names of its own machine, the host of the setting `public_url`, and the setting
`allowed_hosts`. Otherwise a web page could point its own host name at our address, and its scripts would have our
origin (DNS rebinding). A server with keys accepts every name unless `allowed_hosts` is set, because foreign pages have
no key. Headers such as X-Forwarded-Host are ignored.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkerflow.api.errors import error_response
from tinkerflow.backend.core.errors import shown
from tinkerflow.backend.core.hosts import host_name, is_loopback
from tinkerflow.backend.journal import AWAY
from tinkerflow.backend.settings import Settings

_READS = ("GET", "HEAD", "OPTIONS")
_OWN_SITE = ("same-origin", "none")


class HostGuard:
    """Passes requests for our own names to the app. All other requests get a 403 before they are read."""

    def __init__(self, app: ASGIApp, settings: Settings, is_open: Callable[[], Awaitable[bool]]) -> None:
        """app: answers the requests. settings: define the names. is_open: whether the server needs no key."""
        self._app = app
        self._is_open = is_open
        self._public = urlsplit(settings.public_url)
        self._any = "*" in settings.allowed_hosts
        self._restricted = bool(settings.allowed_hosts)
        self._allowed = {*map(host_name, settings.allowed_hosts), self._public.hostname or ""} - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (reason := await self._refusal(scope["method"], Headers(scope=scope))) is not None:
            await error_response(scope["path"], 403, reason)(scope, receive, send)
            return

        async def send_local(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 307 and "endpoint" not in scope:
                message["headers"] = [(b"location", self._redirect(scope)), (b"content-length", b"0")]
            await send(message)

        await self._app(scope, receive, send_local)

    async def _refusal(self, method: str, headers: Headers) -> str | None:
        """The reason to refuse the request, or None."""
        hosts = headers.getlist("host")
        host = host_name(hosts[0]) if len(hosts) == 1 else ""
        try:
            is_open = await self._is_open()
        except AWAY:  # the stricter rules hold; the app reports the error if the request needs the database
            is_open = True
        if (is_open or self._restricted) and not self._answers_to(host, is_open=is_open):
            rule = "must be a name of this machine, the host of public_url, or one of allowed_hosts"
            return f"the Host header is {shown(', '.join(hosts))}: {rule}"
        if is_open and method not in _READS and not same_site(headers, self._public.netloc):
            return "this request comes from a web page of another site, so it is rejected"
        return None

    def _answers_to(self, host: str, *, is_open: bool) -> bool:
        if self._any:
            return True
        # DNS rebinding needs a name, so a restricted server with keys accepts IP addresses, which health checks use.
        return is_loopback(host) or host in self._allowed or (not is_open and _is_address(host))

    def _redirect(self, scope: Scope) -> bytes:
        """The location of the router's redirect, without a host. A final slash is added to the path or removed."""
        path = str(scope["raw_path"].decode("ascii"))
        path = path.rstrip("/") if path.endswith("/") else path + "/"
        query = scope["query_string"].decode("latin-1")
        return f"{self._public.path.rstrip('/')}/{path.lstrip('/')}{'?' + query if query else ''}".encode("latin-1")


def same_site(headers: Headers, public: str) -> bool:
    """Whether a request comes from our own pages, or from no page. public: host and port of public_url."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    known = {headers.get("host", ""), public} - {""}
    return site in _OWN_SITE and (origin is None or origin.partition("://")[2] in known)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
