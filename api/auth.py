"""Who is asking: the identity behind an X-API-Key header, which holds a key or a token that it was exchanged for."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from fastapi import HTTPException

from tinkerflow.api import tokens
from tinkerflow.backend.clock import Clock
from tinkerflow.backend.journal import Journal, KeyView
from tinkerflow.backend.settings import Settings

T = TypeVar("T")

PREFIX = "tml-"
TOKEN_PREFIX = "eyJ"
LOCAL_OWNER = "local"
REMEMBERED_SECONDS = 5.0  # so long a key is not looked up again, and so long a revoked one still works
_NO_KEYS_SECONDS = 1.0
_MOST_REMEMBERED = 10_000
# RFC 6750: the SDK then exchanges its key again and repeats the request, once.
_INVALID_TOKEN = {"WWW-Authenticate": 'Bearer error="invalid_token"'}


@dataclass(frozen=True)
class Identity:
    """Who calls: whose rows they read and write, with which key, and whether they may look at other projects' books.

    key_id is "" on a server that is open because it is bound to loopback and no key was ever made. name: the key's.
    expires: of the token that was shown, None for a key.
    """

    owner: str
    key_id: str
    admin: bool
    name: str = ""
    expires: datetime | None = None

    @property
    def number(self) -> int:
        """The key's id as the whole number that some answers must hold (48 bits, the same every time); 0 without."""
        return int.from_bytes(hashlib.sha256(self.key_id.encode()).digest()[:6]) if self.key_id else 0


# Whoever can reach a server that only this machine reaches is the one who runs it.
LOCAL = Identity(LOCAL_OWNER, key_id="", admin=True, name=LOCAL_OWNER)


class Authenticator:
    """Keys and tokens to identities.

    Bound to loopback with no keys made, any `tml-` key is the owner `local` (and so are its tokens, until a key is
    made); anywhere else a key must verify. A token lives no longer than its key: revoking that refuses both, within
    REMEMBERED_SECONDS.
    """

    def __init__(self, settings: Settings, journal: Journal, clock: Clock, threads: Executor | None = None) -> None:
        """Check against `journal`'s keys, in `threads` (default: the event loop's own)."""
        self._journal = journal
        self._clock = clock
        self._secret = journal.service_secret(tokens.SECRET)
        self._open = is_loopback(settings.host)
        self._no_keys_until = 0.0
        self._known: dict[str, tuple[Identity, float]] = {}
        self._threads = threads
        self._asking: dict[str, asyncio.Future[Any]] = {}

    async def identity(self, shown: str | None) -> Identity:
        """Who this key or token belongs to; HTTPException 401 when it opens nothing."""
        if not shown or not shown.startswith((PREFIX, TOKEN_PREFIX)):
            raise _refused(f"the X-API-Key header must hold a key that starts with {PREFIX}")
        now = self._clock.monotonic()
        if self._open and await self._no_keys() and shown.startswith(PREFIX):
            return LOCAL
        if (known := self._known.get(shown)) is not None and now < known[1]:
            return known[0]
        if shown.startswith(TOKEN_PREFIX):
            identity, seconds = await self._of_token(shown)
        else:
            key = await self._ask(f"key {shown}", self._journal.verify_key, shown)
            if key is None:
                self._known.pop(shown, None)
                raise _refused("the API key is unknown or revoked; `tinkerflow key create` makes one")
            identity, seconds = _of_key(key), REMEMBERED_SECONDS
        self._remember(shown, identity, now, seconds)
        return identity

    def token(self, identity: Identity) -> str:
        """A token for this identity. One that is exchanged for another gets one that ends when it does."""
        now = self._clock.now()
        until = now + tokens.LIFETIME
        expires = until if identity.expires is None else min(until, identity.expires)
        claims = tokens.Claims(identity.key_id, identity.owner, identity.name, expires)
        return tokens.sign(claims, self._secret, now)

    def forget(self, key_id: str) -> None:
        """The key was revoked here: look it up again at once."""
        self._known = {shown: known for shown, known in self._known.items() if known[0].key_id != key_id}

    async def _of_token(self, token: str) -> tuple[Identity, float]:
        """Who the token belongs to, and for how many seconds that may be remembered."""
        try:
            claims = tokens.verify(token, self._secret, self._clock.now())
        except tokens.BadTokenError as e:
            self._known.pop(token, None)
            raise _refused(str(e), _INVALID_TOKEN) from e
        left = min(REMEMBERED_SECONDS, (claims.expires - self._clock.now()).total_seconds())
        if not claims.key_id:
            if not self._open:
                raise _refused("the token was made when no key was needed here; a key is needed now", _INVALID_TOKEN)
            return replace(LOCAL, expires=claims.expires), left
        key = await self._ask(f"id {claims.key_id}", self._journal.usable_key, claims.key_id)
        if key is None:
            self._known.pop(token, None)
            raise _refused("the API key of this token was revoked", _INVALID_TOKEN)
        return replace(_of_key(key), expires=claims.expires), left

    def _remember(self, shown: str, identity: Identity, now: float, seconds: float) -> None:
        if len(self._known) >= _MOST_REMEMBERED:
            self._known = {one: known for one, known in self._known.items() if now < known[1]}
        self._known[shown] = (identity, now + seconds)

    async def _ask(self, name: str, question: Callable[..., T], *args: object) -> T:
        """The journal's answer, asked once for all who want to know it now: thousands may when it was forgotten."""
        asking = self._asking.get(name)
        if asking is None:
            loop = asyncio.get_running_loop()
            asking = self._asking[name] = loop.run_in_executor(self._threads, lambda: question(*args))
            asking.add_done_callback(lambda _: self._asking.pop(name, None))
        answer: T = await asyncio.shield(asking)
        return answer

    async def _no_keys(self) -> bool:
        """Whether no key was ever made; asked once a second, and never again once there is one."""
        now = self._clock.monotonic()
        if now >= self._no_keys_until:
            self._open = not await self._ask("", self._journal.has_keys)
            self._no_keys_until = now + _NO_KEYS_SECONDS
            if not self._open:
                self._known.clear()
        return self._open


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # another host name: it may resolve to anything
        return False


def _of_key(key: KeyView) -> Identity:
    return Identity(key.owner, key.id, key.admin, key.name)


def _refused(reason: str, headers: dict[str, str] | None = None) -> HTTPException:
    return HTTPException(401, reason, headers)
