"""Anthropic's format of messages: an answer in blocks, and the events of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias

from tinkerflow.api.chat.answer import AnswerReader, call_id
from tinkerflow.api.chat.conversation import Prompt
from tinkerflow.api.chat.events import (
    ArgumentsDelta,
    CallBegins,
    CallBreaks,
    CallEnds,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from tinkerflow.api.endpoints.generation import Generation, collected
from tinkerflow.api.endpoints.sse import event as sse
from tinkerflow.backend.spec.commands import SampleResult

Json: TypeAlias = dict[str, Any]
_REASONS = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}


class MessageAnswer:
    """The answer to one request, whole or in events."""

    def __init__(
        self, generation: Generation, prompt: Prompt, reader: AnswerReader, *, reports_edits: bool = False
    ) -> None:
        """generation: a sample that follows `prompt`. reader: reads it.

        reports_edits: whether to report that no edit of `context_management` was applied.
        """
        self._generation = generation
        self._prompt = prompt
        self._reader = reader
        self._edits: Json = {"context_management": {"applied_edits": []}} if reports_edits else {}
        self._open: str | None = None  # the type of the block that receives deltas
        self._index = -1  # number of the newest block
        self._calls = iter(reader.answer.calls)  # calls not sent yet

    def whole(self, result: SampleResult) -> Json:
        content: list[Json] = []
        for event in (event for piece in collected(result) for event in self._reader.feed(piece)):
            match event:
                case ReasoningDelta(text):
                    self._add(content, "thinking", text, signature=self._generation.id)
                case ContentDelta(text) | CallBreaks(text):
                    self._add(content, "text", text)
                case CallEnds():
                    call = next(self._calls)
                    content.append(_tool_use(call.name) | {"input": call.values})
        if not self._reader.answer.content and not self._reader.answer.calls:
            self._add(content, "text", "")
        return {**self._message(content), **self._ending(), **self._edits, "usage": self._usage(result)}

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as a stream of events, in Anthropic's order."""
        async with self._generation as generation:
            usage = {"input_tokens": len(self._prompt.tokens), "output_tokens": 0}
            message = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield _event("message_start", message=message)
            yield _event("ping")
            async for piece in generation:
                for event in self._reader.feed(piece):
                    for part in self._parts(event):
                        yield part
            for part in self._close():
                yield part
            result = await generation.result()
            yield _event("message_delta", delta=self._ending(), **self._edits, usage=self._usage(result))
            yield _event("message_stop")

    def _add(self, content: list[Json], kind: str, text: str, **more: str) -> None:
        """Add text to the last block if it has the type `kind`, or else to a new block."""
        if not content or content[-1]["type"] != kind:
            content.append({"type": kind, kind: "", **more})
        content[-1][kind] += text

    def _message(self, content: Sequence[Json]) -> Json:
        name, model = self._generation.id, self._generation.target.name
        return {"id": name, "type": "message", "role": "assistant", "model": model, "content": content}

    def _ending(self) -> Json:
        stopped = self._reader.stopped
        reason = _REASONS[self._reader.finish]
        return {
            "stop_reason": "stop_sequence" if stopped is not None and reason == "end_turn" else reason,
            "stop_sequence": stopped,
        }

    def _usage(self, result: SampleResult) -> Json:
        cached = result.prompt_cache_hit_tokens
        return {
            "input_tokens": len(self._prompt.tokens) - cached,
            "output_tokens": sum(len(sequence.tokens_T) for sequence in result.sequences),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }

    # -------------------------------------------------------------- a stream's blocks
    def _parts(self, event: Event) -> list[bytes]:
        """Anthropic's events for one event. A call is sent once complete, because clients fail on calls that break."""
        match event:
            case ReasoningDelta(text):
                return self._text("thinking", text)
            case ContentDelta(text) | CallBreaks(text):
                return self._text("text", text)
            case CallBegins():
                return []
            case ArgumentsDelta():
                return [_event("ping")]
            case CallEnds():
                call = next(self._calls)
                parts = self._begin("tool_use", _tool_use(call.name))
                return [*parts, self._delta("input_json_delta", partial_json=call.arguments)]

    def _text(self, kind: str, text: str) -> list[bytes]:
        """More text for a block of the type `kind`, which is also the name of its text field."""
        signed = {"signature": ""} if kind == "thinking" else {}
        begin = [] if self._open == kind else self._begin(kind, {"type": kind, kind: "", **signed})
        return [*begin, self._delta(f"{kind}_delta", **{kind: text})]

    def _begin(self, kind: str, block: Json) -> list[bytes]:
        closed = self._close()
        self._open = kind
        self._index += 1
        return [*closed, _event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        signed = self._open == "thinking"
        self._open = None
        signature = [self._delta("signature_delta", signature=self._generation.id)] if signed else []
        return [*signature, _event("content_block_stop", index=self._index)]

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _tool_use(name: str) -> Json:
    return {"type": "tool_use", "id": f"toolu_{call_id()}", "name": name, "input": {}}
