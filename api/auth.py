"""Who is asking: the identity behind an X-API-Key header."""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass

from fastapi import HTTPException

from backend.clock import Clock
from backend.journal import Journal
from backend.settings import Settings

PREFIX = "tml-"
LOCAL_OWNER = "local"
REMEMBERED_SECONDS = 5.0  # so long a key is not looked up again, and so long a revoked one still works
_NO_KEYS_SECONDS = 1.0


@dataclass(frozen=True)
class Identity:
    """Who calls: whose rows they read and write, with which key, and whether they may look at other projects' books.

    key_id is "" on a server that is open because it is bound to loopback and no key was ever made.
    """

    owner: str
    key_id: str
    admin: bool


# Whoever can reach a server that only this machine reaches is the one who runs it.
LOCAL = Identity(LOCAL_OWNER, key_id="", admin=True)


class Authenticator:
    """Keys to identities.

    Bound to loopback with no keys made, any `tml-` key is the owner `local`; anywhere else a key must verify.
    """

    def __init__(self, settings: Settings, journal: Journal, clock: Clock) -> None:
        """Check against `journal`'s keys."""
        self._journal = journal
        self._clock = clock
        self._open = is_loopback(settings.host)
        self._no_keys_until = 0.0
        self._known: dict[str, tuple[Identity, float]] = {}

    async def identity(self, secret: str | None) -> Identity:
        """Who this key belongs to; HTTPException 401 when it opens nothing."""
        if not secret or not secret.startswith(PREFIX):
            raise _refused(f"the X-API-Key header must hold a key that starts with {PREFIX}")
        if self._open and await self._no_keys():
            return LOCAL
        now = self._clock.monotonic()
        known = self._known.get(secret)
        if known is not None and now < known[1]:
            return known[0]
        key = await asyncio.to_thread(self._journal.verify_key, secret)
        if key is None:
            self._known.pop(secret, None)
            raise _refused("the API key is unknown or revoked; `tinkerflow key create` makes one")
        identity = Identity(key.owner, key.id, key.admin)
        self._known[secret] = (identity, now + REMEMBERED_SECONDS)
        return identity

    async def _no_keys(self) -> bool:
        """Whether no key was ever made; asked once a second, and never again once there is one."""
        now = self._clock.monotonic()
        if now >= self._no_keys_until:
            self._open = not await asyncio.to_thread(self._journal.has_keys)
            self._no_keys_until = now + _NO_KEYS_SECONDS
        return self._open


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # another host name: it may resolve to anything
        return False


def _refused(reason: str) -> HTTPException:
    return HTTPException(401, reason)
