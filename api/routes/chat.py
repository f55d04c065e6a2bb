"""OpenAI's chat completions (`/v1/chat/completions`), with the fields that vLLM adds for token ids and templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi.responses import Response
from pydantic import Field

from tinkerflow.api.call import OPEN_API, Authorised, Call, Router, Strict
from tinkerflow.api.chat.answer import AnswerReader, respond, sampled
from tinkerflow.api.chat.conversation import Chat, Prompt, Tool, prompt_of
from tinkerflow.api.chat.openai import ChatAnswer, Wanted
from tinkerflow.api.chat.pictures import IMAGES, Picture
from tinkerflow.api.errors import naming
from tinkerflow.api.generation import Generation
from tinkerflow.api.models import resolve
from tinkerflow.api.openai import MAX_TOP, SamplingFields
from tinkerflow.api.openapi import takes
from tinkerflow.backend.core.errors import UserError, broken

router = Router(busy=6, at=OPEN_API)

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class ToolFunction(Strict):
    """A function that the model may call. strict: is accepted; arguments follow the schema where a call is required."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GivenTool(Strict):
    """A tool of a request."""

    type: Literal["function"] = "function"
    function: ToolFunction


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class CalledFunction(Strict):
    """What was called. arguments: a JSON object as text."""

    name: str
    arguments: str = "{}"


class CalledTool(Strict):
    """A call in an earlier answer. index: as streams number it."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Strict):
    """A message. content: a text, or a list of parts of the type text, and of image_url in messages of the user.

    Fields that answers have and requests repeat, OpenAI's and those that litellm adds to them, are accepted, and change
    nothing; so is lm-eval's `type`.
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


class JsonSchema(Strict):
    """A schema by OpenAI's name for it. strict: is accepted; the schema always holds."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of the answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_of(self) -> Mapping[str, Any] | None:
        """The schema that the answer must fit; None for text."""
        if self.type == "json_schema":
            if self.json_schema is None:
                raise broken("response_format.json_schema", None, "given with the type json_schema")
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class AnswerFields(SamplingFields):
    """A request without its messages. max_completion_tokens: as max_tokens; absent: all that the context has left.

    top_logprobs: needs logprobs. chat_template_kwargs: variables of the model's chat template. reasoning_effort:
    another such variable; `none` and `minimal` also set enable_thinking to false. service_tier: `flex` waits behind
    requests of people, as samples of programs do. metadata, store, safety_identifier, prompt_cache_key and modalities
    are accepted where they ask for what is done anyway.
    """

    model: str
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    tools: list[GivenTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    modalities: list[Literal["text"]] | None = None


class ChatCompletion(AnswerFields):
    """A request for answers to a conversation."""

    messages: list[ChatMessage] = Field(min_length=1)


@router.post("/chat/completions", openapi_extra=takes(ChatCompletion))
async def chat_completions(call: Authorised) -> Response:
    """Answer a conversation `n` times."""
    body = await call.parsed(ChatCompletion)
    wanted = Wanted(
        created=int(call.services.clock.now().timestamp()),
        logprobs=body.logprobs,
        token_ids=body.return_token_ids,
        usage=body.wants_usage,
        named_by_id=body.return_tokens_as_token_ids,
    )
    names = {"max_tokens": "max_completion_tokens"} if body.max_completion_tokens else {}
    with naming(names):
        generation, prompt, reader = await begun(call, body, _messages(body.messages))
    answer = ChatAnswer(generation, prompt, wanted, reader)
    return await respond(call, generation, answer, stream=body.stream)


async def begun(
    call: Call, body: AnswerFields, messages: Sequence[Mapping[str, Any]]
) -> tuple[Generation, Prompt, Callable[[], AnswerReader]]:
    """The samples that a request asks for, their prompt, and what makes a reader for one of them.

    messages: as of `Chat`.
    """
    if body.top_logprobs and not body.logprobs:
        raise broken("top_logprobs", body.top_logprobs, "left out without logprobs")
    target = await resolve(call, body.model)
    prompt = await prompt_of(target, _conversation(body, messages))
    params = body.params(target, body.max_completion_tokens or body.max_tokens)
    if not body.ignore_eos:
        params["stop_token_ids"] += prompt.ends
    generation = await sampled(
        call,
        target,
        prompt,
        params,
        body.n,
        stream=body.stream,
        top_logprobs=body.top_logprobs or 0,
        priority="batch" if body.service_tier == "flex" else "interactive",
    )

    def reader() -> AnswerReader:
        one_call = not body.parallel_tool_calls
        return AnswerReader(target, prompt, body.stops, special=not body.skip_special_tokens, one_call=one_call)

    return generation, prompt, reader


# ------------------------------------------------------------------ from the wire
def _conversation(body: AnswerFields, messages: Sequence[Mapping[str, Any]]) -> Chat:
    given = [tool.function for tool in body.tools or ()]
    tools = [Tool(one.name, one.description, one.parameters or {"type": "object", "properties": {}}) for one in given]
    choice = body.tool_choice
    must_call: Sequence[Tool] = ()
    if choice == "required":
        must_call = tools
    elif isinstance(choice, NamedTool):
        must_call = [tool for tool in tools if tool.name == choice.function.name]
    if choice not in (None, "none", "auto") and not must_call:
        value = choice if isinstance(choice, str) else choice and choice.function.name
        raise broken("tool_choice", value, "auto, none, or a call of one of the tools")
    schema = None if body.response_format is None else body.response_format.schema_of()
    if schema is not None and must_call:
        raise UserError("response_format is given: must be left out when a call is required by tool_choice")
    return Chat(
        messages=messages,
        tools=() if choice == "none" else tools,
        must_call=must_call,
        schema=schema,
        schema_field="response_format",
        options=_options(body),
    )


def _options(body: AnswerFields) -> dict[str, Any]:
    effort = body.reasoning_effort
    options: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort in ("none", "minimal"):
        options |= {"enable_thinking": False, "thinking": False}
    return {**options, **(body.chat_template_kwargs or {})}


def _messages(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    called: dict[str, str] = {}  # the names of the tools that were called, by the ids of the calls
    messages = []
    for i, one in enumerate(given):
        message: dict[str, Any] = {"role": "system" if one.role == "developer" else one.role}
        reads = content_of if one.role == "user" else text_of
        message["content"] = reads(one.content, f"messages[{i}].content")
        if one.name is not None:
            message["name"] = one.name
        if one.reasoning_content is not None:
            message |= thought(one.reasoning_content)
        if one.tool_calls:
            message["tool_calls"] = []
            for number, call in enumerate(one.tool_calls):
                name, field = call.function.name, f"messages[{i}].tool_calls[{number}].function.arguments"
                message["tool_calls"].append(called_tool(call.id, name, call.function.arguments, field))
                called[call.id] = name
        if one.role == "tool":
            if one.tool_call_id is None:
                raise broken(f"messages[{i}].tool_call_id", None, "the id of the call that this message answers")
            message |= {"tool_call_id": one.tool_call_id, "name": one.name or called.get(one.tool_call_id, "")}
        messages.append(message)
    return messages


def thought(reasoning: str) -> dict[str, str]:
    """The fields of a message that have its reasoning: templates differ in their name for it."""
    return {"reasoning_content": reasoning, "thinking": reasoning}


def called_tool(call_id: str, name: str, given: str, field: str) -> dict[str, Any]:
    """A call of a tool as chat templates take it. given: its arguments, a JSON object as text, which is in `field`."""
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise broken(field, given, "a JSON object as text")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def content_of(content: str | Sequence[Mapping[str, Any]] | None, field: str) -> str | list[dict[str, Any]]:
    """The content of a user's message: as of `text_of`, or its parts when some are images."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined([part_of(part, f"{field}[{i}]") for i, part in enumerate(content)])


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A message's content of parts from `part_of`: one text, or the parts when some are images."""
    return parts if any("picture" in part for part in parts) else "\n".join(part["text"] for part in parts)


def text_of(content: str | Sequence[Mapping[str, Any]] | None, field: str) -> str:
    """A message's content as one text, its parts one a line. UserError for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text(part, f"{field}[{i}]") for i, part in enumerate(content))


def part_of(part: Mapping[str, Any], field: str) -> dict[str, Any]:
    """A text or an image of a message. field: where the request has it. UserError for a part that is neither."""
    if part.get("type") in IMAGES:
        return {"type": "image", "picture": Picture(field, part)}
    return {"type": "text", "text": _text(part, field)}


def _text(part: Mapping[str, Any], field: str) -> str:
    kind = part.get("type")
    if kind in IMAGES:
        raise broken(f"{field}.type", kind, "text; messages of the user alone have images")
    if kind != "text":
        raise broken(f"{field}.type", kind, "text; models here take no sounds or files")
    return string_in(part, "text", field)


def string_in(given: Mapping[str, Any], name: str, field: str) -> str:
    """The string `name` of a part or an item, which the request has in `field`; UserError when there is none."""
    found = given.get(name)
    if not isinstance(found, str):
        raise broken(f"{field}.{name}", found, "a text")
    return found
