"""OpenTelemetry traces. Each client request has a trace, from the API through the engine to the worker group.

Nothing is imported or recorded unless OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) is set.
OpenTelemetry's SDK defines these and the other OTEL_ variables. The context of a span is passed on as the text of a
`traceparent` header (https://www.w3.org/TR/trace-context/), in the request's row of the journal and with commands.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, TypeVar

from tinkerflow.backend.core.errors import UserError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_HEADER = "traceparent"
T = TypeVar("T")
tracer: Tracer | None = None  # this process's tracer; None: tracing is off
current: ContextVar[str | None] = ContextVar(_HEADER, default=None)  # the context of the current span


def export(part: str) -> bool:
    """Send this process's spans to the endpoint in the environment. Returns whether there is one.

    part: the name of the process, such as `api`. UserError: the packages for traces are not installed.
    """
    if tracer is not None or not any(map(os.environ.get, _ENDPOINTS)):
        return tracer is not None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        named = next(name for name in _ENDPOINTS if os.environ.get(name))
        raise UserError(f"{named} is set: traces need the extra `otel` ({error})") from error
    service = os.environ.get("OTEL_SERVICE_NAME", "tinkerflow")
    provider = TracerProvider(resource=Resource.create({"service.name": f"{service}-{part}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    use(provider)
    return True


def use(provider: TracerProvider | None) -> None:
    """Send our spans to `provider`; None: make no spans. Spans of other libraries do not go there."""
    global tracer  # noqa: PLW0603  one per process, like its environment
    tracer = None if provider is None else provider.get_tracer("tinkerflow")


def begin(name: str, parent: str, **attributes: str) -> Span | None:
    """Start a child of the span with the context `parent`. The caller must end it. None: tracing is off."""
    return None if tracer is None else tracer.start_span(name, _context(parent), attributes=attributes)


@contextmanager
def span(
    name: str, parent: str | None, kind: Literal["INTERNAL", "SERVER"] = "INTERNAL", **attributes: str
) -> Iterator[Span | None]:
    """Run the block in a child span of `parent`. Yields None if tracing is off. An error that leaves the block is
    recorded.

    parent: the context of another span; None: the span starts a new trace.
    """
    if tracer is None:
        yield None
        return
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    with tracer.start_as_current_span(name, _context(parent), SpanKind[kind], attributes) as made:
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        before = current.set(carrier.get(_HEADER))
        try:
            yield made
        finally:
            current.reset(before)


async def inside(parent: str, work: Awaitable[T], name: str, **attributes: str) -> T:
    """Await `work` in a child span of `parent`, and return its result."""
    with span(name, parent, "INTERNAL", **attributes):
        return await work


def _context(parent: str | None) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({} if parent is None else {_HEADER: parent}, Context())
