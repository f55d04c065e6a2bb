"""Keys about themselves: exchanged for a token, looked at, given up."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from tinkerflow.api.deps import Authorised
from tinkerflow.api.models import KeyDetails, KeyOrganization, KeyUser, OwnKey, Token
from tinkerflow.backend.errors import UserError

router = APIRouter()


@router.post("/auth/token")
async def exchange(call: Authorised) -> Token:
    """A token that stands for the key for an hour."""
    return Token(jwt=call.services.auth.token(call.identity))


@router.get("/auth/apikey/me")
async def own_key(call: Authorised) -> OwnKey:
    """The key that is shown. Its name stands where an e-mail address is expected, its project for the organization."""
    identity = call.identity
    details = KeyDetails(org_details=KeyOrganization(name=identity.owner), user_details=KeyUser(email=identity.name))
    return OwnKey(key_id=identity.number, name=identity.name, details=details)


@router.delete("/auth/apikey/me", status_code=204)
async def revoke_own_key(call: Authorised) -> None:
    """Revoke the key that is shown, and no other. Every key may do that; its tokens end with it."""
    if not call.key_id:
        raise UserError("there is no key to revoke: this server listens on loopback, and none was ever made for it")
    await asyncio.to_thread(call.journal.revoke_key, call.key_id)
    call.services.auth.forget(call.key_id)
