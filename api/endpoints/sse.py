"""Server-sent events: an answer in parts, which ends when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinkerflow.api.errors import error_body, message_of, status_of
from tinkerflow.backend.core.errors import TinkerflowError
from tinkerflow.backend.journal import AWAY

_COMMENT_SECONDS = 15.0  # between comments, which clients ignore; proxies end connections that are quiet for a minute


def event(data: Mapping[str, Any] | bytes, name: str = "") -> bytes:
    """One event with `data` as JSON, or bytes as they are. name: the event's type, if the API names types."""
    body = data if isinstance(data, bytes) else orjson.dumps(data)
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + body + b"\n\n"


class EventStream(Response):
    """Sends events as they arrive, and comments in between, so that no proxy takes a long wait for a lost connection.

    When the client disconnects, the iterator of events is closed immediately.

    The status is sent before the first event, so a later error is sent as an event, in the API's format. Await work
    that can fail beforehand (`Generation.begin`), so that its error becomes a response.
    """

    def __init__(
        self,
        request: Request,
        events: AsyncIterator[bytes],
        *,
        headers: Mapping[str, str] | None = None,
        error_name: str = "",
    ) -> None:
        """request: the client's request, with its body read. error_name: the type of an event with an error."""
        # With its default settings, nginx would send each event only once the next one arrives.
        unbuffered = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(media_type="text/event-stream", headers={**unbuffered, **(headers or {})})
        del self.headers["content-length"]
        self._request = request
        self._events = events
        self._error_name = error_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, unless the client disconnects first."""
        sending = asyncio.create_task(self._send(send), name="events")
        leaving = asyncio.create_task(left(self._request), name="disconnect")
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            leaving.cancel()
            sending.cancel()
            await asyncio.wait((sending, leaving))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        commenting = asyncio.create_task(_comment(send), name="comments")
        try:
            async for part in self._events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except (TinkerflowError, *AWAY) as error:
            body = error_body(self._request.url.path, status_of(error), message_of(error), error)
            await send({"type": "http.response.body", "body": event(body, self._error_name), "more_body": True})
        finally:
            commenting.cancel()
            if (close := getattr(self._events, "aclose", None)) is not None:
                await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _comment(send: Send) -> None:
    while True:
        await asyncio.sleep(_COMMENT_SECONDS)
        await send({"type": "http.response.body", "body": b": the answer is not complete yet\n\n", "more_body": True})


async def left(request: Request) -> None:
    """Return when the client disconnects. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
