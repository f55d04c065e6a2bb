"""What a model says, as it arrives: stretches of reasoning, of content, and of calls of tools."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning that comes before the answer."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """The model calls the tool of this name."""

    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of the JSON object with the arguments of the call that began last."""

    text: str


@dataclass(frozen=True)
class CallEnds:
    """The call that began last is whole, and its arguments are a JSON object."""


@dataclass(frozen=True)
class CallBreaks:
    """The call that began last is none. What the model wrote for it, `text`, belongs to the content."""

    text: str


Event: TypeAlias = ReasoningDelta | ContentDelta | CallBegins | ArgumentsDelta | CallEnds | CallBreaks


@dataclass
class ToolCall:
    """A call of a tool. arguments: the text of a JSON object."""

    name: str
    arguments: str = ""

    @property
    def values(self) -> dict[str, object]:
        """The arguments by name."""
        values = json.loads(self.arguments)
        assert isinstance(values, dict), "a call that ended has an object for its arguments"
        return values


@dataclass
class FullAnswer:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    _open: ToolCall | None = None

    def add(self, event: Event) -> None:
        """Take in the next event."""
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
