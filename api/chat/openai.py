"""OpenAI's format of chat completions: an answer, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tinkerflow.api.chat.answer import AnswerReader, call_id
from tinkerflow.api.chat.conversation import Prompt
from tinkerflow.api.chat.events import ArgumentsDelta, CallBegins, CallBreaks, ContentDelta, Event, ReasoningDelta
from tinkerflow.api.endpoints.generation import Generation, SamplePiece, collected
from tinkerflow.api.endpoints.openai import usage
from tinkerflow.api.endpoints.sse import event as sse
from tinkerflow.api.text import Tokenizer
from tinkerflow.backend.spec.commands import SampleResult

Json: TypeAlias = dict[str, Any]
_REASONS = {"stop": "stop", "length": "length", "calls": "tool_calls"}
_LOWEST = -9999.0  # OpenAI's own value, since JSON has no infinity


@dataclass(frozen=True)
class AnswerOptions:
    """Optional parts of an answer.

    created: seconds since 1970. logprobs: include the logprobs of each sampled token and of the most likely
    alternatives. token_ids: include those of prompt and answer. usage: include the usage at the end of a stream.
    named_by_id: write tokens as `token_id:<n>`.
    """

    created: int
    logprobs: bool
    token_ids: bool
    usage: bool
    named_by_id: bool


class ChatAnswer:
    """The answer to one request, whole or in chunks."""

    def __init__(
        self, generation: Generation, prompt: Prompt, options: AnswerOptions, reader: Callable[[], AnswerReader]
    ) -> None:
        """generation: samples that follow `prompt`. reader: makes a reader for one sample."""
        self._generation = generation
        self._prompt = prompt
        self._options = options
        self._reader = reader
        self._tokenizer: Tokenizer = generation.target.tokenizer
        self._reasoned = 0  # tokens of reasoning in finished samples
        self._frame = {"id": generation.id, "created": options.created, "model": generation.target.name}

    def whole(self, result: SampleResult) -> Json:
        choices = [self._choice(piece) for piece in collected(result)]
        return {
            **self._frame,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage(result),
            **({"prompt_token_ids": self._prompt.tokens} if self._options.token_ids else {}),
        }

    async def events(self) -> AsyncIterator[bytes]:
        readers: dict[int, _Deltas] = {}
        async with self._generation as generation:
            async for piece in generation:
                first = piece.index not in readers
                deltas = readers.setdefault(piece.index, _Deltas(self._reader()))
                for choice in self._chunk(deltas, piece, first=first):
                    chunk = {**self._frame, "object": "chat.completion.chunk", "choices": [choice]}
                    if self._options.token_ids and len(readers) == 1 and first:
                        chunk["prompt_token_ids"] = self._prompt.tokens
                        first = False
                    yield sse({**chunk, "usage": None} if self._options.usage else chunk)
            if self._options.usage:
                self._reasoned = sum(deltas.reader.reasoning_tokens for deltas in readers.values())
                usage = self._usage(await generation.result())
                yield sse({**self._frame, "object": "chat.completion.chunk", "choices": [], "usage": usage})
            yield sse(b"[DONE]")

    def _usage(self, result: SampleResult) -> Json:
        of_completion = {"completion_tokens_details": {"reasoning_tokens": self._reasoned}}
        return {**usage([self._prompt.tokens], [result]), **of_completion}

    def _choice(self, piece: SamplePiece) -> Json:
        reader = self._reader()
        reader.feed(piece)
        self._reasoned += reader.reasoning_tokens
        answer = reader.answer
        message: Json = {
            "role": "assistant",
            "content": answer.content or (None if answer.calls else ""),
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {"id": call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        return {
            "index": piece.index,
            "message": message,
            **self._tokens(piece),
            "finish_reason": _REASONS[reader.finish],
            "stop_reason": reader.stopped,
        }

    def _chunk(self, deltas: _Deltas, piece: SamplePiece, *, first: bool) -> list[Json]:
        """The parts of a choice for new tokens. The first part contains the tokens' ids and logprobs."""
        parts = deltas.of(deltas.reader.feed(piece))
        if first:
            parts = [{"role": "assistant", "content": ""}, *parts]
        tokens = self._tokens(piece)
        if not parts and (tokens["logprobs"] is not None or "token_ids" in tokens):
            parts = [{}]
        choices: list[Json] = [
            {"index": piece.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts
        ]
        if choices and piece.tokens:
            choices[0] |= tokens
        if piece.stop_reason is not None:
            reason = {"finish_reason": _REASONS[deltas.reader.finish], "stop_reason": deltas.reader.stopped}
            choices.append({"index": piece.index, "delta": {}, "logprobs": None, **reason})
        return choices

    def _tokens(self, piece: SamplePiece) -> Json:
        """Logprobs and ids of the tokens, as the options request."""
        shown: Json = {"logprobs": None}
        if self._options.logprobs:
            tops = piece.top or [[]] * len(piece.tokens)
            shown["logprobs"] = {
                "content": [
                    {**self._token(token, logprob), "top_logprobs": [self._token(*one) for one in top]}
                    for token, logprob, top in zip(piece.tokens, piece.logprobs, tops, strict=True)
                ],
                "refusal": None,
            }
        if self._options.token_ids:
            shown["token_ids"] = piece.tokens
        return shown

    def _token(self, token: int, logprob: float) -> Json:
        text = f"token_id:{token}" if self._options.named_by_id else self._tokenizer.token_text(token)
        return {"token": text, "logprob": max(logprob, _LOWEST), "bytes": list(self._tokenizer.token_bytes(token))}


class _Deltas:
    """Converts the events of one sample to deltas of its message. Calls are numbered in the order they begin."""

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self._calls = 0

    def of(self, events: Sequence[Event]) -> list[Json]:
        return [delta for event in events for delta in self._delta(event)]

    def _delta(self, event: Event) -> list[Json]:
        match event:
            case ReasoningDelta(text):
                return [{"reasoning_content": text}]
            case ContentDelta(text) | CallBreaks(text):
                return [{"content": text}]
            case CallBegins(name):
                self._calls += 1
                return [self._call({"name": name, "arguments": ""}, id=call_id(), type="function")]
            case ArgumentsDelta(text):
                return [self._call({"arguments": text})]
            case _:
                return []

    def _call(self, function: Mapping[str, str], **more: str) -> Json:
        return {"tool_calls": [{"index": self._calls - 1, **more, "function": function}]}
