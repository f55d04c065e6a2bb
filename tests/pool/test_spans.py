"""Spans of a worker process reach an OTLP receiver, as children of the driver's span."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.waiting import until

from tinkerflow.backend.core import tracing
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.pool.spans import CommandSpans
from tinkerflow.backend.spec.commands import DropAdapter, Ping, SampleProgress, SampleStep

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """(service, name, trace id, parent's id) of spans that reach the endpoint in the environment."""
    found: list[tuple[str, str, str, str]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in body.resource_spans:
                names = {one.key: one.value.string_value for one in resource.resource.attributes}
                for scope in resource.scope_spans:
                    found.extend(
                        (names["service.name"], span.name, span.trace_id.hex(), span.parent_span_id.hex())
                        for span in scope.spans
                    )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield found
        server.shutdown()
        thread.join()


async def test_a_worker_sends_a_span_of_each_command_of_a_traced_request(
    start_pool: Any, received: Any, exporter: InMemorySpanExporter
) -> None:
    pool = await start_pool(processes=2)
    await pool.submit(DropAdapter("progress"))  # belongs to no request
    with tracing.span("optim_step", PARENT):
        inside = tracing.current.get()
        await pool.submit(Ping())
    assert inside is not None
    _, trace, parent, _ = inside.split("-")
    await until(lambda: received)
    assert received == [("tinkerflow-worker", "Ping", trace, parent)], "of rank 0, once"


def test_a_sample_has_a_span_from_joining_to_leaving(exporter: InMemorySpanExporter) -> None:
    spans = CommandSpans()
    progress = iter(
        [
            SampleProgress((), 2, 0),
            SampleProgress((SimpleNamespace(request_id="a"),), 1, 0),  # type: ignore[arg-type]
            SampleProgress((), 0, 0),
        ]
    )
    run = spans.around(lambda command: lambda: next(progress), None)

    def step(admit: tuple[str, ...] = (), cancel: tuple[str, ...] = ()) -> list[str]:
        admitted = tuple(SimpleNamespace(request_id=one, trace=PARENT if one != "c" else None) for one in admit)
        reply = run(SampleStep(admitted, cancel))  # type: ignore[arg-type]
        assert callable(reply)
        reply()
        return [f"{one.name} {one.attributes['request_id']}" for one in exporter.get_finished_spans() if one.attributes]

    assert step(("a", "b", "c")) == []
    assert step() == ["decode a"]
    assert step(cancel=("b",)) == ["decode a", "decode b"]


def test_span_of_a_command_records_its_exception(exporter: InMemorySpanExporter) -> None:
    def fail(command: object) -> Any:
        raise UserError("rank is 0")

    with pytest.raises(UserError, match="rank is 0"):
        CommandSpans().around(fail, PARENT)(Ping())
    (span,) = exporter.get_finished_spans()
    assert (span.name, [event.name for event in span.events]) == ("Ping", ["exception"])
