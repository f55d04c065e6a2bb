"""The JSON schema that a required tool call must match, and messages of the system at any place."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from tinkerflow.api.chat.conversation import Chat, Tool, _call_schema, _rendered
from tinkerflow.api.chat.parsers import parser_for
from tinkerflow.api.chat.template import ChatTemplate
from tinkerflow.backend.catalog.control_tokens import ControlTokens
from tinkerflow.backend.spec.json_schemas import exact_schema


def test_references_in_tool_parameters_resolve_from_the_tool_schema() -> None:
    def tool(name: str, kind: str) -> Tool:
        return Tool(name, "", {"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": kind}}})

    schema = exact_schema(_call_schema([tool("a", "null"), tool("b", "boolean")])).schema
    calls = [each["properties"]["arguments"] for each in schema["anyOf"]]
    kinds = [schema["$defs"][call["properties"]["x"]["$ref"].removeprefix("#/$defs/")]["type"] for call in calls]
    assert kinds == ["null", "boolean"]


OMITS = (
    "{% for m in messages %}"
    "{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
REFUSES = OMITS.replace("{% endif %}", "{% else %}{{ raise_exception('the system is not first') }}{% endif %}")
SHOWS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SHOWS, "<system>a<system>b<user>c<system>d<user>e<assistant>f<system>g<assistant>h<system>i"),
        (OMITS, "<system>a\n\nb<user>c\n\n[d]\n\ne<assistant>f<user>[g]<assistant>h<user>[i]"),
        (REFUSES, "<system>a\n\nb<user>c\n\n[d]\n\ne<assistant>f<user>[g]<assistant>h<user>[i]"),
    ],
)
def test_every_message_of_the_system_reaches_the_prompt(text: str, expected: str) -> None:
    said = "system a, system b, user c, system d, user e, assistant f, system g, assistant h, system i"
    turns = [turn.split() for turn in said.split(", ")]
    chat = Chat([{"role": role, "content": content} for role, content in turns])
    template, control = ChatTemplate("model", text, text, {}), ControlTokens(Tokenizer(BPE()), text)
    rendered = _rendered(template, parser_for(text), chat, control)
    assert rendered.replace("<system-reminder>\n", "[").replace("\n</system-reminder>", "]") == expected
