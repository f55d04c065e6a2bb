"""The senders of requests: resolves API keys, and tokens that represent keys (tokens.py), to identities."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from fastapi import HTTPException

from tinkerflow.api.tokens import (
    TOKEN_LIFETIME,
    TOKEN_PREFIX,
    TOKEN_SECRET,
    BadTokenError,
    Claims,
    read_token,
    sign_token,
)
from tinkerflow.backend.core.clock import Clock
from tinkerflow.backend.core.hosts import is_loopback
from tinkerflow.backend.core.ids import KEY_PREFIX, LOCAL_OWNER
from tinkerflow.backend.journal import Journal
from tinkerflow.backend.journal.keys import UsableKey, hash_key
from tinkerflow.backend.settings import Settings

T = TypeVar("T")

REMEMBERED_SECONDS = 5.0  # after this time a key is looked up again, so a revoked key may work this long
_NO_KEYS_SECONDS = 1.0
_MOST_REMEMBERED = 10_000
_GUESSES = 30  # unknown keys that an address may send before further unknown keys get a 429
_GUESS_SECONDS = 2.0  # after this time an address may send one more unknown key
_MOST_ASKED = 256  # concurrent look-ups; beyond this number, keys that were never seen before are refused
_MOST_ADDRESSES = 10_000
_AUDIT_SECONDS = 60.0  # seconds between two entries for the same refused key
_INVALID_TOKEN = {"WWW-Authenticate": 'Bearer error="invalid_token"'}  # RFC 6750: makes the SDK exchange its key again


@dataclass(frozen=True)
class Identity:
    """The sender of a request.

    owner: the project whose rows the sender reads and writes. key_id: the key, or "" on a server that needs no key.
    admin: whether the sender may read the rows of all projects. name: the key's name. expires: when the sender's token
    expires; None for a key. sign_in: the console sign-in that the token belongs to, or "". limits: the project's own
    limits, by fields of `Limits`.
    """

    owner: str
    key_id: str
    admin: bool
    name: str = ""
    expires: datetime | None = None
    sign_in: str = ""
    limits: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def number(self) -> int:
        """The key's id hashed to an integer of 48 bits, for answers that need a number; 0 without a key."""
        return int.from_bytes(hashlib.sha256(self.key_id.encode()).digest()[:6]) if self.key_id else 0


# Any sender on a server that only its own machine can reach.
LOCAL = Identity(LOCAL_OWNER, key_id="", admin=True, name=LOCAL_OWNER)
STRANGER = Identity("", key_id="", admin=False)  # a visitor who is signing in


class UnknownKeyError(Exception):
    """The key or token is not valid. guess: whether it was never known to be valid. headers: the response's."""

    def __init__(self, reason: str, *, guess: bool = False, headers: dict[str, str] | None = None) -> None:
        """reason: sent to the client."""
        super().__init__(reason)
        self.guess = guess
        self.headers = headers


class Guesses:
    """Counts unknown keys by address. Each address has a bucket of _GUESSES, which refills over time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._full_at: dict[str, float] = {}  # when the bucket of an address will be full again

    def allow(self, address: str) -> bool:
        """Count one unknown key from `address`. Returns False if the address has sent too many."""
        now = self._clock.monotonic()
        if len(self._full_at) >= _MOST_ADDRESSES:
            self._full_at = {other: at for other, at in self._full_at.items() if at > now}
        full_at = max(now, self._full_at.get(address, 0.0)) + _GUESS_SECONDS
        if full_at > now + _GUESSES * _GUESS_SECONDS:
            return False
        self._full_at[address] = full_at
        return True


class Authenticator:
    """Resolves keys and tokens to identities.

    On a server that is bound to loopback and has no keys, any `tml-` key belongs to the owner `local`, and so do its
    tokens until a key is created. On every other server a key must verify. A token lives no longer than its key: once
    the key is revoked, both are refused within REMEMBERED_SECONDS.

    Unknown keys cost little. A single thread looks up keys that were never seen before, so known keys are not delayed.
    An address that has sent too many unknown keys gets a 429.
    """

    def __init__(self, settings: Settings, journal: Journal, clock: Clock, threads: Executor | None = None) -> None:
        """Check keys against the journal, in `threads` (default: the event loop's own threads)."""
        self._journal = journal
        self._clock = clock
        self._secret = journal.keys.service_secret(TOKEN_SECRET)
        self._open = is_loopback(settings.host)
        self._no_keys_until = 0.0
        self._known: dict[str, tuple[Identity, float]] = {}
        self._recognized: set[bytes] = set()  # digests of keys that have been valid
        self._threads = threads
        self._first_look = ThreadPoolExecutor(1, "new-keys")
        self._guesses = Guesses(clock)
        self._audited: dict[str, float] = {}  # when a refused key may be logged again, by the key's digest
        self._asking: dict[str, asyncio.Future[Any]] = {}

    async def identity(self, shown: str | None, address: str = "") -> Identity:
        """The identity behind a key or token that `address` sent.

        HTTPException 401: the key or token is not valid. HTTPException 429: the address has sent too many such keys.
        """
        if not shown or not shown.startswith((KEY_PREFIX, TOKEN_PREFIX)):
            raise HTTPException(
                401, f"the X-API-Key header, or Authorization: Bearer, must contain a key that starts with {KEY_PREFIX}"
            )
        now = self._clock.monotonic()
        if await self.is_open() and shown.startswith(KEY_PREFIX):
            return LOCAL
        if (known := self._known.get(shown)) is not None and now < known[1]:
            return known[0]
        try:
            check = self._of_token if shown.startswith(TOKEN_PREFIX) else self._of_key
            identity, seconds = await check(shown)
        except UnknownKeyError as error:
            self._known.pop(shown, None)
            if error.guess and not self._guesses.allow(address):
                raise _too_many("this address sent too many unknown keys") from error
            await self._audit_refusal(shown, address)
            raise HTTPException(401, str(error), error.headers) from error
        self._remember(shown, identity, now, seconds)
        return identity

    def token(self, identity: Identity, lifetime: timedelta = TOKEN_LIFETIME, *, sign_in: str = "") -> str:
        """Create a token for an identity. Exchanging a token for a new one does not extend its life.

        sign_in: the id of a new console sign-in.
        """
        now = self._clock.now()
        until = now + lifetime
        expires = until if identity.expires is None else min(until, identity.expires)
        claims = Claims(identity.key_id, identity.owner, identity.name, expires, sign_in or identity.sign_in)
        return sign_token(claims, self._secret, now)

    def forget(self, key_id: str) -> None:
        """Drop a revoked key from memory, so that it is looked up again at its next use."""
        self._known = {shown: known for shown, known in self._known.items() if known[0].key_id != key_id}

    async def sign_out(self, identity: Identity) -> None:
        """End an identity's sign-in: refuse its token and all tokens that it was exchanged for."""
        if identity.sign_in and identity.expires is not None:
            await asyncio.to_thread(self._journal.keys.end_token, identity.sign_in, identity.expires)
            self._known = {shown: known for shown, known in self._known.items() if known[0].sign_in != identity.sign_in}

    async def _of_key(self, key: str) -> tuple[Identity, float]:
        """The identity behind a key, and how many seconds it may be cached."""
        digest = hashlib.sha256(key.encode()).digest()
        recognized = digest in self._recognized
        name, threads = f"key {key}", self._threads if recognized else self._first_look
        if not recognized and name not in self._asking and len(self._asking) >= _MOST_ASKED:
            raise _too_many(f"{_MOST_ASKED} keys are being looked up for the first time")
        row = await self._ask(name, threads, self._journal.keys.verify, key)
        if row is None:
            reason = (
                "the API key is unknown or revoked; `tinkerflow key create`, with the service's --data-dir, creates one"
            )
            raise UnknownKeyError(reason, guess=not recognized)
        if len(self._recognized) < _MOST_REMEMBERED:
            self._recognized.add(digest)
        return _of_row(row), REMEMBERED_SECONDS

    async def _of_token(self, token: str) -> tuple[Identity, float]:
        """The identity behind a token, and how many seconds it may be cached."""
        try:
            claims = read_token(token, self._secret, self._clock.now())
        except BadTokenError as e:
            raise UnknownKeyError(str(e), guess=not e.expired, headers=_INVALID_TOKEN) from e
        left = min(REMEMBERED_SECONDS, (claims.expires - self._clock.now()).total_seconds())
        if not claims.key_id:
            if not self._open:
                reason = "the token was issued when this server needed no key; it needs a key now"
                raise UnknownKeyError(reason, headers=_INVALID_TOKEN)
            return replace(LOCAL, expires=claims.expires), left
        sign_in = claims.sign_in
        ended: bool = (
            await self._ask(sign_in, self._threads, self._journal.keys.is_ended, sign_in) if sign_in else False
        )
        if ended:
            raise UnknownKeyError("the token was signed out, so it is no longer valid", headers=_INVALID_TOKEN)
        row = await self._ask(f"id {claims.key_id}", self._threads, self._journal.keys.usable, claims.key_id)
        if row is None:
            raise UnknownKeyError("the API key of this token was revoked", headers=_INVALID_TOKEN)
        return replace(_of_row(row), expires=claims.expires, sign_in=claims.sign_in), left

    async def _audit_refusal(self, shown: str, address: str) -> None:
        """Record in the audit log that a key or token was refused, at most once a minute for each."""
        hashed, now = hash_key(shown), self._clock.monotonic()
        if len(self._audited) >= _MOST_REMEMBERED:
            self._audited = {other: until for other, until in self._audited.items() if until > now}
        if self._audited.get(hashed, 0.0) <= now:
            self._audited[hashed] = now + _AUDIT_SECONDS
            await self._ask(hashed, self._first_look, self._journal.audit.record_refused_key, hashed, address)

    def _remember(self, credential: str, identity: Identity, now: float, seconds: float) -> None:
        if len(self._known) >= _MOST_REMEMBERED:
            self._known = {shown: known for shown, known in self._known.items() if now < known[1]}
        self._known[credential] = (identity, now + seconds)

    async def _ask(self, name: str, threads: Executor | None, question: Callable[..., T], *args: object) -> T:
        """Query the journal once for all concurrent requests with the same `name`.

        After a key has expired from memory, thousands of requests may need it.
        """
        asking = self._asking.get(name)
        if asking is None:
            loop = asyncio.get_running_loop()
            asking = self._asking[name] = loop.run_in_executor(threads, lambda: question(*args))
            asking.add_done_callback(lambda _: self._asking.pop(name, None))
        answer: T = await asyncio.shield(asking)
        return answer

    async def is_open(self) -> bool:
        """Whether the server needs no key, because it is bound to loopback and has never had a key.

        The journal is queried once a second until there is a key.
        """
        if self._open and (now := self._clock.monotonic()) >= self._no_keys_until:
            self._open = not await self._ask("", self._threads, self._journal.keys.has_any)
            self._no_keys_until = now + _NO_KEYS_SECONDS
            if not self._open:
                self._known.clear()
        return self._open


def _of_row(key: UsableKey) -> Identity:
    return Identity(key.owner, key.id, key.admin, key.name, limits=key.limits or {})


def _too_many(reason: str) -> HTTPException:
    seconds = f"{_GUESS_SECONDS:.0f}"
    return HTTPException(429, f"{reason}: try again in {seconds} s", {"Retry-After": seconds})
