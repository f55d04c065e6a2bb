"""A conversation in the form that OpenAI's and Anthropic's requests share, and its prompt."""

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

# How turns end in chat templates. Weights that learnt a template end their answers so, also where the base model's own
# end of a text is another token.
_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|return|>", "<|call|>"),
    *("<turn|>", "<|tool_response>"),  # Gemma 4: of an answer, and behind a call
)
_JSON = "llama"  # the parser of a call that is JSON without a mark before it


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call. parameters: the JSON schema of its arguments."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]

    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


@dataclass(frozen=True)
class Chat:
    """messages: in OpenAI's form, with contents as texts and arguments as objects; or contents as parts, each a text or
    with a `picture`. tools: the ones that the model may call.

    must_call: the answer is a call of one of these. schema: the answer is JSON of this schema. schema_field: where the
    request has it. options: variables of the chat template. prefill: how the answer begins.
    special_tokens: whether `<|im_end|>` in a text is that token; usually it is text.
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
    """A prompt, and how the answer to it is read.

    spec: the parser. tools: callable ones. thinks: reasoning is separate from content. opened: the prompt without
    `begun` ends inside of reasoning. begun: the end of the prompt that the parser reads, because it is the beginning of
    the answer. schema: the sampled text is JSON of this schema, which the request has in schema_field. ends: tokens
    that end the answer, in addition to the base model's. messages: the conversation as text. images: of the prompt.
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
    images: tuple[PromptImage, ...] = ()

    def parser(self) -> Parser:
        """A parser for one answer, up to where sampling begins."""
        parser = Parser(self.spec, self.tools, thinks=self.thinks, opened=self.opened)
        parser.feed(self.begun)
        return parser


async def prompt_of(target: Target, conversation: Chat) -> Prompt:
    """The prompt of a conversation by the model's own chat template.

    UserError: the model has none, or it refuses the conversation, or the request's tools.
    """
    model, tokenizer = target.card.name, target.tokenizer
    template = await asyncio.to_thread(load_template, tokenizer.folder, model)
    if template is None:
        rule = "must have a chat template to take messages; /v1/completions takes text"
        raise UserError(f"model is {target.name!r}, and {model} has no chat template: {rule}")
    pictures = pictures_of(conversation.messages)
    processor = await asyncio.to_thread(processor_for, target, pictures[0]) if pictures else None
    source = template.with_tools if conversation.tools else template.text
    spec = parser_for(source)
    if conversation.tools and (spec.parse is None or "tools" not in source):
        raise UserError(f"tools: the chat template of {model} takes none: must be left out")
    control = tokenizer.control_tokens(source)
    text = await target.call.slowly(_rendered, template, spec, conversation, control)
    thinks = spec.thinks(source)
    opened = thinks and spec.think is not None and text.rstrip().endswith(spec.think[0])
    begun, schema = "", conversation.schema
    if opened and spec.think is not None and (conversation.must_call or schema is not None or conversation.prefill):
        begun = f"\n{spec.think[1]}\n\n"  # no reasoning may follow
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
        images=images,
    )


def _rendered(template: ChatTemplate, spec: ParserSpec, conversation: Chat, control: ControlTokens) -> str:
    """The text of the prompt, in which control tokens of the conversation's own texts are hidden."""
    messages: Sequence[Mapping[str, Any]] = shown(conversation.messages)
    tools: Sequence[Mapping[str, Any]] = [tool.shown() for tool in conversation.tools]
    options = conversation.options
    if not conversation.special_tokens:
        messages, tools, options = control.hide_messages(messages), control.hide(tools), control.hide(options)
    messages = spec.prepared(messages, tools) if spec.prepared is not None else messages
    text = template.render(messages, tools, options)
    return text.encode("utf-8", "replace").decode()  # arguments of earlier calls may hold halves of characters


def _call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON schema of a call of one of these tools. A tool's schema is the root of its own references (`$id`)."""
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
