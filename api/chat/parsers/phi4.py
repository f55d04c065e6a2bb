"""Phi-4-mini: `<|tool_call|>` or `functools`, then a JSON list of calls, `<|/tool_call|>`.

The chat template takes tools as a text in the system message, and renders no calls. `prepared` writes both as text.
"""

import json
from collections.abc import Mapping
from typing import Any

from tinkerflow.api.chat.parsers import ParserSpec, Shown
from tinkerflow.api.chat.reader import Reader, Steps, Tools

OPEN, CLOSE, NAME = "<|tool_call|>", "<|/tool_call|>", "functools["


def parse(reader: Reader, tools: Tools) -> Steps[None]:
    while (opening := (yield from reader.until((OPEN, NAME)))) is not None:
        if opening == NAME or (yield from reader.skip("[")):
            yield from reader.calls(NAME if opening == NAME else f"{OPEN}[")
        elif not (yield from reader.call(OPEN)):
            continue
        yield from reader.skip(CLOSE)


def prepared(messages: Shown, tools: Shown) -> Shown:
    """The messages, with tools and calls written as text."""
    found = [_with_calls(message) for message in messages]
    if tools:
        if not found or found[0]["role"] != "system":
            found.insert(0, {"role": "system", "content": ""})
        found[0] = {**found[0], "tools": json.dumps([tool["function"] for tool in tools], ensure_ascii=False)}
    return found


def _with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    written = json.dumps([{"name": call["name"], "arguments": call["arguments"]} for call in calls], ensure_ascii=False)
    return {**message, "content": f"{message.get('content') or ''}{OPEN}{written}{CLOSE}"}


PARSER = ParserSpec(
    "phi4",
    signs=("<|tool|>", "message['tools']"),
    marks=(OPEN, CLOSE),
    parse=parse,
    opening=f"{OPEN}[",
    calls=(OPEN, NAME),
    prepared=prepared,
)
