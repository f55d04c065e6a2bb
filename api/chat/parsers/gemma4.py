"""Gemma 4: `<|tool_call>call:NAME{key:value,…}<tool_call|>`, and reasoning in the channel `thought`.

Keys are unquoted, strings are enclosed in `<|"|>`, and other values are JSON.
"""

import json
import re

from tinkerflow.api.chat.events import ArgumentsDelta, CallBegins, CallEnds
from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.reader import Reader, Steps, Tools, as_json, name_in

OPEN, CLOSE, NAME, QUOTE = "<|tool_call>", "<tool_call|>", "call:", '<|"|>'
THOUGHT, THOUGHT_END = "<|channel>thought", "<channel|>"
_TOKEN = re.compile(
    rf'\s*(?:{re.escape(QUOTE)}(?P<text>.*?){re.escape(QUOTE)}|(?P<json>"(?:[^"\\]|\\.)*")|(?P<mark>[{{}}\[\],:])'
    r"|(?P<bare>[^{}\[\],:\s][^{}\[\],:]*))\s*",
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null"}


def parse(reader: Reader, tools: Tools) -> Steps[None]:
    while (yield from reader.until((OPEN,))) is not None:
        yield from _call(reader)


def _call(reader: Reader) -> Steps[None]:
    taken = [OPEN]
    if not (yield from reader.skip(NAME, taken)):
        yield from reader.refuse(taken)
        return
    name, mark = yield from reader.upto(("{", CLOSE), taken)
    name = name_in(name)
    if mark != "{" or not name:
        yield from reader.refuse(taken)
        return
    yield CallBegins(name)
    body, mark = yield from reader.upto((CLOSE,), taken)
    arguments = _arguments("{" + body)
    if mark is None or arguments is None:
        yield from reader.refuse(taken, begun=True)
        return
    yield ArgumentsDelta(arguments)
    yield CallEnds()


def _arguments(body: str) -> str | None:
    """The model's text as JSON; None if it is not an object."""
    parts, at = [], 0
    while at < len(body):
        found = _TOKEN.match(body, at)
        if found is None:
            return None
        at = found.end()
        if (text := found["text"]) is not None:
            parts.append(as_json(text))
        elif (bare := found["bare"]) is not None:
            bare = bare.strip()
            parts.append(as_json(bare) if body[at : at + 1] == ":" else _WORDS.get(bare, bare))
        else:
            parts.append(found["json"] or found["mark"])
    try:
        value = json.loads("".join(parts))
        return as_json(value) if isinstance(value, dict) and json.dumps(value, allow_nan=False) else None
    except (ValueError, RecursionError):
        return None


PARSER = ParserSpec(
    "gemma4",
    signs=(OPEN, QUOTE),
    marks=(OPEN, CLOSE, QUOTE, "<|channel>", THOUGHT_END),
    think=(THOUGHT, THOUGHT_END),
    parse=parse,
    calls=(OPEN,),
)
