"""One visit by a person's browser: the visitor, protection of forms, and the page sent in response.

A person signs in with a key. The cookie holds a token for the key (api/tokens.py), so revoking the key ends the visit.
Scripts cannot read the cookie, and requests from other sites do not carry it. On a server that needs no key, visits
from this machine need no sign-in. A form that changes something must come from our own pages. It must repeat a mark
that only our pages contain, and the browser's headers must not name another site as its origin.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.routing import APIRoute

from tinkerflow.api.call import Call, Services
from tinkerflow.api.connections import accept, peer_of
from tinkerflow.api.console.render import render
from tinkerflow.api.errors import log_failure, message_of, status_of
from tinkerflow.api.hosts import same_site
from tinkerflow.api.identity import LOCAL, Identity
from tinkerflow.api.links import base_url
from tinkerflow.backend.core.errors import TinkerflowError
from tinkerflow.backend.core.ids import KEY_PREFIX
from tinkerflow.backend.journal import AWAY, AuditedEvent, Journal, actor_of_key

COOKIE = "tinkerflow"
SIGNED_IN = timedelta(hours=12)
FORM_BYTES = 256 * 1024
MARK = "csrf"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}


class SignInError(Exception):
    """The visitor must sign in first. reason: why the token was refused, or "" if none was sent."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class FormFields(dict[str, str]):
    """The fields of a form. A field that was sent several times maps to its last value."""

    def __init__(self, sent: Sequence[tuple[str, str]]) -> None:
        """sent: the submitted names and values, in order."""
        super().__init__(sent)
        self._sent = sent

    def every(self, name: str) -> list[str]:
        """All values of a field, in order."""
        return [value for sent, value in self._sent if sent == name]


@dataclass(frozen=True)
class Visit:
    """One authorized visit. fields: the submitted form's fields; empty for a GET request."""

    call: Call
    fields: FormFields = field(default_factory=lambda: FormFields([]))

    @property
    def journal(self) -> Journal:
        return self.call.journal

    @property
    def owner(self) -> str | None:
        """The project whose rows the visitor may see; None: all projects."""
        return self.call.visible()

    @property
    def identity(self) -> Identity:
        return self.call.identity

    def page(self, template: str, **values: object) -> Response:
        """Render a template with `values` and the values that all pages share."""
        return HTMLResponse(render(template, self._common() | values), 200, {"Cache-Control": "no-store"})

    def go(self, path: str) -> Response:
        """Redirect the browser to another page of the console."""
        return RedirectResponse(base_of(self.call.services) + path, 303)

    def _common(self) -> dict[str, object]:
        return {
            "base": base_of(self.call.services),
            "path": self.call.request.scope["path"],
            "me": self.identity,
            "csrf": mark_of(self.call.services, self.identity),
        }


async def visiting(request: Request) -> Visit:
    """The visit, if the visitor is signed in or need not be. SignInError: the visitor must sign in.

    HTTPException 403: a change that our own pages did not send. 404: the URL contains a NUL character.
    """
    services: Services = request.app.state.services
    identity = await _identity(request, services)
    accept(request)
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise HTTPException(404, "the URL contains a NUL character (%00): no page has such a URL")
    visit = Visit(Call(request, identity, services))
    if request.method == "GET":
        return visit
    fields = await form(visit.call)
    shown = fields.pop(MARK, "") or request.headers.get("x-csrf", "")
    if not hmac.compare_digest(shown.encode(), mark_of(services, identity).encode()):
        raise HTTPException(403, "this form is not from one of your pages, or has expired: go back and reload the page")
    return Visit(visit.call, fields)


Visiting = Annotated[Visit, Depends(visiting)]


async def form(call: Call, most: int = FORM_BYTES) -> FormFields:
    """The fields of a form sent by one of our pages. HTTPException 403: another site sent it."""
    if not same_site(call.request.headers, urlsplit(call.services.settings.public_url).netloc):
        raise HTTPException(403, "this form comes from another site, so it is rejected")
    body = (await call.body(most)).decode("utf-8", "replace")
    return FormFields([(name, value.replace("\0", "")) for name, value in parse_qsl(body, keep_blank_values=True)])


async def _identity(request: Request, services: Services) -> Identity:
    if await services.auth.is_open():
        return LOCAL
    token = request.cookies.get(COOKIE)
    if not token:
        raise SignInError
    try:
        return await services.auth.identity(token, peer_of(request))
    except HTTPException as error:
        raise SignInError(str(error.detail)) from error


async def record(services: Services, event: AuditedEvent, identity: Identity, owner: str, **details: object) -> None:
    """Record the visitor's action in the audit log of the project `owner`."""
    actor = actor_of_key(identity.key_id)
    await asyncio.to_thread(services.journal.audit.record, event, owner=owner, actor=actor, details=details)


def mark_of(services: Services, identity: Identity) -> str:
    """The mark that a form must repeat: the same on all pages of one sign-in. Other sites cannot compute it."""
    whose = f"console\n{identity.key_id}\n{identity.expires}"
    return hmac.new(services.link_secret, whose.encode(), hashlib.sha256).hexdigest()


def base_of(services: Services) -> str:
    """The path of public_url. It prefixes all paths if a proxy serves us below it."""
    return urlsplit(services.settings.public_url).path.rstrip("/")


# ------------------------------------------------------------------ errors are pages, too
class PageRoute(APIRoute):
    """A route that renders errors as pages, and adds security headers to its responses."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, wrapped to render errors and to add the headers."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                response = await handler(request)
            except SignInError as error:
                response = sign_in_page(request, 401, error.reason)
            except HTTPException as error:
                response = _error_page(request, error.status_code, str(error.detail))
            except RequestValidationError as error:
                first = error.errors()[0]
                response = _error_page(request, 404, f"{first['loc'][1]}: {first['msg']}")
            except TinkerflowError as error:
                response = _error_page(request, status_of(error), str(error))
            except AWAY as error:
                log_failure(request, error)
                response = _error_page(request, 503, message_of(error))
            for name, value in _HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return handle


def page_router() -> APIRouter:
    """A router for pages. Pages are for people, so the OpenAPI document omits them."""
    return APIRouter(route_class=PageRoute, include_in_schema=False)


def sign_in_page(request: Request, status: int, reason: str = "", next_page: str = "/") -> Response:
    """The page that asks for a key. It leads back to the page that the visitor requested.

    next_page: the page that a refused sign-in would have led to.
    """
    wanted = request.scope["path"] + (f"?{query}" if (query := request.scope["query_string"].decode("latin-1")) else "")
    values = {
        "base": base_of(request.app.state.services),
        "reason": reason,
        "next": wanted if request.method == "GET" else next_page,
        "service": base_url(request),
        "key_prefix": KEY_PREFIX,
    }
    return HTMLResponse(render("sign_in.html", values), status, {"Cache-Control": "no-store"})


def _error_page(request: Request, status: int, text: str) -> Response:
    values = {"base": base_of(request.app.state.services), "status": status, "text": text}
    return HTMLResponse(render("error.html", values), status, {"Cache-Control": "no-store"})
