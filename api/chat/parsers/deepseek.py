"""DeepSeek V3, V3.1 and R1: `function<sep>NAME` and a code block of JSON; in V3.1 `NAME<sep>{…}`."""

from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.reader import Reader, Steps, Tools, name_in

_NAMES = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
MARKS = CALLS, CALLS_END, CALL, CALL_END, SEPARATOR = [f"<\uff5ctool▁{name}\uff5c>" for name in _NAMES]
FENCE, FENCE_END = "```json", "```"


def parse(reader: Reader, tools: Tools) -> Steps[None]:
    while (mark := (yield from reader.until((CALLS, CALLS_END, CALL)))) is not None:
        if mark == CALL:
            yield from _call(reader)


def _call(reader: Reader) -> Steps[None]:
    taken = [CALL]
    name, mark = yield from reader.upto((SEPARATOR,), taken)
    if mark and name.strip() == "function" and (yield from reader.peek()) != "{":
        name, mark = yield from reader.upto(("\n",), taken)
        if not (yield from reader.skip(FENCE, taken)):
            mark = None
    name = name_in(name)
    if mark is None or not name:
        yield from reader.refuse(taken)
    elif (yield from reader.arguments(name, taken)):
        yield from reader.skip(FENCE_END)
        yield from reader.skip(CALL_END)


PARSER = ParserSpec("deepseek", signs=(CALLS,), marks=tuple(MARKS), parse=parse, calls=(CALLS,))
