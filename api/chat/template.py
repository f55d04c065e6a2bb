"""A model's chat template: renders messages and tools to the text of a prompt.

The text equals that of `apply_chat_template` of transformers, which would load torch if torch is installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinkerflow.backend.core.errors import ServerError, UserError, broken

FILE = "chat_template.jinja"
OWN = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})
_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatTemplate:
    """model: its name, for errors. text: the template. with_tools: the template for requests with tools.

    specials: the texts of the tokenizer's special tokens, by their names in templates.
    """

    model: str
    text: str
    with_tools: str
    specials: Mapping[str, str]

    @cached_property
    def shows_later_system(self) -> bool:
        """Whether a message of the system that is not the first one is part of the prompt. Some templates omit it."""
        turns = (("system", "a"), ("user", "b"), ("assistant", "c"), ("system", "later-system"), ("user", "d"))
        try:
            text = self.render([{"role": role, "content": text} for role, text in turns], (), {})
        except UserError:
            return False
        return "later-system" in text

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        """Render the prompt's text, up to the assistant's answer.

        messages, tools: in OpenAI's form, with arguments as objects and contents as texts. options: additional
        variables of the template. UserError: the template refuses the messages, or an option is a variable that we set.
        """
        for name in options:
            if name in OWN:
                raise broken(f"chat_template_kwargs[{name!r}]", options[name], "left out, because other fields set it")
        own = {"messages": messages, "tools": tools or None, "add_generation_prompt": True}
        try:
            return _compiled(self.with_tools if tools else self.text).render({**self.specials, **options, **own})
        except TemplateError as error:
            raise UserError(f"messages: the chat template of {self.model} rejects them: {error}") from error
        except Exception as error:  # templates are programs, which may fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"messages: the chat template of {self.model} fails with them: {reason}") from error


@cache
def load_template(folder: Path, model: str) -> ChatTemplate | None:
    """The chat template in a model's folder, or None if there is none. ServerError: its files cannot be read.

    Newer folders contain `chat_template.jinja`. Others store one template, or several named ones, in
    `tokenizer_config.json`.
    """
    config = _read(folder / "tokenizer_config.json")
    specials = {name: token for name in _SPECIALS if (token := _text_of(config.get(name))) is not None}
    given = config.get("chat_template")
    named: dict[str, str] = {}
    if isinstance(given, str):
        named["default"] = given
    elif isinstance(given, list):
        named = {str(one["name"]): str(one["template"]) for one in given}
    if (folder / FILE).is_file():
        named["default"] = (folder / FILE).read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = path.read_text(encoding="utf-8")
    if "default" not in named:
        return None
    return ChatTemplate(model, named["default"], named.get("tool_use", named["default"]), specials)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ServerError(f"{path} cannot be read: {error}") from error
    return values if isinstance(values, dict) else {}


def _text_of(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training. Here its content is rendered like any other text."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _compiled(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(text)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """The filter of transformers, because jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
