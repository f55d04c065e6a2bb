"""Mistral and Ministral: `[TOOL_CALLS]`, then a JSON list of calls, or `NAME[ARGS]{…}` (since tokenizer 11)."""

from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.reader import Reader, Steps, Tools, name_in

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THINK = ("[THINK]", "[/THINK]")


def parse(reader: Reader, tools: Tools) -> Steps[None]:
    while (yield from reader.until((CALLS,))) is not None:
        if (yield from reader.skip("[")):
            yield from reader.calls(f"{CALLS}[")
        else:
            yield from _named(reader)


def _named(reader: Reader) -> Steps[None]:
    taken = [CALLS]
    text, mark = yield from reader.upto((ARGUMENTS, "{"), taken)
    name = name_in(text.split(CALL_ID)[0])
    if mark == "{":
        reader.text = "{" + reader.text
        taken[-1] = text
    if mark is None or not name:
        yield from reader.refuse(taken)
    else:
        yield from reader.arguments(name, taken)


MARKS = (CALLS, CALL_ID, ARGUMENTS, *THINK)
PARSER = ParserSpec("mistral", signs=(CALLS,), marks=MARKS, think=THINK, parse=parse, calls=(CALLS,))
