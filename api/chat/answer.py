"""Converts sampled tokens to an answer: decodes text, drops structural tokens, and applies the family's parser."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import orjson
from fastapi.responses import Response

from tinkerflow.api.call import Call
from tinkerflow.api.chat.conversation import Prompt
from tinkerflow.api.chat.events import Event, FullAnswer
from tinkerflow.api.endpoints.generation import Generation, SamplePiece, generate, until_gone, written
from tinkerflow.api.endpoints.sse import EventStream
from tinkerflow.api.endpoints.targets import Target
from tinkerflow.api.errors import naming
from tinkerflow.api.text import Detokenizer
from tinkerflow.backend.spec.commands import Priority, SampleResult

Finish = Literal["stop", "length", "calls"]
_ID = string.ascii_letters + string.digits


def call_id() -> str:
    """A new id for a call: nine letters or digits, because Mistral's chat templates refuse other ids."""
    return "".join(secrets.choice(_ID) for _ in range(9))


async def sampled(
    call: Call,
    target: Target,
    prompt: Prompt,
    params: Mapping[str, Any],
    num_samples: int = 1,
    *,
    stream: bool = False,
    top_logprobs: int = 0,
    priority: Priority = "interactive",
) -> Generation:
    """Sample answers to a prompt, under its schema if it has one. Raises the errors of `generate`.

    call, target, num_samples, stream, top_logprobs, priority: see `generate`. prompt: from `prompt_of`. params:
    sampling_params without a constraint.
    """
    wanted = dict(params)
    if prompt.schema is not None:
        wanted["constraint"] = {"type": "json_schema", "value": prompt.schema}
    # Requests of these endpoints contain no constraint, and messages instead of a prompt.
    with naming({"constraint.value": prompt.schema_field, "prompt has": "messages have"}):
        return await generate(
            call,
            target,
            prompt.tokens,
            wanted,
            num_samples,
            stream=stream,
            top_logprobs=top_logprobs,
            messages=prompt.messages,
            prefill=prompt.prefill,
            images=prompt.images,
            priority=priority,
        )


class Answer(Protocol):
    """An answer in the format of one of the APIs."""

    def whole(self, result: SampleResult) -> dict[str, Any]:
        """The whole answer, once all samples are done."""

    def events(self) -> AsyncIterator[bytes]:
        """The events of a stream, as they arrive."""


async def respond(
    call: Call, generation: Generation, answer: Answer, *, stream: bool, error_name: str = ""
) -> Response:
    """Send an answer over HTTP, whole or as a stream. If the client disconnects early, the generation is cancelled.

    call: the client's call. generation: the sample. answer: the answer in the format of the API. stream: send events.
    error_name: the type of an event that reports an error.
    """
    try:
        if stream:
            await until_gone(call.request, generation.begin())
            return EventStream(call.request, answer.events(), headers=generation.headers, error_name=error_name)
        result = await until_gone(call.request, generation.result())
        content = await written(call, [result], lambda: _encoded(answer.whole(result)))
        return Response(content, media_type="application/json", headers=generation.headers)
    except BaseException:
        generation.cancel()
        raise


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:  # arguments of a call may contain lone surrogates
        return json.dumps(body).encode()


class AnswerReader:
    """Reads one sample as its tokens arrive. answer: the answer so far."""

    def __init__(
        self, target: Target, prompt: Prompt, stops: Sequence[str], *, special: bool = False, one_call: bool = False
    ) -> None:
        """Read a sample that follows `prompt`.

        target: the sampled model. stops: strings that end the answer and are not part of it. special: show all
        special tokens. one_call: end the answer after its first call.
        """
        tokenizer = target.tokenizer
        self._tokenizer = tokenizer
        self._ends = frozenset({*target.card.eos_token_ids, *prompt.ends})
        marks = {tokenizer.id_of(mark) for mark in (*prompt.spec.marks, *(prompt.spec.think or ()))}
        self._hidden = self._ends | (frozenset() if special else tokenizer.special_ids - marks)
        self._text = Detokenizer(tokenizer, stops, special=True)
        self._parser = prompt.parser()
        self._one_call = one_call
        self.answer = FullAnswer()
        self._reason: str | None = None
        self._tokens = 0  # sampled so far

    def feed(self, piece: SamplePiece) -> list[Event]:
        """Read new tokens. Returns the events that they determine."""
        self._tokens += len(piece.tokens)
        shown = [token for token in piece.tokens if token not in self._hidden]
        events = self._parser.feed(self._text.feed(shown))
        if piece.stop_reason is not None:
            self._reason = piece.stop_reason
            events += [*self._parser.feed(self._text.finish()), *self._parser.end()]
        taken: list[Event] = []
        for event in events:
            if self._one_call and self.answer.calls:
                break
            self.answer.add(event)
            taken.append(event)
        return taken

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._text.stopped

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens that the reasoning so far encodes to, but at most the number sampled.

        Without this limit, an answer that ends inside a character would give more, because its text ends with a
        replacement character.
        """
        if not self.answer.reasoning:
            return 0
        return min(self._tokens, len(self._tokenizer.encode(self.answer.reasoning, special=False)))

    @property
    def finish(self) -> Finish:
        """Why a finished answer ended."""
        if self.answer.calls:
            return "calls"
        return "length" if self._reason == "length" else "stop"
