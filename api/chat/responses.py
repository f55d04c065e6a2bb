"""OpenAI's format of responses: an answer in items, and the events of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
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
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}  # the type of an item's only part
_LOGPROBS: dict[str, Json] = {"message": {"logprobs": []}, "reasoning": {}}  # clients read them in events of texts


class ResponseAnswer:
    """The answer to one request, whole or in events: items of the types reasoning, message and function_call."""

    def __init__(
        self,
        generation: Generation,
        prompt: Prompt,
        reader: AnswerReader,
        created: int,
        echoed: Mapping[str, Any],
        groups: Mapping[str, tuple[str, str]],
    ) -> None:
        """generation: a sample that follows `prompt`. reader: reads it. created: seconds since 1970.

        echoed: the fields of the request that a response repeats. groups: the group and the name of each function in a
        group, by its name in calls.
        """
        self._generation = generation
        self._prompt = prompt
        self._reader = reader
        self._frame = {
            "id": generation.id,
            "object": "response",
            "created_at": created,
            "model": generation.target.name,
            "error": None,
            **echoed,
        }
        self._groups = groups
        self._items: list[Json] = []
        self._calls = iter(reader.answer.calls)  # calls that are not items yet
        self._open = False  # whether the last item receives deltas
        self._number = -1  # number of the newest event

    def whole(self, result: SampleResult) -> Json:
        for piece in collected(result):
            for event in self._reader.feed(piece):
                self._parts(event)
        self._close(self._status)
        return self._finished(result)

    async def events(self) -> AsyncIterator[bytes]:
        async with self._generation as generation:
            begun = {**self._frame, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
            async for piece in generation:
                for event in self._reader.feed(piece):
                    for part in self._parts(event):
                        yield part
            for part in self._close(self._status):
                yield part
            finished = self._finished(await generation.result())
            yield self._event(f"response.{finished['status']}", response=finished)

    @property
    def _status(self) -> str:
        """The status of the answer, and of its last item, once the sample is done."""
        return "incomplete" if self._reader.finish == "length" else "completed"

    def _finished(self, result: SampleResult) -> Json:
        status = self._status
        read, sampled = len(self._prompt.tokens), sum(len(one.tokens_T) for one in result.sequences)
        return {
            **self._frame,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items,
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": result.prompt_cache_hit_tokens, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
                "total_tokens": read + sampled,
            },
        }

    # -------------------------------------------------------------- items and their events
    def _parts(self, event: Event) -> list[bytes]:
        """OpenAI's events for one event. A call is sent once complete, because items cannot be withdrawn."""
        match event:
            case ReasoningDelta(text):
                return self._text("reasoning", text)
            case ContentDelta(text) | CallBreaks(text):
                return self._text("message", text)
            case CallBegins() | ArgumentsDelta():
                return []
            case CallEnds():
                call = next(self._calls)
                group, name = self._groups.get(call.name, ("", call.name))
                grouped = {"namespace": group} if group else {}
                item = {"type": "function_call", "call_id": call_id(), "name": name, **grouped, "arguments": ""}
                begin = self._begin(item)
                self._items[-1]["arguments"] = call.arguments
                delta = self._of_item("response.function_call_arguments.delta", delta=call.arguments)
                return [*begin, delta, *self._close()]

    def _text(self, kind: str, text: str) -> list[bytes]:
        begin: list[bytes] = []
        part = _PARTS[kind]
        if not self._open or self._items[-1]["type"] != kind:
            more: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            begin = self._begin({"type": kind, **more, "content": []})
            shown: Json = {"type": part, "text": ""} | (
                {"annotations": [], "logprobs": []} if kind == "message" else {}
            )
            self._items[-1]["content"].append(shown)
            begin.append(self._of_item("response.content_part.added", content_index=0, part=dict(shown)))
        self._items[-1]["content"][0]["text"] += text
        return [*begin, self._of_item(f"response.{part}.delta", content_index=0, delta=text, **_LOGPROBS[kind])]

    def _begin(self, item: Json) -> list[bytes]:
        closed = self._close()
        self._items.append({"id": f"item_{call_id()}", "status": "in_progress", **item})
        self._open = True
        return [*closed, self._of_item("response.output_item.added", item=dict(self._items[-1]))]

    def _close(self, status: str = "completed") -> list[bytes]:
        if not self._open:
            return []
        self._open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            parts = [self._of_item("response.function_call_arguments.done", **told)]
        else:
            part = item["content"][0]
            parts = [
                self._of_item(
                    f"response.{part['type']}.done", content_index=0, text=part["text"], **_LOGPROBS[item["type"]]
                ),
                self._of_item("response.content_part.done", content_index=0, part=part),
            ]
        return [*parts, self._of_item("response.output_item.done", item=item)]

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        item = {} if "item" in fields else {"item_id": self._items[-1]["id"]}
        return self._event(kind, output_index=len(self._items) - 1, **item, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)
