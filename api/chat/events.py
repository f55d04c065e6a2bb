"""Events of an answer as it arrives: pieces of reasoning, of content, and of tool calls."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning that precedes the answer."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """The model begins to call the tool `name`."""

    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of the current call's arguments, a JSON object."""

    text: str


@dataclass(frozen=True)
class CallEnds:
    """The current call is complete, and its arguments are a JSON object."""


@dataclass(frozen=True)
class CallBreaks:
    """The current call is invalid. Its `text` belongs to the content."""

    text: str


Event: TypeAlias = ReasoningDelta | ContentDelta | CallBegins | ArgumentsDelta | CallEnds | CallBreaks


@dataclass
class ToolCall:
    """A call of a tool. arguments: a JSON object as text."""

    name: str
    arguments: str = ""

    @property
    def values(self) -> dict[str, object]:
        """The arguments, parsed."""
        values = json.loads(self.arguments)
        assert isinstance(values, dict), "the arguments of a complete call are an object"
        return values


@dataclass
class FullAnswer:
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    _open: ToolCall | None = None

    def add(self, event: Event) -> None:
        """Add the next event to the answer."""
        match event:
            case ReasoningDelta(text):
                self.reasoning += text
            case ContentDelta(text):
                self.content += text
            case CallBegins(name):
                self._open = ToolCall(name)
            case ArgumentsDelta(text):
                assert self._open is not None
                self._open.arguments += text
            case CallEnds():
                assert self._open is not None
                self.calls.append(self._open)
                self._open = None
            case CallBreaks(text):
                self.content += text
                self._open = None
