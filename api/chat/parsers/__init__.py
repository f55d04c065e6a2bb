"""Parsers of reasoning and tool calls, one file for each family of models. A new family needs only a file here.

A parser is a generator over a `Reader` (`api/chat/reader.py`). The model's chat template selects the parser: all of the
parser's `signs` must be in the template. Of several such parsers, the one with the most signs is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tinkerflow.api.chat.events import Event, ReasoningDelta
from tinkerflow.api.chat.reader import Reader, Steps, Tools
from tinkerflow.backend.spec.registry import registered

Shown: TypeAlias = Sequence[Mapping[str, Any]]  # messages or tools in OpenAI's form
THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class ParserSpec:
    """How one family writes its answers.

    name: the file's. signs: texts that the family's chat templates contain. marks: the special tokens that `parse`
    looks for; an answer's text contains no other special tokens. think: the marks around reasoning at the start of an
    answer; None: `parse` handles reasoning. parse: reads an answer after its reasoning, until only content is left;
    None: the family calls no tools. opening: the mark before a call that is one JSON object with `name` and
    `arguments`, if the family writes calls in this form. calls: beginnings of calls. A call inside reasoning ends the
    reasoning, because Qwen3 writes no end mark before the call. prepared: converts messages from OpenAI's form to the
    form of the family's chat templates.
    """

    name: str
    signs: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    think: tuple[str, str] | None = THINK
    parse: Callable[[Reader, Tools], Steps[None]] | None = None
    opening: str = ""
    calls: tuple[str, ...] = ()
    prepared: Callable[[Shown, Shown], Shown] | None = None

    def thinks(self, template: str) -> bool:
        """Whether models with this chat template reason before they answer."""
        return self.think is None or any(mark in template for mark in self.think)


class Parser:
    """Reads one answer as it arrives."""

    def __init__(self, spec: ParserSpec, tools: Tools, *, thinks: bool, opened: bool) -> None:
        """Read an answer of the family `spec`.

        tools: callable tools; without tools, text that looks like a call is content. thinks: the model reasons
        before it answers. opened: the prompt ends inside reasoning.
        """
        self._reader = Reader()
        self._steps = _answer(spec, self._reader, tools, thinks=thinks, opened=opened)

    def feed(self, text: str) -> list[Event]:
        """Read more text. Returns the events that it determines."""
        self._reader.text += text
        events = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return events

    def end(self) -> list[Event]:
        """End the text. Returns the remaining events."""
        self._reader.ended = True
        return self.feed("")


def _answer(spec: ParserSpec, reader: Reader, tools: Tools, *, thinks: bool, opened: bool) -> Steps[None]:
    if spec.think is not None and thinks and (opened or (yield from reader.skip(spec.think[0]))):
        reader.trim()
        begun = yield from reader.until((spec.think[1], *(spec.calls if tools else ())), ReasoningDelta)
        if begun in spec.calls:
            reader.text = begun + reader.text
    if spec.parse is not None and (tools or spec.think is None):
        yield from spec.parse(reader, tools)
    yield from reader.until(())


PARSERS = registered(__name__, "PARSER", ParserSpec)


def parser_for(template: str) -> ParserSpec:
    fitting = [spec for spec in PARSERS.values() if all(sign in template for sign in spec.signs)]
    return max(fitting, key=lambda spec: len(spec.signs))
