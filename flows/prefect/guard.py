"""The guard in front of the embedded Prefect server: checks of each request's Host and Origin, and the sign-in page.

Prefect checks credentials itself, but has no setting for the rest. A web page whose name resolves to this machine's
address (DNS rebinding) fails the check of Host. Any other page of another origin fails the check of Origin, on REST
and on websockets, and no page can show Prefect in a frame.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from tinkerflow.backend.core.hosts import host_name, is_loopback
from tinkerflow.backend.core.prefect_access import SIGN_IN_PATH, is_valid_ticket

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_MOST_TICKET_BYTES = 200
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

    def __init__(self, app: App, credential: str, public_url: str = "") -> None:
        """app: Prefect's. credential: its auth string. public_url: of a proxy, whose host is also accepted."""
        self._app = app
        self._credential = credential
        self._public_host = urlsplit(public_url).hostname or ""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it to Prefect."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif reason := self._refusal(scope):
            await self._refuse(scope, send, reason)
        elif scope["type"] == "http" and scope["path"] == SIGN_IN_PATH:
            await self._sign_in(scope, receive, send)
        else:
            await self._app(scope, receive, _without_frames(send))

    def _refusal(self, scope: Message) -> str:
        """Why a request is refused; empty if it is not."""
        hosts, origins = _header(scope, b"host"), _header(scope, b"origin")
        if len(hosts) != 1 or not self._is_ours(host_name(hosts[0])):
            return f"Host is {', '.join(hosts)!r}: must be a name of this server's machine"
        for origin in origins:
            try:
                authority = urlsplit(origin).netloc.lower()
            except ValueError:
                authority = ""
            if authority != hosts[0].lower() and not (self._public_host and host_name(authority) == self._public_host):
                return f"Origin is {origin!r}: must be this server's own origin"
        return ""

    def _is_ours(self, host: str) -> bool:
        return is_loopback(host) or bool(host and host == self._public_host)

    @staticmethod
    async def _refuse(scope: Message, send: Send, reason: str) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": reason})
        else:
            await _answer(send, 403, reason, "text/plain; charset=utf-8")

    async def _sign_in(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve the page of a sign-in link. Its script sends the ticket, and stores the credential that it receives."""
        if scope["method"] != "POST":
            await _answer(send, 200, _PAGE, "text/html; charset=utf-8")
            return
        body, more = b"", True
        while more and len(body) <= _MOST_TICKET_BYTES:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if is_valid_ticket(self._credential, body.decode("latin-1"), time.time()):
            await _answer(send, 200, base64.b64encode(self._credential.encode()).decode(), "text/plain")
        else:
            await _answer(send, 403, "this ticket is invalid or has expired", "text/plain")


def _header(scope: Message, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _without_frames(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_NO_FRAMES]}
        await send(message)

    return send_with_headers


async def _answer(send: Send, status: int, text: str, kind: str) -> None:
    body = text.encode()
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"referrer-policy", b"no-referrer"),
        *_NO_FRAMES,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
