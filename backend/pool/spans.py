"""The spans of a worker: a span for each command of a traced request, and a span for each sample.

A sample's span begins when the sample joins the decode batch, and ends when the sample leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tinkerflow.backend.core import tracing
from tinkerflow.backend.spec.commands import Command, DeferredReply, Reply, SampleProgress, SampleStep

if TYPE_CHECKING:
    from opentelemetry.trace import Span

T = TypeVar("T")
Execute = Callable[[Command], Reply | DeferredReply]


class CommandSpans:
    def __init__(self) -> None:
        self._samples: dict[str, Span] = {}

    def around(self, execute: Execute, parent: str | None) -> Execute:
        """Wrap `execute` in a span. parent: the context of the request's span; None: no span."""

        def traced(command: Command) -> Reply | DeferredReply:
            span = self._begin(command, parent)
            reply = _noted(span, partial(execute, command))
            return partial(self._answer, reply, span) if callable(reply) else self._answer(lambda: reply, span)

        return traced

    def _begin(self, command: Command, parent: str | None) -> Span | None:
        if isinstance(command, SampleStep):
            for request in command.admit:
                if request.trace and (span := tracing.begin("decode", request.trace, request_id=request.request_id)):
                    self._samples[request.request_id] = span
            self._end(command.cancel)
        return tracing.begin(type(command).__name__, parent) if parent else None

    def _answer(self, wait: DeferredReply, span: Span | None) -> Reply:
        reply = _noted(span, wait)
        if isinstance(reply, SampleProgress):
            self._end([result.request_id for result in reply.finished])
        if span is not None:
            span.end()
        return reply

    def _end(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (span := self._samples.pop(request_id, None)) is not None:
                span.end()


def _noted(span: Span | None, work: Callable[[], T]) -> T:
    """Call `work` and return its result. An error is recorded in the span and ends the span."""
    try:
        return work()
    except BaseException as error:
        if span is not None:
            span.record_exception(error)
            span.end()
        raise
