"""Futures: long polls for the results of requests (api/submit.py stores the requests), and cancelling samples."""

from __future__ import annotations

import asyncio
import zlib
from functools import partial

from fastapi.responses import Response
from pydantic import Field

from tinkerflow.api.call import Authorized, Call, Router
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import Wire
from tinkerflow.api.submit import json_response, reason_of
from tinkerflow.backend.journal import Completions, Result

router = Router(busy=9)

_MOST_RETRIEVED = 2**23  # bytes of a body with ids of retrieved results


class RetrieveFuture(Wire):
    """The request whose result to return. allow_metadata_only: return the size of a large result first."""

    request_id: str
    allow_metadata_only: bool = False


class SamplingTarget(Wire):
    """One copy of a sampling client. retrieve_futures reports on its requests."""

    sampling_session_id: str
    cloned_sampler_id: int = Field(default=0, ge=0, lt=9_000_000_000)


class RetrieveFutures(Wire):
    """A query for the requests that were answered after the cursor.

    timeout: seconds to wait if there are none. retrieved_request_ids: results that the client has downloaded.
    """

    target: SamplingTarget
    prev_cursor: int = Field(default=0, ge=0, lt=2**63)
    timeout: float | None = Field(default=None, ge=0)
    retrieved_request_ids: tuple[str, ...] = Field(default=(), max_length=100_000)


class CancelFuture(Wire):
    """The sample request to cancel."""

    request_id: str


@router.post("/retrieve_future", openapi_extra=takes(RetrieveFuture))
async def retrieve_future(call: Authorized) -> Response:
    """The result of a request. While there is none, the poll is held, because the SDK polls again without a pause.

    Without a result: `try_again`, with a reason during recovery. After a failure: `error` and `category`. Otherwise the
    result: protobuf for forward, forward_backward and sample, JSON for other operations. A result can be read several
    times, because downloads may fail and polls for one id may overlap. If a result is larger than the setting
    `metadata_only_over` and the poll allows it, the response contains only the size (`complete_metadata`). The SDK then
    reserves that many bytes and polls again.
    """
    body, services = await call.parsed(RetrieveFuture), call.services
    refused = reason_of(body.request_id)
    if refused is not None:
        return _failed(refused, "user")
    at_most = services.settings.metadata_only_over if body.allow_metadata_only else None
    hold = spread(services.settings.poll_hold, body.request_id)
    look = partial(services.journal.results.get, body.request_id, call.owner, at_most=at_most)
    with services.subscriptions.request(body.request_id) as answer:
        result = await asyncio.to_thread(look)
        if result is None and await services.holds.hold(answer.wait(hold)):
            result = await asyncio.to_thread(look)
    if result is None:
        return _not_yet(body.request_id, await asyncio.to_thread(services.journal.queue.waits_for, body.request_id))
    if result.error is not None and result.category == "server" and not result.again:
        services.metrics.failed[result.kind] += 1
    return _answer(result, body.request_id)


@router.post("/retrieve_futures", openapi_extra=takes(RetrieveFutures))
async def retrieve_futures(call: Authorized) -> Response:
    """The requests of one copy of a sampling client that were answered since its cursor; held while there are none.

    Results that the client has downloaded are dropped, because no one else reads them.
    """
    body = await call.parsed(RetrieveFutures, _MOST_RETRIEVED)
    target, owner = body.target, call.owner
    if body.retrieved_request_ids:
        await asyncio.to_thread(
            call.journal.results.acknowledge,
            target.sampling_session_id,
            owner,
            body.retrieved_request_ids,
            clone=target.cloned_sampler_id,
        )
    found = await _completions(call, body)
    rows = [
        {"state": "finished", "request_id": row.request_id, "response_payload_uncompressed_size": row.size}
        if row.done
        else {"state": "failed", "request_id": row.request_id}
        for row in found.rows
    ]
    return json_response({"completions": rows, "cursor": found.cursor})


async def _completions(call: Call, body: RetrieveFutures) -> Completions:
    services, target = call.services, body.target
    hold = spread(services.settings.poll_hold, f"{target.sampling_session_id}:{target.cloned_sampler_id}")
    loop = asyncio.get_running_loop()
    until = loop.time() + (hold if body.timeout is None else min(body.timeout, hold))
    with services.subscriptions.sampler(target.sampling_session_id, target.cloned_sampler_id) as watch:
        after = body.prev_cursor
        while True:
            found = await asyncio.to_thread(
                services.journal.results.completions,
                target.sampling_session_id,
                call.owner,
                clone=target.cloned_sampler_id,
                after=after,
            )
            watch.seen = after = found.cursor
            left = until - loop.time()
            if found.rows or left <= 0 or not await services.holds.hold(watch.wait(left)):
                return found


@router.post("/cancel_future", openapi_extra=takes(CancelFuture))
async def cancel_future(call: Authorized) -> dict[str, object]:
    """Cancel a sample. It fails as `cancelled by the client`, and its slot in the decode batch is freed.

    A request that was already answered keeps its answer. Training requests cannot be cancelled (400).
    """
    body = await call.parsed(CancelFuture)
    if reason_of(body.request_id) is None:
        await asyncio.to_thread(call.journal.requests.cancel, body.request_id, call.owner)
    return {}


def spread(hold: float, name: str) -> float:
    """The seconds to hold a poll: 75 % to 100 % of `hold`, always the same for the same name.

    Otherwise, polls that arrive together would end together, and thousands of new polls would arrive simultaneously.
    """
    return hold * (0.75 + 0.25 * zlib.crc32(name.encode()) / 2**32)


def _not_yet(request_id: str, reason: str | None) -> Response:
    """A response without a result. reason: why the queue is stalled, or None. The SDK logs it as `paused_capacity`."""
    if reason is None:
        return json_response({"type": "try_again", "request_id": request_id, "queue_state": "active"})
    waiting = {"queue_state": "paused_capacity", "queue_state_reason": reason}
    return json_response({"type": "try_again", "request_id": request_id, **waiting})


def _answer(result: Result, request_id: str) -> Response:
    if result.error is not None:
        return _failed(result.error, result.category or "unknown")
    if result.result is None:
        return json_response(
            {"status": "complete_metadata", "response_payload_size": result.size, "request_id": request_id}
        )
    media = "application/x-protobuf" if result.result_type == "proto" else "application/json"
    return Response(result.result, media_type=media)


def _failed(error: str, category: str) -> Response:
    return json_response({"error": error, "category": category})
