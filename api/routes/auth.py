"""Operations on the caller's own key: exchange it for a token, show its details, revoke it."""

from __future__ import annotations

import asyncio

from tinkerflow.api.call import Authorized, Router
from tinkerflow.api.schemas import Wire
from tinkerflow.backend.core.errors import UserError

router = Router()


class Token(Wire):
    """A token that represents the key."""

    jwt: str


class KeyOrganization(Wire):
    """The project of a key."""

    name: str


class KeyUser(Wire):
    """The key's name, in the field in which the SDK expects an e-mail address."""

    email: str


class KeyDetails(Wire):
    """The project and the name of a key."""

    org_details: KeyOrganization
    user_details: KeyUser


class OwnKey(Wire):
    """The caller's key, without its secret."""

    key_id: int
    name: str
    note: str = ""
    details: KeyDetails


@router.post("/auth/token")
async def exchange(call: Authorized) -> Token:
    """Exchange the key for a token that represents it for an hour."""
    return Token(jwt=call.services.auth.token(call.identity))


@router.get("/auth/apikey/me")
async def own_key(call: Authorized) -> OwnKey:
    """The caller's key. Its name fills the e-mail address, and its project the organization."""
    identity = call.identity
    details = KeyDetails(org_details=KeyOrganization(name=identity.owner), user_details=KeyUser(email=identity.name))
    return OwnKey(key_id=identity.number, name=identity.name, details=details)


@router.delete("/auth/apikey/me", status_code=204)
async def revoke_own_key(call: Authorized) -> None:
    """Revoke the caller's own key and its tokens. Every key may do this."""
    if not call.key_id:
        raise UserError("there is no key to revoke: the server listens on loopback and has never had a key")
    await asyncio.to_thread(call.journal.keys.revoke, call.key_id, actor=call.key_id)
    call.services.auth.forget(call.key_id)
