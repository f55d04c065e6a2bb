"""Who is calling: the identity behind an X-API-Key header, which holds a key or a token that stands for a key.

A key is exchanged for a JSON Web Token, so that the key itself travels once an hour and not with every request. Tokens
are signed by HMAC-SHA256 under a secret that all API processes share (Journal.service_secret) and that nobody is shown.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

import jwt
from fastapi import HTTPException
from jwt.utils import base64url_decode, base64url_encode

from tinkerflow.backend.clock import Clock
from tinkerflow.backend.ids import KEY_PREFIX
from tinkerflow.backend.journal import Journal, KeyView
from tinkerflow.backend.settings import Settings

T = TypeVar("T")

TOKEN_PREFIX = "eyJ"
LOCAL_OWNER = "local"
TOKEN_SECRET = "tokens"  # the name of the service secret that signs tokens
TOKEN_LIFETIME = timedelta(hours=1)
REMEMBERED_SECONDS = 5.0  # how long a key is not looked up again, and how long a revoked key still works
_ALGORITHM = "HS256"
_USER, _ORGANIZATION = "tml:user:", "tml:organization:"
_NO_KEYS_SECONDS = 1.0
_MOST_REMEMBERED = 10_000
# RFC 6750: the SDK then exchanges its key again and repeats the request once.
_INVALID_TOKEN = {"WWW-Authenticate": 'Bearer error="invalid_token"'}


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


class BadTokenError(Exception):
    """The token is not one of ours, or has expired; the text says which."""


@dataclass(frozen=True)
class Claims:
    """What a token says: the key (id "" where none is needed), its project, and when the token ends.

    name: the key's. It stands where the SDK expects an e-mail address: no address is known, and people know their keys.
    """

    key_id: str
    project: str
    name: str
    expires: datetime


def sign_token(claims: Claims, secret: bytes, now: datetime) -> str:
    """The token, with the claims that the SDK reads: sub, org_id, email, iat, exp (seconds since 1970)."""
    body = {
        "iss": "tinkerflow",
        "sub": _USER + (claims.key_id or claims.project),
        "key_id": claims.key_id,
        "org_id": claims.project,
        "email": claims.name,
        "iat": int(now.timestamp()),
        "exp": int(claims.expires.timestamp()),
    }
    return jwt.encode(body, secret, _ALGORITHM)


def read_token(token: str, secret: bytes, now: datetime) -> Claims:
    """What the token says; BadTokenError when it is not ours or has expired at `now`."""
    signature = token.rpartition(".")[2]
    try:
        # PyJWT would compare the times with the machine's clock instead of `now`.
        said = jwt.decode(token, secret, [_ALGORITHM], options={"verify_exp": False, "verify_iat": False})
        # base64 has several texts for the same bytes, and only one of them was signed by us
        if base64url_encode(base64url_decode(signature)).decode() != signature:
            raise jwt.InvalidSignatureError
    except jwt.InvalidTokenError as e:
        raise BadTokenError("the token is not one of ours: its signature does not fit") from e
    expires = datetime.fromtimestamp(said["exp"], now.tzinfo)
    if expires <= now:
        raise BadTokenError("the token has expired; exchange the key for a new one")
    return Claims(said["key_id"], said["org_id"], said["email"], expires)


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
            raise _refused(f"the X-API-Key header must hold a key that starts with {KEY_PREFIX}")
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

    def token(self, identity: Identity) -> str:
        """A token for this identity. A token that is exchanged for a new one does not live longer through that."""
        now = self._clock.now()
        until = now + TOKEN_LIFETIME
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
        return self._open and await self._no_keys()

    async def _no_keys(self) -> bool:
        now = self._clock.monotonic()
        if now >= self._no_keys_until:
            self._open = not await self._ask("", self._journal.keys.has_any)
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
