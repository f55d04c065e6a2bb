"""retrieve_future: the result of an operation, long-polled."""

from __future__ import annotations

import asyncio

import orjson
from fastapi import APIRouter
from fastapi.responses import Response

from api.deps import Authorised
from api.models import RetrieveFuture
from api.refusals import reason_of
from backend.journal import Result

router = APIRouter()


@router.post("/retrieve_future")
async def retrieve_future(call: Authorised) -> Response:
    """The answer; while there is none the poll is held, because the SDK asks again without any pause.

    Not yet: `try_again`. Failed: `error` and `category`. Done: protobuf for forward, forward_backward and sample, JSON
    for the rest. An answer can be read again: downloads get cut, and polls of one id overlap.
    """
    body, services = await call.parsed(RetrieveFuture), call.services
    refused = reason_of(body.request_id)
    if refused is not None:
        return _failed(refused, "user")
    result = await asyncio.to_thread(services.journal.result, body.request_id, call.owner)
    hold = services.settings.poll_hold
    if result is None and await services.holds.wait(services.waiters, body.request_id, hold):
        result = await asyncio.to_thread(services.journal.result, body.request_id, call.owner)
    return _answer(body.request_id, result)


def _answer(request_id: str, result: Result | None) -> Response:
    if result is None:
        return _json({"type": "try_again", "request_id": request_id, "queue_state": "active"})
    if result.error is not None:
        return _failed(result.error, result.category or "unknown")
    media = "application/x-protobuf" if result.result_type == "proto" else "application/json"
    return Response(result.result, media_type=media)


def _failed(error: str, category: str) -> Response:
    return _json({"error": error, "category": category})


def _json(values: dict[str, str]) -> Response:
    return Response(orjson.dumps(values), media_type="application/json")
