"""Rows of training data: the schemas of rows, and the errors of rows that fit none.

    chat               {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    prompt_completion  {"prompt": TEXT_OR_MESSAGES, "completion": TEXT_OR_MESSAGES}
    preference         {"prompt": TEXT_OR_MESSAGES, "chosen": TEXT_OR_MESSAGES, "rejected": TEXT_OR_MESSAGES}
    prompt             {"prompt": TEXT_OR_MESSAGES, ...}      other fields are for the reward, for example "answer"

A text is one message: of the user in a prompt, of the assistant elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypedDict, get_args

from tinkerflow.backend.core.errors import UserError

Schema = Literal["chat", "prompt_completion", "preference", "prompt"]
ROLES = ("system", "user", "assistant", "tool")
_FIELDS: Mapping[Schema, tuple[str, ...]] = {
    "chat": ("messages",),
    "preference": ("prompt", "chosen", "rejected"),
    "prompt_completion": ("prompt", "completion"),
    "prompt": ("prompt",),
}
_SHOWN = 80  # characters of a wrong value that an error shows


class Message(TypedDict):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: str


class RowError(UserError):
    """A row fits no schema, or not the given one; the message names the field, the value and the rule."""

    def __init__(self, name: str, value: object, rule: str) -> None:
        """`name`: the field, as in messages[2].content."""
        shown = repr(value)
        super().__init__(f"{name}: {shown[:_SHOWN] + '...' if len(shown) > _SHOWN else shown}: {rule}")


@dataclass(frozen=True)
class Row:
    """A row of any schema: a conversation, and how it continues.

    prompt: never trained on. chosen: the continuation, whose assistant messages are learnt; empty when the model
    answers. rejected: the worse continuation of a preference. extra: all other fields of the row.
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...] = ()
    rejected: tuple[Message, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The row as plain values, for `from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Row:
        """The row that `to_json` wrote."""
        return Row(tuple(value["prompt"]), tuple(value["chosen"]), tuple(value["rejected"]), value["extra"])


def guess_schema(raw: object) -> Schema:
    """The schema whose fields a row has; RowError when there is none."""
    names = raw.keys() if isinstance(raw, dict) else ()
    for schema, fields in _FIELDS.items():
        if set(fields) <= set(names):
            return schema
    known = "; ".join(f"{schema}: {', '.join(fields)}" for schema, fields in _FIELDS.items())
    raise RowError("row", sorted(names) if names else raw, f"must be an object with the fields of a schema ({known})")


def parse_row(raw: object, schema: Schema, *, forbidden: Sequence[str] = ()) -> Row:
    """Check a row and return its content. Raises RowError when the row does not fit the schema.

    forbidden: strings that no text may contain: the tokenizer's special tokens, with which data could end a turn and
    speak in another role.
    """
    assert schema in get_args(Schema), schema
    if not isinstance(raw, dict):
        raise RowError("row", raw, f"must be an object with the fields {', '.join(_FIELDS[schema])}")
    for name in _FIELDS[schema]:
        if name not in raw:
            raise RowError(name, None, f"is missing; a {schema} row has {', '.join(_FIELDS[schema])}")
    extra = {name: value for name, value in raw.items() if name not in _FIELDS[schema]}
    if schema == "chat":
        prompt, chosen = _split(_messages("messages", raw["messages"], "user", forbidden))
        return Row(prompt, chosen, extra=extra)
    prompt = _messages("prompt", raw["prompt"], "user", forbidden)
    match schema:
        case "prompt":
            return Row(prompt, extra=extra)
        case "prompt_completion":
            return Row(prompt, _answer("completion", raw["completion"], forbidden), extra=extra)
        case "preference":
            chosen = _answer("chosen", raw["chosen"], forbidden)
            rejected = _answer("rejected", raw["rejected"], forbidden)
            if chosen == rejected:
                raise RowError("rejected", raw["rejected"], "must differ from chosen")
            return Row(prompt, chosen, rejected, extra)


def _messages(name: str, value: object, role: str, forbidden: Sequence[str]) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message(role=role, content=_text(name, value, forbidden)),)
    if not isinstance(value, Sequence) or not value:
        raise RowError(name, value, "must be a text or a list of messages, not empty")
    return tuple(_message(f"{name}[{i}]", message, forbidden) for i, message in enumerate(value))


def _message(name: str, value: object, forbidden: Sequence[str]) -> Message:
    if not isinstance(value, dict):
        raise RowError(name, value, "must be an object with role and content")
    if value.get("role") not in ROLES:
        raise RowError(f"{name}.role", value.get("role"), f"must be one of {', '.join(ROLES)}")
    return Message(role=value["role"], content=_text(f"{name}.content", value.get("content"), forbidden))


def _text(name: str, value: object, forbidden: Sequence[str]) -> str:
    if not isinstance(value, str) or not value.strip():
        raise RowError(name, value, "must be a text that is not blank")
    for token in forbidden:
        if token in value:
            raise RowError(name, value, f"must not hold {token!r}, a special token of the tokenizer")
    return value


def _answer(name: str, value: object, forbidden: Sequence[str]) -> tuple[Message, ...]:
    messages = _messages(name, value, "assistant", forbidden)
    if messages[0]["role"] != "assistant":
        raise RowError(f"{name}[0].role", messages[0]["role"], "must be assistant: it answers the prompt")
    return messages


def _split(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The messages before the first assistant message, and those from it on."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
    if first is None:
        raise RowError(
            "messages", [message["role"] for message in messages], "must hold an assistant message to learn from"
        )
    if first == 0:
        raise RowError("messages[0].role", "assistant", "must be another one: the assistant answers somebody")
    return messages[:first], messages[first:]
