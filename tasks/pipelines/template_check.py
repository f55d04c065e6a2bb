"""Detects fields of rows that a chat template does not show. Training would silently drop them, so rows are rejected.

A template is a program, so the check runs it with each text of a conversation replaced by a unique mark. A mark that is
absent from the rendered text belongs to a field that the template may drop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol

from tinkerflow.tasks.pipelines.row_errors import RowError
from tinkerflow.tasks.pipelines.rows import Message, path_pattern

RULE = "the model's chat template does not show it"
Path = tuple[str | int, ...]


class TextOf(Protocol):
    """Renders a conversation with the template."""

    def __call__(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], /, *, asking: bool) -> str:
        """The text. asking: up to where the assistant answers. RowError: the template rejects the conversation."""


class TemplateCheck:
    """Checks conversations against one template. Each shape of a conversation is tried once."""

    def __init__(self, text_of: TextOf) -> None:
        """text_of: renders with the template."""
        self._text_of = text_of
        self._shown_shapes: set[tuple[Any, ...]] = set()
        self._shown_tools: set[str] = set()

    def check(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise RowError for the first field that the template does not show."""
        if tools:
            self._check_tools(messages, tools)
        repeated = (_is_repeated_name(messages, (i, "name")) for i in range(len(messages)))
        shape = (*map(_shape, messages), *repeated, bool(tools))
        if shape in self._shown_shapes:
            return
        for path in self._missing(messages, tools):
            if not self._is_shown(messages, tools, path) and not _is_repeated_name(messages, path):
                name = "messages" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
                raise RowError(name, _value(messages, path), RULE, ignore=[path_pattern(("messages", *path))])
        self._shown_shapes.add(shape)

    def _missing(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Path]:
        """The paths of texts that the template may not show: all of them if it rejects marks in their places."""
        marked = deepcopy(list(messages))
        marks = {f"zq{n}qz": path for n, path in enumerate(_marked_paths(messages))}
        for mark, path in marks.items():
            _value(marked, path[:-1])[path[-1]] = mark
        try:
            text = self._text(marked, tools)
        except RowError:
            return list(marks.values())
        return [path for mark, path in marks.items() if mark not in text]

    def _is_shown(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], path: Path) -> bool:
        """Whether a different text at the path changes the conversation up to its message.

        Later messages are left out, because templates drop the reasoning of earlier turns, as in sampling.
        """
        until = deepcopy(list(messages[: int(path[0]) + 1]))
        before = self._text(until, tools)
        _value(until, path[:-1])[path[-1]] = "zqz"
        try:
            return self._text(until, tools) != before
        except RowError:
            return True

    def _text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        return self._text_of(messages, tools, asking=messages[-1]["role"] != "assistant")

    def _check_tools(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise RowError for the first keyword in a tool's definition that does not change the text."""
        text = None
        for path, value in _leaves(tools):
            pattern = path_pattern(("tools", *path))
            if pattern in self._shown_tools or pattern == "tools.type":
                continue
            text = self._text(messages[:1], tools) if text is None else text
            changed = deepcopy(list(tools))
            del _value(changed, path[:-1])[path[-1]]
            try:
                shown = self._text(messages[:1], changed) != text
            except RowError:
                shown = True  # the template needs the keyword
            if not shown:
                name = "tools" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
                raise RowError(name, value, RULE, ignore=[pattern])
            self._shown_tools.add(pattern)


def holds_text(text: str, content: str) -> bool:
    """Whether the text contains every line of the content, apart from white space."""
    if content in text:
        return True
    dense = "".join(text.split())
    return all("".join(line.split()) in dense for line in content.splitlines())


def _shape(message: Message) -> tuple[Any, ...]:
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    paths = tuple(tuple(path for path, _ in _leaves(arguments)) for arguments in calls)
    return (message["role"], bool(message["content"]), "reasoning_content" in message, "name" in message, paths)


def _marked_paths(messages: Sequence[Message]) -> Iterator[Path]:
    """The paths of texts that a template must show. Ids of calls only link messages, and are checked with the row."""
    for i, message in enumerate(messages):
        for key in ("content", "reasoning_content", "name"):
            if message.get(key):
                yield (i, key)
        for j, call in enumerate(message.get("tool_calls", ())):
            function: Path = (i, "tool_calls", j, "function")
            yield (*function, "name")
            for path, _ in _leaves(call["function"]["arguments"]):
                yield (*function, "arguments", *path)


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The paths and values of all leaves in a value, except for empty lists and objects."""
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = enumerate(value)
    elif path:
        yield path, value
    for key, held in items:
        yield from _leaves(held, (*path, key))


def _value(root: Any, path: Path) -> Any:
    for part in path:
        root = root[part]
    return root


def _is_repeated_name(messages: Sequence[Message], path: Path) -> bool:
    """Whether the path is the name in a tool's result, and repeats the name of an earlier call."""
    at, key = path[0], path[-1]
    if len(path) != 2 or key != "name" or not isinstance(at, int) or messages[at]["role"] != "tool":
        return False
    earlier = [call for message in messages[:at] for call in message.get("tool_calls", ())]
    return messages[at].get("name") in [call["function"]["name"] for call in earlier]
