"""Anthropic's messages (`/v1/messages`) and the number of their tokens (`/v1/messages/count_tokens`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from fastapi.responses import Response
from pydantic import Field

from tinkerflow.api.call import Authorized, Call, Router
from tinkerflow.api.chat.answer import AnswerReader, respond, sampled
from tinkerflow.api.chat.anthropic import MessageAnswer
from tinkerflow.api.chat.conversation import Chat, Prompt, Tool, prompt_of
from tinkerflow.api.chat.requests import MAX_MESSAGES, MAX_TOOLS, ToolName, joined, part_of, string_in, text_of, thought
from tinkerflow.api.endpoints.generation import Generation
from tinkerflow.api.endpoints.targets import Target, resolve
from tinkerflow.api.errors import naming
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import OPEN_API, Strict, Wire
from tinkerflow.api.submit import parsed_prompt
from tinkerflow.backend.core.errors import UserError, broken

router = Router(busy=6, at=OPEN_API)

Blocks = str | list[dict[str, Any]]


class AnthropicTool(Strict):
    """A tool that the model may call.

    strict, cache_control, eager_input_streaming: ignored. Arguments follow the schema if a call is required, prompts
    are always cached, and a call is sent when it is complete.
    """

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(Strict):
    """Whether the model calls a tool: freely (auto), any tool (any), the named tool (tool), or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    """Whether the model reasons before it answers, if its chat template supports a choice.

    budget_tokens: the template's variable thinking_budget, which few models use. display: ignored.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized"] | None = None


class JsonFormat(Strict):
    """The format of an answer that is JSON of this schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Options of the answer. effort: the template's variable reasoning_effort. format: the answer's format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ContextEdit(Wire):
    """A part of the conversation that Anthropic may remove from the prompt. Here, none is removed."""

    type: str


class ContextManagement(Strict):
    """Edits of the conversation. The answer reports that none was applied."""

    edits: list[ContextEdit] = Field(default_factory=list)


class AnthropicMessage(Strict):
    """A message. content: a text, or blocks of the types text, image, thinking, tool_use and tool_result.

    The content of `system` has only texts.
    """

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Counting(Strict):
    """The fields of a request that determine its prompt. cache_control, context_management: ignored.

    allow_special_tokens: see `AnswerFields`.
    """

    replaces_nul: ClassVar[bool] = True  # in outputs of tools
    model: str
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Blocks | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    allow_special_tokens: bool = False


class MessagesBody(Counting):
    """A request. metadata, service_tier: ignored."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class TokenCount(Wire):
    """The number of tokens in the prompt of a request."""

    input_tokens: int


@router.post("/messages", openapi_extra=takes(MessagesBody))
async def messages(call: Authorized) -> Response:
    """Answer a conversation."""
    generation, answer, stream = await _begin(call)
    return await respond(call, generation, answer, stream=stream, error_name="error")


async def _begin(call: Call) -> tuple[Generation, MessageAnswer, bool]:
    """Start sampling. Returns the sample, its answer, and whether to stream it. The request's body is freed."""
    body = await parsed_prompt(call, MessagesBody)
    target, prompt = await _prompt(call, body)
    stops = [text for text in body.stop_sequences or () if text]
    params: dict[str, Any] = {
        # Agents send a constant that may exceed the context. Answers always end at the end of the context.
        "max_tokens": max(1, min(body.max_tokens, target.card.max_context - len(prompt.tokens))),
        "stop": stops,
        "stop_token_ids": [*target.card.eos_token_ids, *prompt.ends],
    }
    params |= {name: given for name in ("temperature", "top_k", "top_p") if (given := getattr(body, name)) is not None}
    with naming({"stop is": "stop_sequences is", "stop[": "stop_sequences["}):
        generation = await sampled(call, target, prompt, params, stream=body.stream)
    one_call = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    prompt = replace(prompt, images=())
    reader = AnswerReader(target, prompt, stops, one_call=one_call)
    answer = MessageAnswer(generation, prompt, reader, reports_edits=body.context_management is not None)
    return generation, answer, body.stream


@router.post("/messages/count_tokens", openapi_extra=takes(Counting))
async def count_tokens(call: Authorized) -> TokenCount:
    """Count the tokens in the prompt of a request."""
    _, prompt = await _prompt(call, await parsed_prompt(call, Counting))
    return TokenCount(input_tokens=len(prompt.tokens))


# ------------------------------------------------------------------ from Anthropic's format
async def _prompt(call: Call, body: Counting) -> tuple[Target, Prompt]:
    target = await resolve(call, body.model)
    return target, await prompt_of(target, await call.convert(_conversation, body))


def _conversation(body: Counting) -> Chat:
    tools = [Tool(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()]
    choice = body.tool_choice or ToolChoice(type="auto")
    must_call: Sequence[Tool] = ()
    if choice.type in ("any", "tool"):
        must_call = [tool for tool in tools if choice.type == "any" or tool.name == choice.name]
        if not must_call:
            raise broken("tool_choice", choice.name or choice.type, "a call to one of the tools")
    given: list[dict[str, Any]] = []
    if body.system:
        given.append({"role": "system", "content": text_of(body.system, "system")})
    called: dict[str, str] = {}
    for i, message in enumerate(body.messages):
        given += _messages(message, f"messages[{i}].content", called)
    form = body.output_config and body.output_config.format
    schema = form.schema_ if form else None
    if schema is not None and must_call:
        raise UserError("output_config.format is given: must be left out when tool_choice requires a call")
    prefill = ""
    if body.messages[-1].role == "assistant":
        if "tool_calls" in given[-1]:
            raise UserError("messages: the last one calls a tool: must be followed by its result")
        prefill = given.pop()["content"].rstrip()
    return Chat(
        messages=given,
        tools=() if choice.type == "none" else tools,
        must_call=must_call,
        schema=schema,
        schema_field="output_config.format",
        options=_options(body.thinking, body.output_config),
        prefill=prefill,
        special_tokens=body.allow_special_tokens,
    )


def _options(thinking: Thinking | None, output: OutputConfig | None) -> dict[str, Any]:
    """The variables of the chat template. As at Anthropic, models do not reason unless `thinking` is given.

    Templates use different names for the same variable.
    """
    thinks = thinking is not None and thinking.type != "disabled"
    budget = thinking.budget_tokens if thinking is not None and thinks else None
    options: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
    effort = output and output.effort
    more = {"thinking_budget": budget, "reasoning_effort": effort}
    return options | {name: value for name, value in more.items() if value is not None}


def _messages(message: AnthropicMessage, field: str, called: dict[str, str]) -> list[dict[str, Any]]:
    """Convert a message to messages for a chat template, in which each result of a tool is a separate message.

    called: the names of called tools, by the ids of the calls. The calls of this message are added.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if not message.content:
        raise broken(field, [], "text or at least one block")
    if message.role == "system":
        return [{"role": "system", "content": text_of(message.content, field)}]
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        match (message.role, block.get("type")):
            case ("assistant", "thinking"):
                thoughts.append(string_in(block, "thinking", f"{field}[{i}]"))
            case ("assistant", "redacted_thinking"):
                pass
            case ("assistant", "tool_use"):
                calls.append(_call(block, f"{field}[{i}]"))
                called[block["id"]] = block["name"]
            case ("user", "tool_result"):
                results.append(_result(block, f"{field}[{i}]", called))
            case (_, "text") | ("user", "image"):
                parts.append(part_of(block, f"{field}[{i}]"))
            case (role, kind):
                takes_too = "thinking or tool_use" if role == "assistant" else "image or tool_result"
                raise broken(f"{field}[{i}].type", kind, f"text, {takes_too}; files are not supported")
    if results and not parts:
        return results
    made: dict[str, Any] = {"role": message.role, "content": joined(parts)}
    if thoughts:
        made |= thought("\n".join(thoughts))
    if calls:
        made["tool_calls"] = calls
    return [*results, made]


def _call(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    name, arguments = string_in(block, "name", field), block.get("input")
    if not isinstance(arguments, dict):
        raise broken(f"{field}.input", arguments, "an object")
    return {"id": string_in(block, "id", field), "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(block: Mapping[str, Any], field: str, called: Mapping[str, str]) -> dict[str, Any]:
    wanted, content = string_in(block, "tool_use_id", field), block.get("content")
    if content is not None and not isinstance(content, (str, list)):
        raise broken(f"{field}.content", content, "text or blocks")
    if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
        raise broken(f"{field}.content", content, "a list of blocks")
    text = text_of(content, f"{field}.content")
    return {"role": "tool", "tool_call_id": wanted, "name": called.get(wanted, ""), "content": text}
