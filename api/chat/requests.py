"""The common parts of requests to OpenAI's and Anthropic's endpoints for answers: tools, formats, message parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tinkerflow.api.call import Call
from tinkerflow.api.chat.answer import AnswerReader, sampled
from tinkerflow.api.chat.conversation import Chat, Prompt, Tool, prompt_of
from tinkerflow.api.endpoints.generation import Generation
from tinkerflow.api.endpoints.images import IMAGES, Picture
from tinkerflow.api.endpoints.openai import MAX_TOP, SamplingFields
from tinkerflow.api.endpoints.targets import resolve
from tinkerflow.api.schemas import Strict
from tinkerflow.backend.core.errors import UserError, broken

# A longer conversation exceeds any context, but would be converted, rendered and tokenized before that is noticed.
MAX_MESSAGES = 2**15
MAX_TOOLS = 2**12
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class ToolFunction(Strict):
    """A function that the model may call. strict: ignored; arguments follow the schema if a call is required."""

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


class JsonSchema(Strict):
    """A schema in OpenAI's form. strict: ignored; answers always follow the schema."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of the answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def schema_of(self) -> Mapping[str, Any] | None:
        """The schema that the answer must follow; None for text."""
        if self.type == "json_schema":
            if self.json_schema is None:
                raise broken("response_format.json_schema", None, "given with the type json_schema")
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class AnswerFields(SamplingFields):
    """A request without its messages. max_completion_tokens: like max_tokens; by default, the rest of the context.

    top_logprobs: needs logprobs. chat_template_kwargs: variables of the model's chat template. reasoning_effort:
    another such variable; `none` and `minimal` also set enable_thinking to false. allow_special_tokens: `<|im_end|>` in
    a message is that token, not text. service_tier: `flex` waits behind interactive requests. metadata, store,
    safety_identifier, prompt_cache_key and modalities are accepted only with values that change nothing.
    """

    replaces_nul: ClassVar[bool] = True  # in outputs of tools
    model: str
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    tools: list[GivenTool] | None = Field(None, max_length=MAX_TOOLS)
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
    allow_special_tokens: bool = False
    modalities: list[Literal["text"]] | None = None


async def begun(
    call: Call, body: AnswerFields, messages: Sequence[Mapping[str, Any]]
) -> tuple[Generation, Prompt, Callable[[], AnswerReader]]:
    """Start sampling for a request. Returns the samples, their prompt, and a function that makes a reader of a sample.

    messages: see `Chat`.
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

    prompt = replace(prompt, images=())  # free their memory: the journal holds them, and the answer may take long
    stops, special, one_call = body.stops, not body.skip_special_tokens, not body.parallel_tool_calls
    return generation, prompt, lambda: AnswerReader(target, prompt, stops, special=special, one_call=one_call)


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
        raise broken("tool_choice", value, "auto, none, or a call to one of the tools")
    schema = None if body.response_format is None else body.response_format.schema_of()
    if schema is not None and must_call:
        raise UserError("response_format is given: must be left out when tool_choice requires a call")
    return Chat(
        messages=messages,
        tools=() if choice == "none" else tools,
        must_call=must_call,
        schema=schema,
        schema_field="response_format",
        options=_options(body),
        special_tokens=body.allow_special_tokens,
    )


def _options(body: AnswerFields) -> dict[str, Any]:
    effort = body.reasoning_effort
    options: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort in ("none", "minimal"):
        options |= {"enable_thinking": False, "thinking": False}
    return {**options, **(body.chat_template_kwargs or {})}


def thought(reasoning: str) -> dict[str, str]:
    """The fields of a message that hold its reasoning, under each of the names that templates use."""
    return {"reasoning_content": reasoning, "thinking": reasoning}


def called_tool(call_id: str, name: str, given: str, field: str) -> dict[str, Any]:
    """A tool call in the form that chat templates expect. given: its arguments, a JSON object as text, from `field`."""
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise broken(field, given, "a JSON object as text")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def content_of(content: str | Sequence[Mapping[str, Any]] | None, field: str) -> str | list[dict[str, Any]]:
    """The content of a user's message: a text as from `text_of`, or a list of parts if some are images."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined([part_of(part, f"{field}[{i}]") for i, part in enumerate(content)])


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A message's content from parts of `part_of`. The parts become one text unless some are images."""
    return parts if any("picture" in part for part in parts) else "\n".join(part["text"] for part in parts)


def text_of(content: str | Sequence[Mapping[str, Any]] | None, field: str) -> str:
    """A message's content as one text, with its parts on separate lines. UserError: a part is not a text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text(part, f"{field}[{i}]") for i, part in enumerate(content))


def part_of(part: Mapping[str, Any], field: str) -> dict[str, Any]:
    """A text or an image of a message. field: its path in the request. UserError: the part is neither."""
    if part.get("type") in IMAGES:
        return {"type": "image", "picture": Picture(field, part)}
    return {"type": "text", "text": _text(part, field)}


def _text(part: Mapping[str, Any], field: str) -> str:
    kind = part.get("type")
    if kind in IMAGES:
        raise broken(f"{field}.type", kind, "text; only user messages may contain images")
    if kind != "text":
        raise broken(f"{field}.type", kind, "text; audio and files are not supported")
    return string_in(part, "text", field)


def string_in(given: Mapping[str, Any], name: str, field: str) -> str:
    """The string `name` of a part or an item. field: its path in the request. UserError: there is no such string."""
    found = given.get(name)
    if not isinstance(found, str):
        raise broken(f"{field}.{name}", found, "text")
    return found
