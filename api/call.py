"""One request of a client, from its headers to what its handler works with: the services, the caller, the body.

A handler asks for a `Call` in its signature (`call: Authorised`) and then reads `await call.body()` or
`await call.parsed(Model)`. Long polls wait in `Holds`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import zstandard
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from prometheus_client import Counter, Histogram
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkerflow.api.auth import Authenticator, Identity
from tinkerflow.api.metrics import Metrics
from tinkerflow.backend.clock import Clock
from tinkerflow.backend.errors import BodyTooLargeError, UserError
from tinkerflow.backend.journal import Journal, Limits, ResultSubscriptions
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store import Store

API = "/api/v1"
_DRAINED = 4  # a body over the limit is still read up to this many times the limit, so that its sender hears why
_MAX_WINDOW = 2**27  # bytes of history a zstd frame may ask for

AccessScope = Literal["owned", "accessible"]


class Wire(BaseModel):
    """Base of the JSON models of the endpoints. Requests may hold unknown fields.

    `model_` is an ordinary field prefix here, not pydantic's own namespace.
    """

    model_config = ConfigDict(protected_namespaces=(), frozen=True)


M = TypeVar("M", bound=BaseModel)


class Router(APIRouter):
    """The endpoints of one subject.

    busy: how much traffic they get. Routes are tried in order, so the app includes the busiest routers first.
    """

    def __init__(self, *, busy: int = 0) -> None:
        """Without endpoints yet."""
        super().__init__()
        self.busy = busy


class Holds:
    """The long polls that are held open now.

    A poll is held until its result is there, its time is over, or the server stops. `release` ends all of them at
    once, so that a stopping server need not wait for them.
    """

    def __init__(self) -> None:
        """No poll is held yet."""
        self._held: set[asyncio.Timeout] = set()
        self._released = False

    async def hold(self, wait: Coroutine[object, object, bool]) -> bool:
        """Await `wait` and return its result; False when `release` comes first."""
        if self._released:
            wait.close()
            return False
        hold = asyncio.timeout(None)
        try:
            async with hold:
                self._held.add(hold)
                return await wait
        except TimeoutError:
            return False
        finally:
            self._held.discard(hold)

    def release(self) -> None:
        """End every poll held now, and hold none from now on."""
        self._released = True
        now = asyncio.get_running_loop().time()
        for hold in self._held:
            hold.reschedule(now)


@dataclass(frozen=True)
class Services:
    """What the handlers work with, made once for an app.

    urgent: threads for key checks and heartbeats. They must not queue behind the journal calls of thousands of polls
    that arrive together, which use the event loop's default threads.
    """

    settings: Settings
    journal: Journal
    subscriptions: ResultSubscriptions
    store: Store
    auth: Authenticator
    holds: Holds
    urgent: Executor
    clock: Clock
    link_secret: bytes
    metrics: Metrics

    @property
    def limits(self) -> Limits:
        """What one project may have at a time."""
        settings = self.settings
        return Limits(
            sampling_requests=settings.max_sampling_requests,
            queued_tokens=settings.max_queued_tokens,
            live_models=settings.max_live_models,
            stored_bytes=settings.max_stored_bytes,
        )


@dataclass(frozen=True)
class Call:
    """One authorised request: whose rows it may touch, and what the handler works with."""

    request: Request
    identity: Identity
    services: Services

    @property
    def owner(self) -> str:
        """The key's project, whose rows this request reads and writes."""
        return self.identity.owner

    @property
    def key_id(self) -> str:
        """The key's id; "" on a loopback server for which no key was ever made."""
        return self.identity.key_id

    @property
    def admin(self) -> bool:
        """Whether the key may read the audit log and the bills of all projects; True where no key is needed."""
        return self.identity.admin

    @property
    def journal(self) -> Journal:
        """The journal."""
        return self.services.journal

    def visible(self, scope: AccessScope = "accessible") -> str | None:
        """The project whose rows the call sees, None for all projects.

        An ordinary key sees its own project in both scopes. An admin key sees its own project in `owned`, and all
        projects in `accessible`.
        """
        return None if scope == "accessible" and self.admin else self.owner

    async def body(self) -> bytes:
        """The whole body, decompressed; UserError when it is too large or does not match its headers."""
        return await read_body(self.request, self.services.settings.max_body_bytes)

    async def parsed(self, model: type[M]) -> M:
        """The JSON body as `model`; UserError names the field and the rule."""
        body = await self.body()
        if rb"\u0000" in body and _holds_nul(body):
            raise UserError("the request body holds a NUL character (\\u0000): must not, the database cannot store it")
        try:
            return model.model_validate_json(body)
        except ValidationError as e:
            first = e.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the request body"
            raise UserError(f"{field}: {first['msg']}, not {str(first['input'])[:80]!r}") from e


async def authorised(request: Request) -> Call:
    """The call, when its X-API-Key is good; else HTTPException 401. Every route but healthz depends on this.

    One dependency does all of it, because each further dependency costs a tenth of a millisecond per request.
    """
    services: Services = request.app.state.services
    call = Call(request, await services.auth.identity(request.headers.get("x-api-key")), services)
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise HTTPException(404, "the URL holds a NUL character (%00): the database has no such name")
    return call


Authorised = Annotated[Call, Depends(authorised)]

PageLimit = Annotated[int, Query(ge=1, le=1000)]
PageOffset = Annotated[int, Query(ge=0, lt=2**63)]  # databases count no further


class Counted:
    """The app, with every request counted and timed by its endpoint's name. Requests to no endpoint count as `none`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        """app: what answers. metrics: where the requests are counted."""
        self._app = app
        self._metrics = metrics
        self._series: dict[tuple[str, int], tuple[Counter, Histogram]] = {}  # found once: looking up costs 5 us

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status = time.perf_counter(), 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            endpoint = scope.get("endpoint")
            operation = "none" if endpoint is None else endpoint.__name__
            if (series := self._series.get((operation, status))) is None:
                series = self._metrics.requests.labels(operation, status), self._metrics.seconds.labels(operation)
                self._series[operation, status] = series
            answered, seconds = series
            answered.inc()
            seconds.observe(time.perf_counter() - began)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, decompressed; UserError when it has more than `limit` bytes or does not match its headers.

    What exceeds the limit is read and thrown away, because most clients only listen once they have sent everything.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
            if size > limit * _DRAINED:
                break
    if size > limit:
        raise BodyTooLargeError(f"the request body has more than {limit} bytes: must be at most that (max_body_bytes)")
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise UserError(f"Content-Encoding is {encoding!r}: must be zstd or absent")
    return await asyncio.to_thread(_decompress, body, limit)


def _decompress(body: bytes, limit: int) -> bytes:
    """The content of the one zstd frame in `body`, which must declare its size: else a truncated frame would pass."""
    try:
        size = zstandard.get_frame_parameters(body).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            raise UserError("the request body is a zstd frame that does not declare its content size: it must")
        if size > limit:
            raise BodyTooLargeError(
                f"the request body has {size} bytes when decompressed: must be at most {limit} (max_body_bytes)"
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        return decompressor.decompress(body, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise UserError(f"the request body must be one whole zstd frame, as its Content-Encoding says: {e}") from e


def _holds_nul(body: bytes) -> bool:
    """Whether a JSON text holds a NUL character, and not just the six characters of an escaped escape sequence."""
    return re.search(rb"(?<!\\)(?:\\\\)*\\u0000", body) is not None
