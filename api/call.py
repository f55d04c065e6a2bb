"""One request of a client, from its headers to what its handler works with: the services, the caller, the body.

A handler asks for a `Call` in its signature (`call: Authorised`) and then reads `await call.body()` or
`await call.parsed(Model)`. Who is calling says the X-API-Key header, or Authorization: Bearer. It holds a key, or a
token that stands for a key (tokens.py). Long polls wait in `Holds`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from bisect import bisect_left
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar

import zstandard
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkerflow.api.metrics import SECONDS, Answered, Metrics
from tinkerflow.api.threads import FairThreads
from tinkerflow.api.tokens import (
    TOKEN_LIFETIME,
    TOKEN_PREFIX,
    TOKEN_SECRET,
    BadTokenError,
    Claims,
    read_token,
    sign_token,
)
from tinkerflow.backend.core import tracing
from tinkerflow.backend.core.clock import Clock
from tinkerflow.backend.core.errors import BodyTooLargeError, UserError
from tinkerflow.backend.core.hosts import is_loopback
from tinkerflow.backend.core.ids import KEY_PREFIX, LOCAL_OWNER
from tinkerflow.backend.journal import Journal, KeyView, Limits, ResultSubscriptions
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store import Store
from tinkerflow.backend.wire import WireModel

if TYPE_CHECKING:
    from tinkerflow.api.samplers import EndpointSamplers
    from tinkerflow.api.text import Tokenizers

API = "/api/v1"
OPEN_API = "/v1"  # of the endpoints that other vendors' clients speak
REMEMBERED_SECONDS = 5.0  # how long a key is not looked up again, and how long a revoked key still works
_NO_KEYS_SECONDS = 1.0
_MOST_REMEMBERED = 10_000
# RFC 6750: the SDK then exchanges its key again and repeats the request once.
_INVALID_TOKEN = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
_DRAINED = 4  # a body over the limit is still read up to this many times the limit, so that its sender hears why
_MAX_WINDOW = 2**27  # bytes of history a zstd frame may ask for

AccessScope = Literal["owned", "accessible"]


Wire = WireModel


class Strict(WireModel, extra="forbid"):
    """Base of bodies that contain known fields only: an unknown one, which would change nothing, is refused by name."""


M = TypeVar("M", bound=WireModel)
P = ParamSpec("P")
T = TypeVar("T")


class Router(APIRouter):
    """The endpoints of one subject.

    busy: how much traffic they get. Routes are tried in order, so the app includes the busiest routers first.
    """

    def __init__(self, *, busy: int = 0, at: str = API) -> None:
        """Without endpoints yet. at: what their paths begin with."""
        super().__init__()
        self.busy = busy
        self.at = at


class Holds:
    """The long polls that are held open now.

    A poll is held until its result is there, its time is over, or the server stops. `release` ends all of them at
    once, so that a stopping server need not wait for them.
    """

    def __init__(self) -> None:
        """No poll is held yet."""
        self._held: set[asyncio.Timeout] = set()
        self.released = False  # whether `release` came

    async def hold(self, wait: Coroutine[object, object, bool]) -> bool:
        """Await `wait` and return its result; False when `release` comes first."""
        if self.released:
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
        self.released = True
        now = asyncio.get_running_loop().time()
        for hold in self._held:
            hold.reschedule(now)


# ------------------------------------------------------------------ who is calling
@dataclass(frozen=True)
class Identity:
    """Who calls.

    owner: the project whose rows the caller reads and writes. key_id: the key, "" on a server that is open because it
    is bound to loopback and no key was ever made. admin: whether the caller may look at all projects. name: the key's.
    expires: when the token that was shown ends, None for a key.
    """

    owner: str
    key_id: str
    admin: bool
    name: str = ""
    expires: datetime | None = None

    @property
    def number(self) -> int:
        """The key's id as a whole number of 48 bits, for answers that need one; 0 without a key."""
        return int.from_bytes(hashlib.sha256(self.key_id.encode()).digest()[:6]) if self.key_id else 0


# A server that only this machine can reach is called by the person who runs it.
LOCAL = Identity(LOCAL_OWNER, key_id="", admin=True, name=LOCAL_OWNER)


class Authenticator:
    """Turns keys and tokens into identities.

    On a server that is bound to loopback and has no keys, any `tml-` key belongs to the owner `local`, and so do its
    tokens until a key is made. On any other server a key must verify. A token lives no longer than its key: when the
    key is revoked, both are refused within REMEMBERED_SECONDS.
    """

    def __init__(self, settings: Settings, journal: Journal, clock: Clock, threads: Executor | None = None) -> None:
        """Check keys against the journal, in `threads` (default: the event loop's own threads)."""
        self._journal = journal
        self._clock = clock
        self._secret = journal.keys.service_secret(TOKEN_SECRET)
        self._open = is_loopback(settings.host)
        self._no_keys_until = 0.0
        self._known: dict[str, tuple[Identity, float]] = {}
        self._threads = threads
        self._asking: dict[str, asyncio.Future[Any]] = {}

    async def identity(self, shown: str | None) -> Identity:
        """Whom this key or token belongs to; HTTPException 401 when it is not valid."""
        if not shown or not shown.startswith((KEY_PREFIX, TOKEN_PREFIX)):
            raise _refused(
                f"the X-API-Key header, or Authorization: Bearer, must hold a key that starts with {KEY_PREFIX}"
            )
        now = self._clock.monotonic()
        if await self.is_open() and shown.startswith(KEY_PREFIX):
            return LOCAL
        if (known := self._known.get(shown)) is not None and now < known[1]:
            return known[0]
        if shown.startswith(TOKEN_PREFIX):
            identity, seconds = await self._of_token(shown)
        else:
            key = await self._ask(f"key {shown}", self._journal.keys.verify, shown)
            if key is None:
                self._known.pop(shown, None)
                raise _refused("the API key is unknown or revoked; `tinkerflow key create` makes one")
            identity, seconds = _of_key(key), REMEMBERED_SECONDS
        self._remember(shown, identity, now, seconds)
        return identity

    def token(self, identity: Identity, lifetime: timedelta = TOKEN_LIFETIME) -> str:
        """A token for this identity. A token that is exchanged for a new one does not live longer through that."""
        now = self._clock.now()
        until = now + lifetime
        expires = until if identity.expires is None else min(until, identity.expires)
        claims = Claims(identity.key_id, identity.owner, identity.name, expires)
        return sign_token(claims, self._secret, now)

    def forget(self, key_id: str) -> None:
        """Look this key up again at its next use, because it was revoked here."""
        self._known = {shown: known for shown, known in self._known.items() if known[0].key_id != key_id}

    async def _of_token(self, token: str) -> tuple[Identity, float]:
        """Whom the token belongs to, and for how many seconds that may be remembered."""
        try:
            claims = read_token(token, self._secret, self._clock.now())
        except BadTokenError as e:
            self._known.pop(token, None)
            raise _refused(str(e), _INVALID_TOKEN) from e
        left = min(REMEMBERED_SECONDS, (claims.expires - self._clock.now()).total_seconds())
        if not claims.key_id:
            if not self._open:
                raise _refused("the token was made when no key was needed here; a key is needed now", _INVALID_TOKEN)
            return replace(LOCAL, expires=claims.expires), left
        key = await self._ask(f"id {claims.key_id}", self._journal.keys.usable, claims.key_id)
        if key is None:
            self._known.pop(token, None)
            raise _refused("the API key of this token was revoked", _INVALID_TOKEN)
        return replace(_of_key(key), expires=claims.expires), left

    def _remember(self, credential: str, identity: Identity, now: float, seconds: float) -> None:
        if len(self._known) >= _MOST_REMEMBERED:
            self._known = {shown: known for shown, known in self._known.items() if now < known[1]}
        self._known[credential] = (identity, now + seconds)

    async def _ask(self, name: str, question: Callable[..., T], *args: object) -> T:
        """The journal's answer, shared by everyone who asks the same now: thousands may when a key was forgotten."""
        asking = self._asking.get(name)
        if asking is None:
            loop = asyncio.get_running_loop()
            asking = self._asking[name] = loop.run_in_executor(self._threads, lambda: question(*args))
            asking.add_done_callback(lambda _: self._asking.pop(name, None))
        answer: T = await asyncio.shield(asking)
        return answer

    async def is_open(self) -> bool:
        """Whether the server needs no key: it is bound to loopback, and no key was ever made.

        The journal is asked once a second, and never again once there is a key.
        """
        if self._open and (now := self._clock.monotonic()) >= self._no_keys_until:
            self._open = not await self._ask("", self._journal.keys.has_any)
            self._no_keys_until = now + _NO_KEYS_SECONDS
            if not self._open:
                self._known.clear()
        return self._open


def _of_key(key: KeyView) -> Identity:
    return Identity(key.owner, key.id, key.admin, key.name)


def _refused(reason: str, headers: dict[str, str] | None = None) -> HTTPException:
    return HTTPException(401, reason, headers)


# ------------------------------------------------------------------ the call
@dataclass(frozen=True)
class Services:
    """What the handlers work with, made once for an app.

    urgent: threads for key checks and heartbeats. They must not queue behind the journal calls of thousands of polls
    that arrive together, which use the event loop's default threads. slow: threads for tokenising and compiling.
    limits: what one project may have at a time. samplers: of the endpoints that know no sessions. tokenizers: of the
    base models. imports: a thread for uploaded adapters, one of which is in memory at a time.
    """

    settings: Settings
    journal: Journal
    subscriptions: ResultSubscriptions
    store: Store
    auth: Authenticator
    holds: Holds
    urgent: Executor
    slow: FairThreads
    clock: Clock
    link_secret: bytes
    metrics: Metrics
    limits: Limits
    samplers: EndpointSamplers
    tokenizers: Tokenizers
    imports: FairThreads


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

    async def slowly(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns, which may take seconds: in one of the threads that projects share."""
        return await self.services.slow.run(self.owner, work, *args, **kwargs)

    async def body(self) -> bytes:
        """The whole body, decompressed; UserError when it is too large or does not match its headers."""
        return await read_body(self.request, self.services.settings.max_body_bytes)

    async def parsed(self, model: type[M]) -> M:
        """The JSON body as `model`; UserError names the field and the rule."""
        return model.from_json(await self.body())


async def authorised(request: Request) -> Call:
    """The call, when its key is good; else HTTPException 401. Every route but healthz depends on this.

    One dependency does all of it, because each further dependency costs a tenth of a millisecond per request.
    """
    services: Services = request.app.state.services
    call = Call(request, await services.auth.identity(_shown(request)), services)
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise HTTPException(404, "the URL holds a NUL character (%00): the database has no such name")
    return call


def _shown(request: Request) -> str | None:
    """The key or token that came with a request: OpenAI's clients send it as `Authorization: Bearer`."""
    if (key := request.headers.get("x-api-key")) is not None:
        return key
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


Authorised = Annotated[Call, Depends(authorised)]

PageLimit = Annotated[int, Query(ge=1, le=1000)]
PageOffset = Annotated[int, Query(ge=0, lt=2**63)]  # databases count no further


class Counted:
    """The app, with every request counted and timed by its endpoint's name. Requests to no endpoint count as `none`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        """app: what answers. metrics: where the requests are counted."""
        self._app = app
        self._answered = metrics.answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if tracing.tracer is None:
            await self._answer(scope, receive, send)
            return
        parent = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"), None)
        with tracing.span(scope["method"], parent, "SERVER") as span:
            status = await self._answer(scope, receive, send)
            if span is not None:
                span.update_name(f"{scope['method']} {_operation(scope)}")
                span.set_attributes({"http.request.method": scope["method"], "http.response.status_code": status})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answer one request; its status."""
        began, status = time.perf_counter(), 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            operation = _operation(scope)
            if (answered := self._answered.get(operation)) is None:
                answered = self._answered[operation] = Answered()
            seconds = time.perf_counter() - began
            answered.statuses[status] += 1
            answered.took[bisect_left(SECONDS, seconds)] += 1
            answered.seconds += seconds
        return status


def _operation(scope: Scope) -> str:
    endpoint = scope.get("endpoint")
    return "none" if endpoint is None else str(endpoint.__name__)


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
