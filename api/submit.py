"""Storing JSON operations on a model. Wrong content is not refused but stored as a failed request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import orjson
from fastapi.responses import Response

from tinkerflow.api.call import Call
from tinkerflow.api.routes.futures import accepted
from tinkerflow.backend.errors import UserError
from tinkerflow.backend.journal import Kind, NewRequest
from tinkerflow.backend.wire import OnModel, parse

_SAVES = (Kind.SAVE_WEIGHTS, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL)


def content_hash(values: Mapping[str, Any], without: Collection[str] = ()) -> str:
    """Equal for JSON bodies that mean the same; the top-level fields `without` do not count."""
    kept = {key: value for key, value in values.items() if key not in without}
    return hashlib.sha256(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)).hexdigest()


def submit_for_model(
    call: Call,
    kind: Kind,
    body: bytes,
    check: Callable[[dict[str, Any]], object],
    *,
    not_content: Collection[str] = (),
) -> Response:
    """Store an operation on a model and answer with its id.

    body: its JSON, stored as it came. check: raises UserError for wrong content, which then fails the request.
    not_content: fields in which a repeated submit may differ. UserError from here means that the body does not say
    which model or seq_id it is for; NotFoundError and ConflictError are the journal's.
    """
    values = parse(body)
    address = OnModel.read(values)
    request = NewRequest(
        kind=kind,
        owner=call.owner,
        payload=body,
        content_hash=content_hash(values, not_content),
        model_id=address.model_id,
        seq_id=address.seq_id,
        error=complaint(check, values),
        # A save that names nothing is kept for sampling only, and not stored.
        stores=kind in _SAVES and values.get("path") is not None,
    )
    return accepted(call.journal.requests.submit(request, call.services.limits), model_id=address.model_id)


def complaint(check: Callable[[dict[str, Any]], object], values: dict[str, Any]) -> str | None:
    """What `check` finds wrong with the values, None when nothing."""
    try:
        check(values)
    except UserError as e:
        return e.message
    return None
