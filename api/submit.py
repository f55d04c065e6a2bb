"""Putting operations into the journal. Wrong content is stored as a failed request, not refused (PROTOCOL.md 3.5)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection

import orjson
from fastapi.responses import Response

from tinkerflow.api.call import Call
from tinkerflow.api.routes.futures import accepted
from tinkerflow.backend.errors import UserError
from tinkerflow.backend.journal import Kind, NewRequest
from tinkerflow.backend.spec.limits import MAX_SEQ
from tinkerflow.backend.wire import Fields

_SAVES = (Kind.SAVE_WEIGHTS, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL)


def content_hash(body: bytes, without: Collection[str] = ()) -> str:
    """Equal for JSON bodies that mean the same; the top-level fields `without` do not count."""
    values = orjson.loads(body)
    kept = {key: value for key, value in values.items() if key not in without}
    return hashlib.sha256(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)).hexdigest()


def submit_for_model(
    call: Call,
    kind: Kind,
    body: bytes,
    check: Callable[[bytes], object],
    *,
    not_content: Collection[str] = (),
) -> Response:
    """Store a JSON operation on a model and answer with its id.

    `check` raises UserError for wrong content, which then fails the request. UserError from here means that the body
    does not say which model or seq_id it is for; NotFoundError and ConflictError are the journal's.
    """
    values = Fields.parse(body)
    model_id = values.text("model_id")
    request = NewRequest(
        kind=kind,
        owner=call.owner,
        payload=body,
        payload_type="json",
        content_hash=content_hash(body, not_content),
        model_id=model_id,
        seq_id=values.whole("seq_id", 1, MAX_SEQ),
        error=complaint(check, body),
        # A save that names nothing is kept for sampling only, and not stored.
        stores=kind in _SAVES and values.has("path"),
    )
    return accepted(call.journal.requests.submit(request, call.services.limits), model_id=model_id)


def complaint(check: Callable[[bytes], object], body: bytes) -> str | None:
    """What `check` finds wrong with the body, None when nothing."""
    try:
        check(body)
    except UserError as e:
        return e.message
    return None
