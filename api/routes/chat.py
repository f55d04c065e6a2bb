"""OpenAI's chat completions (`/v1/chat/completions`), with the fields that vLLM adds for token ids and templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fastapi.responses import Response
from pydantic import Field

from tinkerflow.api.call import Authorized, Call, Router
from tinkerflow.api.chat.answer import respond
from tinkerflow.api.chat.openai import AnswerOptions, ChatAnswer
from tinkerflow.api.chat.requests import (
    MAX_MESSAGES,
    AnswerFields,
    begun,
    called_tool,
    content_of,
    text_of,
    thought,
)
from tinkerflow.api.endpoints.generation import Generation
from tinkerflow.api.errors import naming
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import OPEN_API, Strict
from tinkerflow.api.submit import parsed_prompt
from tinkerflow.backend.core.errors import UserError, broken

router = Router(busy=6, at=OPEN_API)


class CalledFunction(Strict):
    """The called function. arguments: a JSON object as text."""

    name: str
    arguments: str = "{}"


class CalledTool(Strict):
    """A call in an earlier answer. index: the call's number in a stream."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Strict):
    """A message. content: a text, or a list of parts of the type text or, in the user's messages, image_url.

    Fields of answers that clients repeat in requests are ignored, whether OpenAI defines them or litellm adds them. The
    `type` that lm-eval sends is ignored, too.
    """

    type: Literal["text", "message"] | None = None
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    provider_specific_fields: dict[str, Any] | None = None
    thinking_blocks: list[dict[str, Any]] | None = None


class ChatCompletion(AnswerFields):
    """A request for answers to a conversation."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)


@router.post("/chat/completions", openapi_extra=takes(ChatCompletion))
async def chat_completions(call: Authorized) -> Response:
    """Answer a conversation `n` times."""
    generation, answer, stream = await _begin(call)
    return await respond(call, generation, answer, stream=stream)


async def _begin(call: Call) -> tuple[Generation, ChatAnswer, bool]:
    """Start sampling. Returns the samples, their answer, and whether to stream it. The request's body is freed."""
    body = await parsed_prompt(call, ChatCompletion)
    options = AnswerOptions(
        created=int(call.services.clock.now().timestamp()),
        logprobs=body.logprobs,
        token_ids=body.return_token_ids,
        usage=body.wants_usage,
        named_by_id=body.return_tokens_as_token_ids,
    )
    names = {"max_tokens": "max_completion_tokens"} if body.max_completion_tokens else {}
    with naming(names):
        generation, prompt, reader = await begun(call, body, await call.convert(_messages, body.messages))
    return generation, ChatAnswer(generation, prompt, options, reader), body.stream


def _check_content(message: ChatMessage, field: str) -> None:
    """Check that a message has content, which only answers with calls, reasoning or a refusal may omit.

    UserError: content is missing or empty.
    """
    if message.content == []:
        raise broken(field, [], "text or at least one part")
    other = message.tool_calls or message.reasoning_content or message.refusal
    if message.content is None and not (message.role == "assistant" and other):
        exception = "; only answers that call tools may omit it" if message.role == "assistant" else ""
        raise broken(field, None, f"text or a list of parts{exception}")


def _messages(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    called: dict[str, str] = {}  # the names of the tools that were called, by the ids of the calls
    messages = []
    for i, one in enumerate(given):
        _check_content(one, f"messages[{i}].content")
        message: dict[str, Any] = {"role": "system" if one.role == "developer" else one.role}
        reads = content_of if one.role == "user" else text_of
        message["content"] = reads(one.content, f"messages[{i}].content")
        if one.name is not None:
            message["name"] = one.name
        if one.reasoning_content is not None:
            message |= thought(one.reasoning_content)
        calls = []
        for number, call in enumerate(one.tool_calls or ()):
            name, field = call.function.name, f"messages[{i}].tool_calls[{number}].function.arguments"
            called[call.id] = name
            try:
                calls.append(called_tool(call.id, name, call.function.arguments, field))
            except UserError:
                # A stream sends a call that breaks off as content, too, after the beginning of its arguments.
                if call.function.arguments not in message["content"]:
                    raise
        if calls:
            message["tool_calls"] = calls
        if one.role == "tool":
            if one.tool_call_id is None:
                raise broken(f"messages[{i}].tool_call_id", None, "the id of the call that this message answers")
            message |= {"tool_call_id": one.tool_call_id, "name": one.name or called.get(one.tool_call_id, "")}
        messages.append(message)
    return messages
