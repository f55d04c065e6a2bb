"""Copies a checkpoint into another project, or under another label of the caller's own project."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from datetime import timedelta

from tinkerflow.api.call import Authorized, Call, Router
from tinkerflow.api.checkpoints import destination
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import Wire
from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.core.ids import model_id
from tinkerflow.backend.journal import CheckpointSaved, access_hash
from tinkerflow.backend.store import CheckpointPath
from tinkerflow.backend.wire import CopyWeights, parse

router = Router()

_TOKEN = "x-tinker-weights-access-token"
_KEY = "x-idempotency-key"


class WeightsCopied(Wire):
    """The path of the copy."""

    tinker_path: str


@router.post("/copy_weights", openapi_extra=takes(CopyWeights))
async def copy_weights(call: Authorized) -> WeightsCopied:
    """Copy a checkpoint that is the caller's own, public, or opened by a weights access token. Returns the copy's path.

    The copy belongs to a new run, which takes no work. All attempts with the same X-Idempotency-Key make only one copy,
    even if the copy has been deleted since.
    """
    body = CopyWeights.from_values(parse(await call.body()))
    return WeightsCopied(tinker_path=await asyncio.to_thread(_copy, call, body))


def _copy(call: Call, wanted: CopyWeights) -> str:
    owner, label = destination(call, wanted.destination_project_id)
    source_path = CheckpointPath.parse(wanted.source_path)
    session_id = _session_id(call, wanted, source_path)
    run_id = model_id(session_id, 0)
    path = str(CheckpointPath(run_id, source_path.kind, source_path.name))
    if _has_session(call, session_id, owner):  # an earlier attempt made the copy, which may be deleted now
        return path
    token = call.request.headers.get(_TOKEN) or wanted.weights_access_token
    access = None if token is None else access_hash(token)
    source = call.journal.checkpoints.get(str(source_path), call.owner, access=access)
    call.journal.checkpoints.check_storage(owner, call.limits_of(owner))
    ttl, now = wanted.ttl_seconds, call.services.clock.now()
    expires_at = None if ttl is None else now + timedelta(seconds=ttl)
    saved = call.services.store.copy(source.path, run_id, owner=owner, expires_at=expires_at, request_id=session_id)
    return call.journal.imports.record_copy(
        session_id, CheckpointSaved.of(saved), source.path, key_id=call.key_id, project_id=label
    )


def _session_id(call: Call, wanted: CopyWeights, source: CheckpointPath) -> str:
    """An id that is equal for all attempts at one copy, and different for other copies."""
    key = call.request.headers.get(_KEY) or secrets.token_hex(16)
    label, ttl = str(wanted.destination_project_id), str(wanted.ttl_seconds)
    of = "\n".join((call.owner, key, str(source), label, ttl))
    return f"copy-{hashlib.sha256(of.encode()).hexdigest()[:24]}"


def _has_session(call: Call, session_id: str, owner: str) -> bool:
    try:
        call.journal.sessions.get(session_id, owner)
    except NotFoundError:
        return False
    return True
