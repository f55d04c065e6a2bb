"""Qwen3-Coder and Qwen3.5: `<tool_call>` with `<function=NAME>` and a `<parameter=KEY>` for each argument.

Values are plain text. The tool's schema determines which of them are numbers, lists or objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinkerflow.api.chat.events import ArgumentsDelta, CallBegins, CallEnds
from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.reader import Reader, Steps, Tools, as_json, typed, types_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION = "<function="


@dataclass(frozen=True)
class Tags:
    """The tags around calls and arguments. quoted: names are in quotes, and values are not on lines of their own."""

    function: str = FUNCTION
    function_end: str = "</function>"
    parameter: str = "<parameter="
    parameter_end: str = "</parameter>"
    quoted: bool = False

    @classmethod
    def named(cls, token: str = "") -> Tags:
        """Tags with an attribute `name`. token: comes before each tag's name."""
        invoke, parameter = f"{token}invoke", f"{token}parameter"
        return cls(f'<{invoke} name="', f"</{invoke}>", f'<{parameter} name="', f"</{parameter}>", quoted=True)

    def name_of(self, head: str) -> str:
        """The name in the head of a tag, which ends before `>`; "" if there is none."""
        name, quote, _ = head.partition('"') if self.quoted else (head, True, "")
        return name.strip() if quote and "<" not in name else ""

    def value_of(self, head: str, text: str, schema: object) -> object:
        """The value of an argument whose tag has this head."""
        if not self.quoted:
            text = text.removeprefix("\n").removesuffix("\n")
        types = types_of(schema)
        is_text = head.endswith('string="true"') and (not types or "string" in types)
        return text if is_text else typed(text, schema)


def calls_between(*blocks: tuple[str, str], tags: Tags = Tags()) -> Callable[[Reader, Tools], Steps[None]]:
    """A parser of content that contains calls.

    blocks: the marks around calls. Some models omit the first mark, or the end tag of an argument. tags: the tags of
    calls.
    """
    ends = dict(blocks)

    def parse(reader: Reader, tools: Tools) -> Steps[None]:
        while (mark := (yield from reader.until((*ends, tags.function)))) is not None:
            taken = [mark]
            if mark in ends and not (yield from reader.skip(tags.function, taken)):
                yield from reader.refuse(taken)
            elif (yield from _call(reader, tools, tags, taken)):
                for closing in ends.values():
                    yield from reader.skip(closing)

    return parse


def _call(reader: Reader, tools: Tools, tags: Tags, taken: list[str]) -> Steps[bool]:
    head, mark = yield from reader.upto((">",), taken)
    name = tags.name_of(head)
    if mark is None or not name:
        yield from reader.refuse(taken)
        return False
    yield CallBegins(name)
    schemas = tools.get(name, {}).get("properties")
    separator = "{"
    between, mark = yield from reader.upto((tags.parameter, tags.function_end), taken)
    while mark == tags.parameter and not between.strip():
        head, mark = yield from reader.upto((">",), taken)
        value, mark = yield from reader.upto((tags.parameter_end, tags.parameter, tags.function_end), taken)
        if mark is None:
            break
        key = tags.name_of(head)
        schema = schemas.get(key) if isinstance(schemas, dict) else None
        yield ArgumentsDelta(f"{separator}{as_json(key)}: {as_json(tags.value_of(head, value, schema))}")
        separator = ", "
        between = ""
        if mark == tags.parameter_end:
            between, mark = yield from reader.upto((tags.parameter, tags.function_end), taken)
    if mark != tags.function_end or between.strip():
        yield from reader.refuse(taken, begun=True)
        return False
    yield ArgumentsDelta("{}" if separator == "{" else "}")
    yield CallEnds()
    return True


CALLS = (f"{OPEN}\n{FUNCTION}", f"{OPEN}{FUNCTION}")
PARSER = ParserSpec(
    "qwen_xml", signs=(OPEN, FUNCTION), marks=(OPEN, CLOSE), parse=calls_between((OPEN, CLOSE)), calls=CALLS
)
