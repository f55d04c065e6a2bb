"""Hermes, Qwen2.5 and Qwen3: `<tool_call>`, a JSON object with `name` and `arguments`, `</tool_call>`."""

from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.reader import Reader, Steps, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse(reader: Reader, tools: Tools) -> Steps[None]:
    while (yield from reader.until((OPEN,))) is not None:
        if (yield from reader.call(OPEN)):
            yield from reader.skip(CLOSE)


CALLS = (f"{OPEN}\n{{", f"{OPEN}{{")
PARSER = ParserSpec("hermes", signs=(OPEN,), marks=(OPEN, CLOSE), parse=parse, opening=f"{OPEN}\n", calls=CALLS)
