"""A conversation in a form common to OpenAI's and Anthropic's requests, and its prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkerflow.api.chat.parsers import PARSERS, Parser, ParserSpec, parser_for
from tinkerflow.api.chat.reader import Tools
from tinkerflow.api.chat.template import ChatTemplate, load_template
from tinkerflow.api.endpoints.images import PromptImage, as_texts, pictures_of, place_images, processor_for, shown
from tinkerflow.api.endpoints.targets import Target
from tinkerflow.backend.catalog.control_tokens import ControlTokens
from tinkerflow.backend.core.errors import UserError

# Tokens that end turns in chat templates. Weights trained with a template end their answers with them, even if the
# base model ends texts with another token.
_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|return|>", "<|call|>"),
    *("<turn|>", "<|tool_response>"),  # Gemma 4: after an answer, and after a call
)
_JSON = "llama"  # the parser of calls that are JSON without a preceding mark


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call. parameters: the JSON schema of its arguments."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]

    def shown(self) -> dict[str, Any]:
        """The tool in the form that chat templates expect."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


@dataclass(frozen=True)
class Chat:
    """messages: in OpenAI's form, with arguments as objects. Contents are texts, or lists of parts: texts or parts with
    a `picture`. tools: the tools that the model may call.

    must_call: the answer must be a call of one of these tools. schema: the answer must be JSON of this schema.
    schema_field: the schema's field in the request. options: variables of the chat template. prefill: the beginning of
    the answer. special_tokens: whether `<|im_end|>` in a text is that token; by default it is plain text.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    must_call: Sequence[Tool] = ()
    schema: Mapping[str, Any] | None = None
    schema_field: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    prefill: str = ""
    special_tokens: bool = False


@dataclass(frozen=True)
class Prompt:
    """A prompt, and how to read the answer to it.

    spec: the parser. tools: callable tools. thinks: reasoning is separate from content. opened: the prompt without
    `begun` ends inside reasoning. begun: the end of the prompt. It is the beginning of the answer, so the parser reads
    it. schema: the sampled text is JSON of this schema. schema_field: the schema's field in the request. ends: tokens
    that end the answer, in addition to the base model's. messages, prefill: the conversation's, as text. images: the
    prompt's images.
    """

    tokens: list[int]
    spec: ParserSpec
    tools: Tools
    thinks: bool
    opened: bool
    begun: str
    schema: Mapping[str, Any] | None
    schema_field: str
    ends: tuple[int, ...]
    messages: Sequence[Mapping[str, Any]]
    prefill: str = ""
    images: tuple[PromptImage, ...] = ()

    def parser(self) -> Parser:
        """A new parser for one answer, which has already read the prompt's part of it."""
        parser = Parser(self.spec, self.tools, thinks=self.thinks, opened=self.opened)
        parser.feed(self.begun)
        return parser


async def prompt_of(target: Target, conversation: Chat) -> Prompt:
    """Render a conversation to a prompt with the model's own chat template.

    UserError: the model has no chat template, or its template refuses the conversation or takes no tools.
    """
    model, tokenizer = target.card.name, target.tokenizer
    template = await asyncio.to_thread(load_template, tokenizer.folder, model)
    if template is None:
        rule = "messages need a chat template; /v1/completions accepts text"
        raise UserError(f"model is {target.name!r}, but {model} has no chat template: {rule}")
    pictures = pictures_of(conversation.messages)
    processor = await asyncio.to_thread(processor_for, target, pictures[0]) if pictures else None
    source = template.with_tools if conversation.tools else template.text
    spec = parser_for(source)
    if conversation.tools and (spec.parse is None or "tools" not in source):
        raise UserError(f"tools: the chat template of {model} does not support tools: must be left out")
    control = tokenizer.control_tokens(source)
    text = await target.call.slowly(_rendered, template, spec, conversation, control)
    thinks = spec.thinks(source)
    opened = thinks and spec.think is not None and text.rstrip().endswith(spec.think[0])
    begun, schema = "", conversation.schema
    if opened and spec.think is not None and (conversation.must_call or schema is not None or conversation.prefill):
        begun = f"\n{spec.think[1]}\n\n"  # ends the reasoning immediately
    if conversation.must_call:
        schema = _call_schema(conversation.must_call)
        begun += spec.opening
        spec = spec if spec.opening else PARSERS[_JSON]
    ends = {end for token in _TURN_ENDS if token in source and (end := tokenizer.id_of(token)) is not None}
    images: tuple[PromptImage, ...] = ()
    prefill = conversation.prefill
    if not conversation.special_tokens:
        prefill = control.hide(prefill, assistant=True)
    tokens = await target.encode(text + begun + prefill, "messages", control)
    if processor is not None:
        tokens, images = await target.call.slowly(place_images, target, processor, tokens, pictures)
    return Prompt(
        tokens=tokens,
        spec=spec,
        tools={tool.name: tool.parameters for tool in conversation.tools},
        thinks=thinks,
        opened=opened,
        begun=begun,
        schema=schema,
        schema_field="tools" if conversation.must_call else conversation.schema_field,
        ends=tuple(sorted(ends - {*target.card.eos_token_ids})),
        messages=as_texts(conversation.messages),
        prefill=conversation.prefill,
        images=images,
    )


def _rendered(template: ChatTemplate, spec: ParserSpec, conversation: Chat, control: ControlTokens) -> str:
    """The text of the prompt. Control tokens in the conversation's texts are hidden unless `special_tokens`."""
    messages: Sequence[Mapping[str, Any]] = shown(conversation.messages)
    if any(message["role"] == "system" for message in messages[1:]) and not template.shows_later_system:
        messages = _with_reminders(messages)
    tools: Sequence[Mapping[str, Any]] = [tool.shown() for tool in conversation.tools]
    options = conversation.options
    if not conversation.special_tokens:
        messages, tools, options = control.hide_messages(messages), control.hide(tools), control.hide(options)
    messages = spec.prepared(messages, tools) if spec.prepared is not None else messages
    text = template.render(messages, tools, options)
    return text.encode("utf-8", "replace").decode()  # arguments of earlier calls may contain lone surrogates


def _with_reminders(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with at most one of the system, the first. Later ones become parts of adjacent user messages.

    The mark around them is the one that coding agents use.
    """
    merged: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        last = merged[-1]["role"] if merged else "system"
        if role == "system" != last:
            role, content = "user", f"<system-reminder>\n{content}\n</system-reminder>"
        if merged and role == last and role in ("system", "user"):
            merged[-1]["content"] = _appended(merged[-1]["content"], content)
        else:
            merged.append({**message, "role": role, "content": content})
    return merged


def _appended(first: str | list[dict[str, Any]], second: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Two contents of a message as one."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in (first, second))
    return [part for content in parts for part in content]


def _call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON schema of a call of one of these tools. `$id` makes each tool's schema the root of its references."""
    calls = []
    for number, tool in enumerate(tools):
        arguments = tool.parameters or {"type": "object"}
        root = {"$id": f"tool:{number}"} if '"$ref"' in json.dumps(arguments) else {}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": {**root, **arguments}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return calls[0] if len(calls) == 1 else {"anyOf": calls}
