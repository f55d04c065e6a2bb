"""The guard in front of the embedded Prefect server: checks of each request's Host and Origin, and the sign-in page.

Prefect checks credentials itself, but has no setting for the rest. A web page whose name resolves to this machine's
address (DNS rebinding) fails the check of Host. Any other page of another origin fails the check of Origin, on REST
and on websockets, and no page can show Prefect in a frame.
"""

from __future__ import annotations

import base64
import time
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from tinkerflow.backend.core.hosts import host_name, is_loopback
from tinkerflow.backend.core.prefect_access import SIGN_IN_PATH, is_valid_ticket

_MOST_TICKET_BYTES = 200
_HEADERS = {"cache-control": "no-store", "referrer-policy": "no-referrer"}
_NO_FRAMES = [(b"x-frame-options", b"SAMEORIGIN"), (b"content-security-policy", b"frame-ancestors 'self'")]

# Prefect's pages keep the base64 of the auth string in `localStorage` under this name after a person typed it in.
_PAGE = """\
<!doctype html>
<meta charset="utf-8">
<title>Sign in to Prefect</title>
<p id="text">Signing in...</p>
<script>
  const ticket = location.hash.slice(1);
  const to = new URL(new URLSearchParams(location.search).get("to") || "/", location.origin);
  history.replaceState(null, "", location.pathname);
  fetch(location.pathname, {method: "POST", body: ticket})
    .then(answer => answer.ok ? answer.text() : Promise.reject())
    .then(password => {
      localStorage.setItem("prefect-password", password);
      location.replace(to.origin === location.origin ? to : "/");
    })
    .catch(() => {
      document.getElementById("text").textContent =
        "This link is invalid or has expired. `tinkerflow prefect` prints a new one.";
    });
</script>
"""


class GuardedApp:
    """Prefect's ASGI application behind the checks."""

    def __init__(self, app: ASGIApp, credential: str, public_url: str = "") -> None:
        """app: Prefect's application. credential: its auth string. public_url: a proxy's URL, to accept its host."""
        self._app = app
        self._credential = credential
        self._public_host = urlsplit(public_url).hostname or ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it to Prefect."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answers: ASGIApp = self._app
        if reason := self._refusal(Headers(scope=scope)):
            is_http = scope["type"] == "http"
            answers = PlainTextResponse(reason, 403, _HEADERS) if is_http else WebSocketClose(1008, reason)
        elif scope["type"] == "http" and scope["path"] == SIGN_IN_PATH:
            answers = await self._sign_in(Request(scope, receive))
        await answers(scope, receive, _without_frames(send))

    def _refusal(self, headers: Headers) -> str:
        """Why a request is refused; empty if it is accepted."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(host_name(hosts[0])):
            return f"Host is {', '.join(hosts)!r}: must be a name of this server's machine"
        for origin in headers.getlist("origin"):
            try:
                authority = urlsplit(origin).netloc.lower()
            except ValueError:
                authority = ""
            if authority != hosts[0].lower() and not (self._public_host and host_name(authority) == self._public_host):
                return f"Origin is {origin!r}: must be this server's own origin"
        return ""

    def _is_ours(self, host: str) -> bool:
        return is_loopback(host) or bool(host and host == self._public_host)

    async def _sign_in(self, request: Request) -> Response:
        """The page of a sign-in link. Its script sends the ticket, and stores the credential that it receives."""
        if request.method != "POST":
            return HTMLResponse(_PAGE, headers=_HEADERS)
        ticket = b""
        with suppress(ClientDisconnect):
            async for part in request.stream():
                if len(ticket := ticket + part) > _MOST_TICKET_BYTES:
                    break
        if is_valid_ticket(self._credential, ticket.decode("latin-1"), time.time()):
            return PlainTextResponse(base64.b64encode(self._credential.encode()), headers=_HEADERS)
        return PlainTextResponse("this ticket is invalid or has expired", 403, _HEADERS)


def _without_frames(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_NO_FRAMES]}
        await send(message)

    return send_with_headers
