"""Qwen3-Coder and Qwen3.5: `<tool_call>` with `<function=NAME>` and a `<parameter=KEY>` for each argument.

Values are plain text. The tool's schema says which of them are numbers, lists or objects.
"""

from collections.abc import Callable

from tinkerflow.api.chat.events import ArgumentsDelta, CallBegins, CallEnds
from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.reader import Reader, Steps, Tools, as_json, typed

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def calls_between(opening: str, closing: str) -> Callable[[Reader, Tools], Steps[None]]:
    """A parser of content with calls in it. Some models leave out `opening`, or `</parameter>`."""

    def parse(reader: Reader, tools: Tools) -> Steps[None]:
        while (mark := (yield from reader.until((opening, FUNCTION)))) is not None:
            taken = [mark]
            if mark == opening and not (yield from reader.skip(FUNCTION, taken)):
                yield from reader.refuse(taken)
                continue
            if (yield from _call(reader, tools, taken)):
                yield from reader.skip(closing)

    return parse


def _call(reader: Reader, tools: Tools, taken: list[str]) -> Steps[bool]:
    name, mark = yield from reader.upto((">",), taken)
    if mark is None or not name.strip() or "<" in name:
        yield from reader.refuse(taken)
        return False
    yield CallBegins(name.strip())
    schemas = tools.get(name.strip(), {}).get("properties")
    separator = "{"
    between, mark = yield from reader.upto((PARAMETER, END), taken)
    while mark == PARAMETER and not between.strip():
        key, mark = yield from reader.upto((">",), taken)
        value, mark = yield from reader.upto((PARAMETER_END, PARAMETER, END), taken)
        if mark is None:
            break
        value = value.removeprefix("\n").removesuffix("\n")
        schema = schemas.get(key.strip()) if isinstance(schemas, dict) else None
        yield ArgumentsDelta(f"{separator}{as_json(key.strip())}: {as_json(typed(value, schema))}")
        separator = ", "
        between = ""
        if mark == PARAMETER_END:
            between, mark = yield from reader.upto((PARAMETER, END), taken)
    if mark != END or between.strip():
        yield from reader.refuse(taken, begun=True)
        return False
    yield ArgumentsDelta("{}" if separator == "{" else "}")
    yield CallEnds()
    return True


CALLS = (f"{OPEN}\n{FUNCTION}", f"{OPEN}{FUNCTION}")
PARSER = ParserSpec(
    "qwen_xml", signs=(OPEN, FUNCTION), marks=(OPEN, CLOSE), parse=calls_between(OPEN, CLOSE), calls=CALLS
)
