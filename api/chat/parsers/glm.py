"""GLM-4.5 and later: `<tool_call>NAME`, then `<arg_key>` and `<arg_value>` for each argument, `</tool_call>`.

Values are plain text. The tool's schema determines which of them are numbers, lists or objects.
"""

from tinkerflow.api.chat.events import ArgumentsDelta, CallBegins, CallEnds
from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.reader import Reader, Steps, Tools, as_json, name_in, typed

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


def parse(reader: Reader, tools: Tools) -> Steps[None]:
    while (yield from reader.until((OPEN,))) is not None:
        taken = [OPEN]
        name, mark = yield from reader.upto((KEY, CLOSE), taken)
        name = name_in(name)
        if mark is None or not name:
            yield from reader.refuse(taken)
        else:
            yield CallBegins(name)
            yield from _arguments(reader, tools.get(name, {}).get("properties"), mark, taken)


def _arguments(reader: Reader, schemas: object, mark: str | None, taken: list[str]) -> Steps[None]:
    separator = "{"
    between = ""
    while mark == KEY and not between.strip():
        key, mark = yield from reader.upto((KEY_END,), taken)
        gap, mark = yield from reader.upto((VALUE,), taken)
        value, mark = yield from reader.upto((VALUE_END,), taken)
        if mark is None or gap.strip():
            mark = None
            break
        schema = schemas.get(key.strip()) if isinstance(schemas, dict) else None
        yield ArgumentsDelta(f"{separator}{as_json(key.strip())}: {as_json(typed(value, schema))}")
        separator = ", "
        between, mark = yield from reader.upto((KEY, CLOSE), taken)
    if mark != CLOSE or between.strip():
        yield from reader.refuse(taken, begun=True)
        return
    yield ArgumentsDelta("{}" if separator == "{" else "}")
    yield CallEnds()
    reader.trim()


MARKS = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
PARSER = ParserSpec("glm", signs=(OPEN, KEY), marks=MARKS, parse=parse)
