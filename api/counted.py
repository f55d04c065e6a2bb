"""The outermost layer of the app, which counts and times requests, and frees the memory of their bodies."""

from __future__ import annotations

import time
from bisect import bisect_left

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkerflow.api.bodies import BODY
from tinkerflow.api.metrics import SECONDS, Answered, Metrics
from tinkerflow.backend.core import tracing


class Counted:
    """Counts and times requests by the endpoint's name. Requests that match no endpoint count as `none`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        """app: answers the requests. metrics: stores the counts."""
        self._app = app
        self._answered = metrics.answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if tracing.tracer is None:
            await self._answer(scope, receive, send)
            return
        parent = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"), None)
        with tracing.span(scope["method"], parent, "SERVER") as span:
            status = await self._answer(scope, receive, send)
            if span is not None:
                span.update_name(f"{scope['method']} {_operation(scope)}")
                span.set_attributes({"http.request.method": scope["method"], "http.response.status_code": status})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answer one request, and return the status."""
        began, status = time.perf_counter(), 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            if (body := scope.get(BODY)) is not None:
                body.release()
            operation = _operation(scope)
            if (answered := self._answered.get(operation)) is None:
                answered = self._answered[operation] = Answered()
            seconds = time.perf_counter() - began
            answered.statuses[status] += 1
            answered.took[bisect_left(SECONDS, seconds)] += 1
            answered.seconds += seconds
        return status


def _operation(scope: Scope) -> str:
    endpoint = scope.get("endpoint")
    return "none" if endpoint is None else str(endpoint.__name__)
