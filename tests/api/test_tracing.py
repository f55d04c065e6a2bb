"""The span of an HTTP request. Its context is stored in the journal with the submitted request."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.api.conftest import BASE, KEY, Running
from tests.waiting import wait_for

from tinkerflow.backend.core import tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def complete(server: Running, **headers: str) -> None:
    body = {"model": BASE, "prompt": "b", "max_tokens": 1}
    headers["Authorization"] = f"Bearer {KEY}"
    assert server.http.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200


def of(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    """The span of this name, which ends after the client has the answer."""
    (one,) = wait_for(lambda: [span for span in exporter.get_finished_spans() if span.name == name])
    return one  # type: ignore[no-any-return]


def test_a_request_is_stored_with_the_context_of_its_span(
    server: Running, lettered: Any, engine: Any, exporter: InMemorySpanExporter
) -> None:
    stored = []
    answer = engine._answer
    engine._answer = lambda request: stored.append(request) or answer(request)
    complete(server, traceparent=f"00-{TRACE}-{PARENT}-01")
    span = of(exporter, "POST completions")
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.attributes == {"http.request.method": "POST", "http.response.status_code": 200}
    assert [request.trace for request in stored] == [f"00-{TRACE}-{span.context.span_id:016x}-01"]
    exporter.clear()
    assert server.http.get(f"{server.url}/nothing").status_code == 404
    assert of(exporter, "GET none").parent is None, "a trace of its own"


def test_spans_are_not_recorded_without_an_exporter(server: Running, lettered: Any, engine: Any) -> None:
    stored = []
    answer = engine._answer
    engine._answer = lambda request: stored.append(request) or answer(request)
    complete(server, traceparent=f"00-{TRACE}-{PARENT}-01")
    assert [request.trace for request in stored] == [None]
    with tracing.span("SERVER", None, "SERVER") as span:
        assert (span, tracing.current.get(), tracing.begin("x", f"00-{TRACE}-{PARENT}-01")) == (None, None, None)
