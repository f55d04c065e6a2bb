"""A client's request as its handler receives it: the services, the sender, the body.

A handler declares a parameter `call: Authorized` and then awaits `call.body()` or `call.parsed(Model)`.
The X-API-Key header, or Authorization: Bearer, identifies the sender (identity.py). Long polls wait in `Holds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Annotated, Literal, ParamSpec, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Query, Request

from tinkerflow.api import bodies
from tinkerflow.api.bodies import BODY, MEDIUM, SMALL, Body, Memories
from tinkerflow.api.connections import accept, peer_of
from tinkerflow.api.identity import Authenticator, Identity
from tinkerflow.api.metrics import Metrics
from tinkerflow.api.sampler_sessions import EndpointSamplers
from tinkerflow.api.schemas import API, Wire
from tinkerflow.api.text import Tokenizers
from tinkerflow.backend.core.clock import Clock
from tinkerflow.backend.core.threads import FairThreads, current_project
from tinkerflow.backend.journal import Journal, Limits, ResultSubscriptions
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store import Store

CONTROL_BYTES = 2**20  # maximum size of a body that contains neither data nor a prompt
MOST_VALUES = 2**21  # values in a JSON body; prompts of token ids contain the most

AccessScope = Literal["owned", "accessible"]

M = TypeVar("M", bound=Wire)
P = ParamSpec("P")
T = TypeVar("T")


class Router(APIRouter):
    """The endpoints of one subject.

    busy: how much traffic they get. Routes are tried in order, so the app includes the busiest routers first.
    """

    def __init__(self, *, busy: int = 0, at: str = API) -> None:
        """A router without endpoints. at: the prefix of their paths."""
        super().__init__()
        self.busy = busy
        self.at = at


class Holds:
    """The long polls that are currently held open.

    A poll is held until its result arrives, its time is over, or the server stops. `release` ends all polls, so that a
    stopping server need not wait for them.
    """

    def __init__(self) -> None:
        self._held: set[asyncio.Timeout] = set()
        self.released = False  # whether `release` was called

    async def hold(self, wait: Coroutine[object, object, bool]) -> bool:
        """Await `wait` and return its result, or False if `release` is called first."""
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
        """End all held polls, and hold no more."""
        self.released = True
        now = asyncio.get_running_loop().time()
        for hold in self._held:
            hold.reschedule(now)


@dataclass(frozen=True)
class Services:
    """The parts of the service that handlers use, created once for an app.

    urgent: threads for key checks and heartbeats. These must not queue behind the journal calls of thousands of polls
    that arrive together, which use the event loop's default threads. slow: threads for tokenizing, compiling and
    bodies of medium size. heavy: threads for large bodies. memories: the memory for bodies.
    limits: for projects without limits of their own. samplers: for the endpoints without sessions. tokenizers: the base
    models' tokenizers. imports: a thread for uploaded adapters, so that only one is in memory at a time.
    """

    settings: Settings
    journal: Journal
    subscriptions: ResultSubscriptions
    store: Store
    auth: Authenticator
    holds: Holds
    urgent: Executor
    slow: FairThreads
    heavy: FairThreads
    memories: Memories
    clock: Clock
    link_secret: bytes
    metrics: Metrics
    limits: Limits
    samplers: EndpointSamplers
    tokenizers: Tokenizers
    imports: FairThreads


@dataclass(frozen=True)
class Call:
    """One authorized request: its sender, and the services that the handler uses."""

    request: Request
    identity: Identity
    services: Services

    def __post_init__(self) -> None:
        """Let the request's journal calls take turns with those of other projects."""
        current_project.set(self.owner)

    @property
    def owner(self) -> str:
        """The key's project, whose rows this request reads and writes."""
        return self.identity.owner

    @property
    def key_id(self) -> str:
        """The key's id; "" on a loopback server that has never had a key."""
        return self.identity.key_id

    @property
    def admin(self) -> bool:
        """Whether the key may read the audit log and the bills of all projects; True if no key is needed."""
        return self.identity.admin

    @property
    def limits(self) -> Limits:
        """The limits of the key's project: its own limits, or else those of the settings."""
        return replace(self.services.limits, **self.identity.limits)

    def limits_of(self, project: str) -> Limits:
        """The limits of the project that the request writes into, which is another project only for admin keys."""
        if project == self.owner:
            return self.limits
        return self.journal.project_limits.of(project, self.services.limits)

    @property
    def journal(self) -> Journal:
        return self.services.journal

    def visible(self, scope: AccessScope = "accessible") -> str | None:
        """The project whose rows the call may see; None for all projects.

        An ordinary key sees its own project in both scopes. An admin key sees its own project in `owned`, and all
        projects in `accessible`.
        """
        return None if scope == "accessible" and self.admin else self.owner

    async def slowly(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`, which may take seconds, in one of the threads that projects share, and return its result."""
        return await self.services.slow.run(self.owner, work, *args, **kwargs)

    async def body(self, most: int = CONTROL_BYTES) -> bytes:
        """Read the whole body, decompressed. It holds its memory until `release_body`, or the end of the request.

        most: maximum size in bytes of a body of this endpoint.
        BodyTooLargeError: the body exceeds `most` or the setting max_body_bytes. UserError: the body does not match its
        headers. TooManyError: too many large bodies are being read.
        """
        services, setting = self.services, self.services.settings.max_body_bytes
        rule = "max_body_bytes" if setting <= most else f"the limit of {self.request.scope['path']}"
        body = Body(self.request, min(most, setting), rule, self.owner, services.memories)
        self.request.scope[BODY] = body
        return await body.read(lambda frame, size: self.on_body(size, bodies.decompressed, frame, size))

    @property
    def body_size(self) -> int:
        """The size of the decompressed body in bytes; 0 if it was not read."""
        body: Body | None = self.request.scope.get(BODY)
        return 0 if body is None else body.size

    def release_body(self) -> None:
        """Free the body's memory, because its content is no longer needed, for example once it is stored."""
        if (body := self.request.scope.get(BODY)) is not None:
            body.release()

    async def on_body(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on a body of `size` bytes in a thread, and return its result. Large bodies share few threads."""
        services = self.services
        if size <= SMALL:
            return await asyncio.to_thread(work, *args, **kwargs)
        threads = services.slow if size <= MEDIUM else services.heavy
        return await threads.run(self.owner, work, *args, **kwargs)

    async def convert(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work` on the content of the body. A thread does it if the body is large."""
        if (size := self.body_size) <= SMALL:
            return work(*args, **kwargs)
        return await self.on_body(size, work, *args, **kwargs)

    async def parsed(self, model: type[M], most: int = CONTROL_BYTES) -> M:
        """Parse the JSON body as `model`. UserError: names the field and the rule. most: maximum size in bytes."""
        body = await self.body(most)
        if len(body) <= SMALL:
            return model.from_json(body)
        return await self.on_body(len(body), _read_large, model, body)


def _read_large(model: type[M], body: bytes) -> M:
    bodies.check_values(body, MOST_VALUES, "the limit of this endpoint")
    return model.from_json(body)


async def authorized(request: Request) -> Call:
    """Authorize a request. HTTPException 401: its key is invalid. All API routes that need a key depend on this.

    There is only one dependency, because each costs a tenth of a millisecond per request.
    """
    services: Services = request.app.state.services
    identity = await services.auth.identity(_shown(request), peer_of(request))
    accept(request)
    call = Call(request, identity, services)
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise HTTPException(404, "the URL contains a NUL character (%00): stored names contain none")
    return call


def _shown(request: Request) -> str | None:
    """The key or token of a request, or None. OpenAI's clients send it as `Authorization: Bearer`."""
    if (key := request.headers.get("x-api-key")) is not None:
        return key
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


Authorized = Annotated[Call, Depends(authorized)]

PageLimit = Annotated[int, Query(ge=1, le=1000)]
PageOffset = Annotated[int, Query(ge=0, lt=2**63)]  # the largest integer of the databases
