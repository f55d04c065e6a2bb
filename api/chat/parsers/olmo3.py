"""OLMo 3: `<function_calls>`, one call per line in Python's syntax, `NAME(KEY=VALUE, …)`, `</function_calls>`.

Values are in Python's or JSON's syntax: strings, numbers, `True` or `true`, `None` or `null`, lists and objects.
"""

from __future__ import annotations

import math
import re

from tinkerflow.api.chat.events import ArgumentsDelta, CallBegins, CallEnds
from tinkerflow.api.chat.parsers import ParserSpec
from tinkerflow.api.chat.reader import Reader, Steps, Tools, as_json

OPEN, CLOSE = "<function_calls>", "</function_calls>"
_DEEPEST = 64  # nested lists
_GAP = re.compile(r"[\s,;]*")
_CALL = re.compile(r"([A-Za-z_][\w.-]*)\s*\(\s*")
_KEY = re.compile(r"([^\W\d]\w*)\s*=\s*")
_STRING = re.compile(r"'((?:[^'\\]|\\.)*)'\s*|\"((?:[^\"\\]|\\.)*)\"\s*", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\s*")
_WORD = re.compile(r"(True|true|False|false|None|null)\b\s*")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{char: char for char in "\\'\"/"}}
_REST = re.compile(r"[^\n]*\n?")


def parse(reader: Reader, tools: Tools) -> Steps[None]:
    """Content that contains calls. A line that is not a call is content; the other lines are still read as calls."""
    while (yield from reader.until((OPEN,))) is not None:
        taken = [OPEN]
        text, mark = yield from reader.upto((CLOSE,), taken)
        calls = _Source(text).calls() if mark is not None else []
        if not any(isinstance(one, tuple) for one in calls):
            yield from reader.refuse(taken)
            continue
        for one in calls:
            if isinstance(one, str):
                yield from reader.refuse([one])
            else:
                yield from (CallBegins(one[0]), ArgumentsDelta(one[1]), CallEnds())
        reader.trim()


class _Source:
    """A text, read from its beginning."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def calls(self) -> list[str | tuple[str, str]]:
        """For each line, the call's name and its arguments as JSON, or the text if the line is not a call."""
        found: list[str | tuple[str, str]] = []
        while self._take(_GAP) and (begin := self._at) < len(self._text):
            try:
                found.append(self._call())
            except ValueError:
                self._at = begin
                self._take(_REST)
                found.append(self._text[begin : self._at])
        return found

    def _call(self) -> tuple[str, str]:
        if (name := self._take(_CALL)) is None:
            raise ValueError("no call")
        values: dict[str, object] = {}
        while not self._skip(")"):
            if (key := self._take(_KEY)) is None:
                raise ValueError("no argument")
            values[key[1]] = self._value(0)
            self._between(")")
        return name[1], as_json(values)

    def _value(self, depth: int) -> object:
        if depth > _DEEPEST:
            raise ValueError("too deep")
        if found := self._take(_STRING):
            return _unescaped(found[1] if found[2] is None else found[2])
        if found := self._take(_NUMBER):
            return _number(found[0])
        if found := self._take(_WORD):
            return _WORDS[found[1].lower()]
        items: list[object] = []
        for opening, closing in ("[]", "()"):
            if self._skip(opening):
                while not self._skip(closing):
                    items.append(self._value(depth + 1))
                    self._between(closing)
                return items
        values: dict[str, object] = {}
        if not self._skip("{"):
            raise ValueError("no value")
        while not self._skip("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str) or not self._skip(":"):
                raise ValueError("no object")
            values[key] = self._value(depth + 1)
            self._between("}")
        return values

    def _between(self, closing: str) -> None:
        if not self._skip(",") and not self._text.startswith(closing, self._at):
            raise ValueError("no comma")

    def _skip(self, char: str) -> bool:
        return self._take(re.compile(re.escape(char) + r"\s*")) is not None

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if (found := pattern.match(self._text, self._at)) is not None:
            self._at = found.end()
        return found


def _number(text: str) -> int | float:
    value = float(text) if re.search(r"[.eE]", text) else int(text)
    if not math.isfinite(value):
        raise ValueError("JSON has no infinity")
    return value


def _unescaped(text: str) -> str:
    """The text of a string's source. Separately escaped surrogates are combined into one character."""

    def one(found: re.Match[str]) -> str:
        return _ESCAPES.get(found[3], found[0]) if found[3] else chr(int(found[1] or found[2], 16))

    return _ESCAPE.sub(one, text).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


PARSER = ParserSpec("olmo3", signs=(OPEN,), marks=(OPEN, CLOSE), parse=parse, calls=(OPEN,))
