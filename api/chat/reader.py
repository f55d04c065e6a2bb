"""Parsing of text that arrives in pieces.

Parsers are generators. They yield events as soon as the available text determines them, and None when they need more
text. The code of a parser reads as if the text were complete, and any split of a text into pieces gives the same
answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from tinkerflow.api.chat.events import ArgumentsDelta, CallBegins, CallBreaks, CallEnds, ContentDelta, Event

T = TypeVar("T")
Steps: TypeAlias = Generator[Event | None, None, T]  # events, and None for "more text is needed"; then a result
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # each tool's JSON schema of its parameters

# The usual form of a call, up to the beginning of its arguments.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_ARGUMENTS = ("arguments", "parameters")
_DEEPEST = 128  # nested brackets; Python's decoder fails at 1,000
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # inside a string
_OUTSIDE = re.compile(r"[\s:,\-+.0-9eEtrufalsn]+")  # outside of strings and brackets
_CLOSES = {"{": "}", "[": "]"}


class ObjectScan:
    """Finds where a JSON object ends in text that arrives in pieces."""

    def __init__(self, open_brackets: str = "") -> None:
        """open_brackets: brackets that are open when the text begins; "" if the object has not begun."""
        self._brackets = list(open_brackets)
        self._begun = bool(open_brackets)
        self._in_string = self._escaped = False
        self.done = self.broken = False

    def take(self, text: str) -> int:
        """Scan `text`. Returns the number of its characters in the object: all, unless `done` or `broken` is set."""
        at = 0
        while at < len(text) and not self.done and not self.broken:
            at = self._in(text, at) if self._in_string else self._out(text, at)
        return at

    def _in(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        if plain := _PLAIN.match(text, at):
            return plain.end()
        self._escaped, self._in_string = text[at] == "\\", text[at] != '"'
        self.broken = text[at] not in '"\\'  # a control character
        return at if self.broken else at + 1

    def _out(self, text: str, at: int) -> int:
        char = text[at]
        if self._begun and char == '"':
            self._in_string = True
        elif char == "{" or (self._begun and char == "["):
            self._begun = True
            self._brackets.append(char)
            self.broken = len(self._brackets) > _DEEPEST
        elif self._begun and char in "}]":
            self.broken = _CLOSES[self._brackets.pop()] != char
            self.done = not self.broken and not self._brackets
        elif not self._begun and char.isspace():
            pass
        elif self._begun and (others := _OUTSIDE.match(text, at)):
            return others.end()
        else:
            self.broken = True
        return at if self.broken else at + 1


class Reader:
    """The text that has arrived and is still unread. White space after a mark is dropped."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._trim = False

    def until(self, marks: Sequence[str], event: Callable[[str], Event] = ContentDelta) -> Steps[str | None]:
        """Yield text up to the first of the marks. Returns the mark, or None at the end of the text.

        White space before a mark is dropped. event: makes an event from a piece of text.
        """
        first = _first_of(marks)
        while True:
            if self._trim:
                self.text = self.text.lstrip()
            found = first.search(self.text)
            held = 0 if found or self.ended else _held(self.text, marks)
            passed = self.text[: found.start()].rstrip() if found else self.text[: len(self.text) - held]
            self.text = self.text[found.end() if found else len(passed) :]
            if passed:
                self._trim = False
                yield event(passed)
            if found:
                self._trim = True
                return found[0]
            if self.ended:
                return None
            yield None

    def upto(self, marks: Sequence[str], taken: list[str]) -> Steps[tuple[str, str | None]]:
        """Read past the first of the marks. Returns the text before the mark, and the mark, or None at the end.

        taken: the text that was read is appended to this list.
        """
        first, looked, longest = _first_of(marks), 0, max(map(len, marks))
        while (found := first.search(self.text, looked)) is None and not self.ended:
            looked = max(0, len(self.text) - longest)
            yield None
        end, after = (found.start(), found.end()) if found else (len(self.text), len(self.text))
        text, self.text = self.text[:after], self.text[after:]
        taken.append(text)
        return text[:end], found[0] if found else None

    def trim(self) -> None:
        """Drop white space at the beginning of the unread text."""
        self._trim = True

    def skip(self, wanted: str, taken: list[str] | None = None) -> Steps[bool]:
        """Read `wanted` and white space before it. Returns whether it was there; if not, nothing is read.

        taken: the text that was read is appended to this list.
        """
        while True:
            text = self.text.lstrip()
            if text.startswith(wanted):
                if taken is not None:
                    taken.append(self.text[: len(self.text) - len(text)] + wanted)
                self.text, self._trim = text[len(wanted) :], True
                return True
            if self.ended or not wanted.startswith(text):
                return False
            yield None

    def peek(self) -> Steps[str]:
        """The first character that is not white space, or "" at the end. Nothing is read."""
        while not (text := self.text.lstrip()) and not self.ended:
            yield None
        return text[:1]

    def call(self, opening: str) -> Steps[bool]:
        """Read a call that is one JSON object with `name` and `arguments` or `parameters`. Returns whether it is valid.

        opening: the text that was read before the call. It becomes content if there is no call.
        """
        scan, at = ObjectScan(), 0
        while (head := _HEAD.match(self.text)) is None:
            at += scan.take(self.text[at:])
            if scan.done or scan.broken or self.ended:
                return (yield from self._whole_call(opening, at))
            yield None
        begins, self.text = head[0], self.text[head.end() :]
        arguments: list[str] = []
        yield CallBegins(head[1])
        whole = yield from self._object(ObjectScan(), arguments, shown=True)
        rest: list[str] = []
        whole = whole and (yield from self._object(ObjectScan("{"), rest))
        text = begins + "".join(arguments + rest)
        found = _call_of(text) if whole else None
        # If a key occurs twice, its last value counts, and it must equal the arguments that were yielded.
        if found is None or found != (head[1], _object_of("".join(arguments))):
            yield self._content(CallBreaks(opening + text))
            return False
        yield CallEnds()
        return True

    def calls(self, opening: str) -> Steps[None]:
        """Read a list of calls in the form that `call` reads, up to its end.

        opening: the text that was read before the first call.
        """
        while (yield from self.call(opening)):
            opening = ","
            if not (yield from self.skip(",")):
                yield from self.skip("]")
                return

    def arguments(self, name: str, taken: list[str]) -> Steps[bool]:
        """Read one JSON object, the arguments of the call `name`. Returns whether it is valid.

        taken: the text of the call before its arguments. It becomes content if this is not a call.
        """
        yield CallBegins(name)
        arguments: list[str] = []
        whole = yield from self._object(ObjectScan(), arguments, shown=True)
        if not whole or _object_of("".join(arguments)) is None:
            yield self._content(CallBreaks("".join(taken + arguments)))
            return False
        yield CallEnds()
        return True

    def refuse(self, taken: list[str], *, begun: bool = False) -> Steps[None]:
        """Yield as content a text that looked like a call. begun: CallBegins was already yielded."""
        text = "".join(taken)
        yield self._content(CallBreaks(text) if begun else ContentDelta(text))

    def _content(self, event: Event) -> Event:
        self._trim = False
        return event

    def _whole_call(self, opening: str, length: int) -> Steps[bool]:
        """Read a call with its keys in another order. It is recognized only once it is complete."""
        text, self.text = self.text[:length], self.text[length:]
        found = _call_of(text, marked=bool(opening))
        if found is None:
            yield self._content(ContentDelta(opening + text))
            return False
        name, arguments = found
        yield from (CallBegins(name), ArgumentsDelta(as_json(arguments)), CallEnds())
        return True

    def _object(self, scan: ObjectScan, taken: list[str], *, shown: bool = False) -> Steps[bool]:
        """Read an object to its end or first error. Returns whether it is complete. shown: yield it as arguments."""
        while True:
            if not taken and shown:
                self.text = self.text.lstrip()
            size = scan.take(self.text)
            part, self.text = self.text[:size], self.text[size:]
            if part:
                taken.append(part)
                if shown:
                    yield ArgumentsDelta(part)
            if scan.done or scan.broken or self.ended:
                return scan.done
            yield None


def name_in(text: str) -> str:
    """The tool's name in a model's text; "" if the text is not a single word."""
    words = text.split()
    return words[0] if len(words) == 1 else ""


def as_json(value: object) -> str:
    """JSON that can be encoded as UTF-8: lone surrogates are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or _encodable(text) else json.dumps(value)


def typed(text: str, schema: object) -> object:
    """The value that a model wrote as plain text for a parameter of this JSON schema.

    The text's JSON value if the schema allows its type, otherwise the text. A schema without a type allows all types.
    """
    types = types_of(schema)
    if types == {"string"}:
        return text
    try:
        value = _PYTHON[text] if text in _PYTHON else _value_of(text)
    except (ValueError, RecursionError):
        return text
    return value if not types or types & _NAMES[type(value)] else text


_PYTHON = {"True": True, "False": False, "None": None}
_NAMES: Mapping[type, frozenset[str]] = {
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    str: frozenset({"string"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    bool: frozenset({"boolean"}),
    type(None): frozenset({"null"}),
}


def types_of(schema: object) -> set[str]:
    """The types in a schema and in its alternatives."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    found = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        for one in alternatives if isinstance(alternatives, list) else ():
            found |= types_of(one)
    return found


def _first_of(marks: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")


def _held(text: str, marks: Sequence[str]) -> int:
    """The number of characters at the end that may begin a mark, including white space before it."""
    if not marks:
        return 0
    for size in range(min(max(map(len, marks)) - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return len(text) - len(text[:-size].rstrip())
    return len(text) - len(text.rstrip())


def _value_of(text: str) -> Any:
    """The value of a JSON text. ValueError: the text is not JSON, or contains a number that only Python accepts."""
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


def _object_of(text: str) -> dict[str, Any] | None:
    try:
        value = _value_of(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _call_of(text: str, *, marked: bool = True) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of a call; None if the text is not a call. Arguments may be JSON inside a string.

    marked: a mark of the family precedes the text, so the call needs no arguments.
    """
    values = _object_of(text)
    name = values.get("name") if values else None
    if values is None or not isinstance(name, str) or not name or not _encodable(name):
        return None
    given: Any = next((values[key] for key in _ARGUMENTS if key in values), None if marked else [])
    if given is None or given == "":
        return name, {}
    arguments = _object_of(given) if isinstance(given, str) else given
    return (name, arguments) if isinstance(arguments, dict) else None


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
