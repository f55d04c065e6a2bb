"""OpenAI's responses (`/v1/responses`): the same conversations as chat completions, in another format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi.responses import Response
from pydantic import Field

from tinkerflow.api.call import Authorized, Call, Router
from tinkerflow.api.chat.answer import respond
from tinkerflow.api.chat.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AnswerFields,
    ToolName,
    begun,
    called_tool,
    joined,
    string_in,
    thought,
)
from tinkerflow.api.chat.responses import ResponseAnswer
from tinkerflow.api.endpoints.generation import Generation
from tinkerflow.api.endpoints.images import Picture
from tinkerflow.api.errors import naming
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import OPEN_API, Strict, Wire
from tinkerflow.api.submit import parsed_prompt
from tinkerflow.backend.core.errors import broken

router = Router(busy=5, at=OPEN_API)

_TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text")  # types of parts that are texts
# Our names of fields, by their names in chat completions.
_NAMES = {
    "messages": "input",
    "messages have": "input has",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
}


class ResponseTool(Strict):
    """A function that the model may call, with the fields of `ToolFunction`."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Namespace(Strict):
    """Functions of a group. The model calls them `GROUP__FUNCTION`. description: ignored, as in chat templates."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[ResponseTool] = Field(max_length=MAX_TOOLS)


class WebSearch(Wire):
    """OpenAI's web search, which agents always send. It is left out of the prompt, so the model cannot call it."""

    type: Literal["web_search"]


class ToolByName(Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """The format of the answer. name, description, strict: ignored."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    """Options of the answer's text."""

    format: TextFormat | None = None


class Reasoning(Strict):
    """How much the model reasons. summary: ignored; reasoning is shown unabridged."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(Strict):
    """A request. input: a text, or items of the types message, function_call, function_call_output and reasoning.

    Responses are not stored, so `previous_response_id` is an unknown field. service_tier, allow_special_tokens: see
    `AnswerFields`. store, user, safety_identifier, prompt_cache_key, truncation and client_metadata, which Codex sends,
    are ignored. metadata is only repeated in the response. `include` of encrypted reasoning is ignored, because
    reasoning is shown in plain text.
    """

    replaces_nul: ClassVar[bool] = True  # in outputs of tools
    model: str
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = None
    tools: list[Annotated[ResponseTool | Namespace | WebSearch, Field(discriminator="type")]] = Field(
        default_factory=list, max_length=MAX_TOOLS
    )
    tool_choice: Literal["none", "auto", "required"] | ToolByName = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool = False
    store: bool | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    allow_special_tokens: bool = False
    service_tier: Literal["auto", "default", "flex"] | None = None
    truncation: Literal["disabled"] | None = None
    client_metadata: dict[str, Any] | None = None

    def functions(self) -> list[tuple[str, ResponseTool]]:
        """The tools that the model may call, each with its group, or "" without one."""
        functions: list[tuple[str, ResponseTool]] = []
        for tool in self.tools:
            match tool:
                case ResponseTool():
                    functions.append(("", tool))
                case Namespace():
                    functions += [(tool.name, inner) for inner in tool.tools]
                case WebSearch():
                    pass
        return functions


@router.post("/responses", openapi_extra=takes(ResponsesBody))
async def responses(call: Authorized) -> Response:
    """Answer a conversation, as a list of items."""
    generation, answer, stream = await _begin(call)
    return await respond(call, generation, answer, stream=stream, error_name="error")


async def _begin(call: Call) -> tuple[Generation, ResponseAnswer, bool]:
    """Start sampling. Returns the sample, its answer, and whether to stream it. The request's body is freed."""
    body = await parsed_prompt(call, ResponsesBody)
    with naming(_NAMES):
        generation, prompt, reader = await begun(call, _fields(body), await call.convert(_messages, body))
    shown = body.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"input"})
    echoed = {
        "parallel_tool_calls": body.parallel_tool_calls,
        "tool_choice": shown.get("tool_choice", "auto"),
        **{name: shown.get(name) for name in ("instructions", "temperature", "top_p", "max_output_tokens")},
        "tools": shown.get("tools", []),
        "metadata": body.metadata or {},
    }
    created = int(call.services.clock.now().timestamp())
    groups = {_in_group(group, tool.name): (group, tool.name) for group, tool in body.functions() if group}
    return generation, ResponseAnswer(generation, prompt, reader(), created, echoed, groups), body.stream


# ------------------------------------------------------------------ from OpenAI's format
def _fields(body: ResponsesBody) -> AnswerFields:
    """The equivalent fields of chat completions."""
    asked: dict[str, Any] = {
        "model": body.model,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [
            {"function": tool.model_dump(exclude={"type"}) | {"name": _in_group(group, tool.name)}}
            for group, tool in body.functions()
        ],
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "service_tier": body.service_tier,
        "allow_special_tokens": body.allow_special_tokens,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "stream": body.stream,
    }
    if isinstance(body.tool_choice, ToolByName):
        asked["tool_choice"] = {"function": {"name": body.tool_choice.name}}
    form = None if body.text is None else body.text.format
    if form is not None and form.type != "text":
        schema = {} if form.schema_ is None else {"json_schema": {"name": form.name, "schema": form.schema_}}
        asked["response_format"] = {"type": form.type, **schema}
    return AnswerFields.from_values(asked)  # UserError: for example, a name with its group is too long


def _in_group(group: str, name: str) -> str:
    """The name of a function in chat templates and calls."""
    return f"{group}__{name}" if group else name


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """The conversation in the form that chat templates expect. UserError: names the invalid item."""
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages += _of_items(items)
    if not messages:
        raise broken("input", body.input, "text, or at least one item")
    return [{"content": "", **message} for message in messages]


def _of_items(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items as messages. Reasoning and calls become parts of the adjacent message of the assistant."""
    messages: list[dict[str, Any]] = []
    called: dict[str, str] = {}  # the names of the tools that were called, by the ids of the calls
    answer: dict[str, Any] | None = None  # the assistant's message under construction
    for i, item in enumerate(items):
        field, kind, role = f"input[{i}]", item.get("type", "message"), item.get("role")
        if kind in ("reasoning", "function_call") or role == "assistant":
            begins = answer is not None and (
                (kind == "message" and "content" in answer) or (kind == "reasoning" and len(answer) > 1)
            )
            if answer is None or begins:
                answer = {"role": "assistant"}
                messages.append(answer)
        else:
            answer = None
        match kind:
            case "message" if answer is not None:
                answer["content"] = _content(item.get("content"), f"{field}.content")
            case "message":
                if role not in ("system", "developer", "user"):
                    raise broken(f"{field}.role", role, "system, developer, user or assistant")
                content = _content(item.get("content"), f"{field}.content", images=role == "user")
                messages.append({"role": "system" if role == "developer" else role, "content": content})
            case "reasoning" if answer is not None:
                part = "content" if item.get("content") else "summary"
                answer |= thought(str(_content(item.get(part) or "", f"{field}.{part}")))
            case "function_call" if answer is not None:
                call_id, name, arguments = (string_in(item, key, field) for key in ("call_id", "name", "arguments"))
                name = _in_group(item.get("namespace") or "", name)
                called[call_id] = name
                call = called_tool(call_id, name, arguments, f"{field}.arguments")
                answer.setdefault("tool_calls", []).append(call)
            case "function_call_output":
                call_id = string_in(item, "call_id", field)
                content = _content(item.get("output"), f"{field}.output")
                tool = {"tool_call_id": call_id, "name": called.get(call_id, "")}
                messages.append({"role": "tool", "content": content, **tool})
            case _:
                rule = "message, function_call, function_call_output or reasoning"
                raise broken(f"{field}.type", kind, rule)
    return messages


def _content(content: Any, field: str, *, images: bool = False) -> str | list[dict[str, Any]]:
    """A text, or a list of parts if some are images. images: whether images are allowed."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content or not all(isinstance(part, dict) for part in content):
        raise broken(field, content, "text or a list of at least one part")
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        if images and part.get("type") == "input_image":
            given = {"type": "image_url", "image_url": part.get("image_url")}
            parts.append({"type": "image", "picture": Picture(f"{field}[{i}]", given)})
            continue
        if part.get("type") not in _TEXTS:
            raise broken(
                f"{field}[{i}].type",
                part.get("type"),
                "input_text, or input_image in a user message; audio and files are not supported",
            )
        parts.append({"type": "text", "text": string_in(part, "text", f"{field}[{i}]")})
    return joined(parts)
