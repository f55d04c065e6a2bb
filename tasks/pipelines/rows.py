"""Rows of training data: the forms that a row may have, its content, and the errors of rejected rows.

    chat               messages: [{role, content, reasoning_content, tool_calls, tool_call_id, name, weight}], tools
    sharegpt           conversations: [{from, value}], system, tools
    alpaca             instruction, input, output, system, history
    preference         chosen, rejected, prompt, tools; without a prompt the answers are conversations that begin alike
    prompt_completion  prompt, completion, tools
    prompt             prompt, tools; other fields are for the reward
    text               text

A prompt or an answer is a text (one message of the user or the assistant) or a list of messages. A field that is null
counts as absent. Every other field is either used, or the row is rejected with the field's name.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, get_args

from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.tasks.pipelines.row_errors import PLACEHOLDER, RowError, likely_columns, shorten

Schema = Literal["chat", "prompt_completion", "preference", "prompt", "text"]
Form = Literal["chat", "sharegpt", "alpaca", "preference", "prompt_completion", "prompt", "text"]
Json: TypeAlias = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH = 64
_NAMED = 400  # characters of field names in an error
_REQUIRED: Mapping[Form, tuple[str, ...]] = {
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "preference": ("chosen", "rejected"),
    "prompt_completion": ("prompt", "completion"),
    "prompt": ("prompt",),
    "text": ("text",),
}
_OPTIONAL: Mapping[Form, tuple[str, ...]] = {
    "chat": ("tools",),
    "sharegpt": ("system", "tools"),
    "alpaca": ("input", "system", "history"),
    "preference": ("prompt", "tools"),
    "prompt_completion": ("tools",),
    "prompt": ("tools",),
    "text": (),
}
_IN_WORDS: Mapping[Form, str] = {
    "chat": "a chat",
    "sharegpt": "a ShareGPT chat",
    "alpaca": "an Alpaca row",
    "preference": "a preference",
    "prompt_completion": "a question with its answer",
    "prompt": "a prompt",
    "text": "plain text",
}
_EXAMPLES: tuple[Form, ...] = ("prompt_completion", "preference", "prompt", "text")  # their fields contain plain texts
_WRITTEN_AS_JSON = ("messages", "conversations", "tools", "history")  # files without lists store them as JSON texts
_REASONING = ("reasoning_content", "reasoning", "thinking")
_SPEAKERS = {
    **{"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"model": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"},
    **{"function_call": "assistant", "observation": "tool", "tool": "tool", "function": "tool"},
}


class Message(TypedDict):
    """One message of a conversation in the form that chat templates take. Arguments of tool calls are objects."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Json]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    weight: NotRequired[int]


@dataclass(frozen=True)
class Row:
    """A row of any schema: a conversation and its continuation, or a text.

    prompt: messages that are never trained on. chosen: the continuation, whose assistant messages are trained on; empty
    if the model answers. rejected: the worse continuation of a preference. tools: the tools that may be called, in
    OpenAI's form. text: a plain text, trained on as a whole. extra: all other fields of the row.
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...] = ()
    rejected: tuple[Message, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Json, ...] = ()
    text: str = ""

    def to_json(self) -> Json:
        """The row as plain values, for `from_json`."""
        optional = {"tools": list(self.tools), "text": self.text}
        return {
            "prompt": list(self.prompt),
            "chosen": list(self.chosen),
            "rejected": list(self.rejected),
            "extra": dict(self.extra),
            **{name: value for name, value in optional.items() if value},
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Row:
        """Restore a row from the values that `to_json` returned."""
        return Row(
            tuple(value["prompt"]),
            tuple(value["chosen"]),
            tuple(value["rejected"]),
            value["extra"],
            tuple(value.get("tools", ())),
            value.get("text", ""),
        )


@dataclass(frozen=True)
class RowReader:
    """Parses rows of one form.

    form: the rows' form. columns: field of the form -> column of the data, if they differ. ignore: paths of fields to
    leave out, such as `id` or `messages.refusal`; `*` is every field that is not in the form. extra: the other fields
    that are used; None = all of them. user: the pipeline, for errors. forms: if the form is unknown, the forms that the
    pipeline accepts, for errors. parameter: data or held_out, for errors.
    """

    form: Form
    columns: Mapping[str, str] = field(default_factory=dict)
    ignore: frozenset[str] = frozenset()
    extra: frozenset[str] | None = frozenset()
    user: str = "this form"
    forms: tuple[Form, ...] = ()
    parameter: str = "data"

    @property
    def schema(self) -> Schema:
        """The schema of the form's rows."""
        same: dict[Form, Schema] = {"sharegpt": "chat", "alpaca": "prompt_completion"}
        return same.get(self.form) or self.form  # type: ignore[return-value]

    def parse(self, raw: object) -> Row:
        """Parse a row. RowError: the row does not match the form, or contains an unused field."""
        try:
            values = self._fields(raw)
        except RecursionError:
            raise RowError("row", "...", f"must not be nested more than {MAX_DEPTH} levels deep") from None
        missing = [name for name in _REQUIRED[self.form] if values.get(name) is None]
        if missing:
            raise self._incomplete(missing, values)
        known = fields_of(self.form)
        extra = {name: value for name, value in values.items() if name not in known}
        if self.extra is not None:
            unused = {name: value for name, value in extra.items() if name not in self.extra and value is not None}
            if unused:
                raise self.unused(unused)
            extra = {name: value for name, value in extra.items() if value is not None}
        tools = tuple(_tools(values.get("tools")))
        prompt, chosen, rejected = self._conversation(values)
        for answer in (chosen, rejected):
            _check_links((*prompt, *answer))
        text = _text("text", values["text"]) if self.form == "text" else ""
        return Row(prompt, chosen, rejected, extra, tools, text)

    def unused(self, fields: Mapping[str, object]) -> RowError:
        """The error for unused fields of a row. fields: name -> value. All such errors have the same `problem`."""
        if len(fields) > 1:
            error = RowError(", ".join(fields), None, f"are not used by {self.user}", ignore=list(fields))
        else:
            ((name, value),) = fields.items()
            near = did_you_mean(name, (*fields_of(self.form), *(self.extra or ())))
            error = RowError(name, value, f"is not used by {self.user}{near}", ignore=[name])
        error.problem = "not used"
        return error

    def _incomplete(self, missing: Sequence[str], values: Json) -> RowError:
        """The error for a row without required fields, with an example of columns for them."""
        forms = self.forms or (self.form,)
        has = [name for name, value in values.items() if value is not None]
        wanted = dict.fromkeys(name for form in forms for name in _REQUIRED[form])
        for name in has:
            if name not in wanted and (near := did_you_mean(name, [name for name in wanted if name not in has])):
                return RowError(name, None, f"is not a field of a row{near}")
        columns, ignore = {}, []
        example = next((form for form in forms if form in _EXAMPLES), None)
        if example and not self.columns:
            free = [name for name in has if name not in fields_of(example)]
            fields = [name for name in _REQUIRED[example] if name not in has]
            if len(free) >= len(fields):
                columns = likely_columns(fields, free)
                if self.extra is not None and PLACEHOLDER not in columns.values():
                    ignore = [name for name in free if name not in columns.values()]
        needed = "; ".join(f"{_IN_WORDS[form]} has {', '.join(_REQUIRED[form])}" for form in forms)
        if not self.forms:
            rule, row = f"{'is' if len(missing) == 1 else 'are'} missing; {needed}", f", and this row has {_names(has)}"
            return RowError(", ".join(missing), None, rule, row=row, columns=columns, ignore=ignore)
        rule = f"no form has these fields: {needed}"
        error = RowError(_names(has), None, rule, columns=columns, ignore=ignore)
        error.problem = rule
        return error

    def _fields(self, raw: object) -> Json:
        """The row under the form's names, without ignored fields. Every value is representable as JSON."""
        if not isinstance(raw, dict) or not all(isinstance(name, str) for name in raw):
            raise RowError("row", raw, f"must be an object with the fields {', '.join(_REQUIRED[self.form])}")
        values = dict(raw)
        for name, column in self.columns.items():
            if column not in raw:
                where, near = f"{self.parameter}.columns.{name}", did_you_mean(column, raw)
                row = f", and this row has {_names(raw)}{near}"
                raise RowError(where, column, "the column is missing or empty", row=row)
            if name in raw and name not in self.columns.values():
                rule = f"is in the row, but {self.parameter}.columns.{name} is {column!r}"
                raise RowError(name, raw[name], rule, ignore=[name])
            values.pop(column, None)
        values |= {name: raw[column] for name, column in self.columns.items()}
        for name in _WRITTEN_AS_JSON:
            if name in fields_of(self.form) and isinstance(values.get(name), str):
                values[name] = _from_json(name, values[name])
        if "*" in self.ignore:
            known = {*fields_of(self.form), *(self.extra or ())}
            values = {name: value for name, value in values.items() if name in known}
        for name in values:
            _plain("row (a name in it)", name)
        return {name: _plain(name, value) for name, value in _without(values, self.ignore, "").items()}

    def _conversation(self, values: Json) -> tuple[tuple[Message, ...], ...]:
        """The prompt, the continuation, and the rejected continuation."""
        match self.form:
            case "chat":
                return *_split(_messages("messages", values["messages"], "user")), ()
            case "sharegpt":
                system = [] if values.get("system") in (None, "") else [{"from": "system", "value": values["system"]}]
                turns = _list("conversations", values["conversations"])
                named = [(f"conversations[{i}]", turn) for i, turn in enumerate(turns)]
                messages = [_turn(name, turn) for name, turn in [*(("system", one) for one in system), *named]]
                return *_split(tuple(messages)), ()
            case "alpaca":
                return _alpaca(values), _answer("output", values["output"]), ()
            case "prompt_completion":
                return _messages("prompt", values["prompt"], "user"), _answer("completion", values["completion"]), ()
            case "preference":
                return _preference(values)
            case "prompt":
                return _messages("prompt", values["prompt"], "user"), (), ()
            case "text":
                return (), (), ()


def guess_form(raw: object, preferred: Iterable[Form] = ()) -> Form:
    """The form whose required fields a row contains. RowError: there is none.

    preferred: forms that win if the row contains the fields of several forms.
    """
    names = [name for name, value in raw.items() if value is not None] if isinstance(raw, dict) else []
    if forms := [form for form, fields in _REQUIRED.items() if set(fields) <= set(names)]:
        return next((form for form in forms if form in preferred), forms[0])
    known = "; ".join(f"{form}: {', '.join(fields)}" for form, fields in _REQUIRED.items())
    rule = f"must be an object with the fields of a form ({known}); data.columns maps other names to them"
    raise RowError("row", sorted(map(str, names)) if names else raw, rule)


def forms_of(schemas: Sequence[Schema]) -> tuple[Form, ...]:
    """The forms of some schemas' rows, in the order of the schemas."""
    return tuple(form for schema in schemas for form in get_args(Form) if RowReader(form).schema == schema)


def fields_of(form: Form) -> tuple[str, ...]:
    """The fields of a form, required ones first."""
    return (*_REQUIRED[form], *_OPTIONAL[form])


ALL_FIELDS = tuple(sorted({name for form in get_args(Form) for name in fields_of(form)}))


def strict_json(text: str) -> Any:
    """The value of a JSON text. ValueError: invalid JSON, NaN, infinity, or an object that contains a name twice."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"the name {names.most_common(1)[0][0]!r} appears twice")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def path_pattern(path: Iterable[str | int]) -> str:
    """A path in a row as a pattern for `data.ignore`: without list indices, and with `*` for names of properties."""
    parts: list[str] = []
    for part in path:
        if isinstance(part, str):
            parts.append("*" if parts and parts[-1] in ("properties", "$defs", "arguments") else part)
    return ".".join(parts)


def _names(names: Iterable[object]) -> str:
    return shorten(", ".join(map(str, names)), _NAMED) or "no fields"


def _known(name: str, value: Json, known: Sequence[str]) -> Json:
    """The fields of an object that are not null. RowError: a field is unknown."""
    unknown = [key for key, held in value.items() if key not in known and held is not None]
    if unknown:
        path = "".join(part.partition("]")[2] if "]" in part else part for part in name.split("["))
        ignore, first = [f"{path}.{key}" for key in unknown], unknown[0]
        if len(unknown) > 1:
            raise RowError(name, unknown, "has fields that are not used", ignore=ignore)
        raise RowError(f"{name}.{first}", value[first], f"is not used{did_you_mean(first, known)}", ignore=ignore)
    return {key: held for key, held in value.items() if held is not None}


def _without(value: Any, ignore: frozenset[str], path: str) -> Any:
    """The value without the fields whose paths are ignored."""
    if not ignore:
        return value
    if isinstance(value, dict):
        kept = {}
        for key, held in value.items():
            below = path_pattern([*path.split("."), key] if path else [str(key)])
            if below not in ignore:
                kept[key] = _without(held, ignore, below)
        return kept
    return [_without(held, ignore, path) for held in value] if isinstance(value, list) else value


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """The value with dates as texts. RowError: JSON cannot represent it exactly."""
    if depth > MAX_DEPTH:
        raise RowError(name, "...", f"must not be nested more than {MAX_DEPTH} levels deep")
    match value:
        case None | bool():
            return value
        case str():
            if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
                raise RowError(name, value, "must be valid Unicode: it contains half of a surrogate pair")
            return value
        case int() if -(2**63) <= value < 2**64:
            return value
        case float() if math.isfinite(value):
            return value
        case int() | float():
            raise RowError(name, value, "must be a finite number of at most 64 bits")
        case dict():
            for key in value:
                if not isinstance(key, str):
                    raise RowError(f"{name} (a name in it)", key, "must be text")
                _plain(f"{name} (a name in it)", key)
            return {key: _plain(f"{name}.{key}", held, depth + 1) for key, held in value.items()}
        case list() | tuple():
            return [_plain(f"{name}[{i}]", held, depth + 1) for i, held in enumerate(value)]
        case datetime() | date() | time():
            return value.isoformat()
    raise RowError(name, value, f"must be text, a number, a list or an object, not {type(value).__name__}")


def _from_json(name: str, text: str) -> Any:
    try:
        return _plain(name, strict_json(text))
    except (ValueError, RecursionError) as error:
        raise RowError(name, text, f"must be a list, or a list as JSON ({error})") from None


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise RowError(name, value, "must be a non-empty list")
    return value


def _object(name: str, value: object, fields: str) -> Json:
    if not isinstance(value, dict):
        raise RowError(name, value, f"must be an object with {fields}")
    return value


def _text(name: str, value: object, *, blank: bool = False) -> str:
    if not isinstance(value, str) or not (blank or value.strip()):
        raise RowError(name, value, "must be text" if blank else "must be text that is not blank")
    return value


def _messages(name: str, value: object, role: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message(role=role, content=_text(name, value)),)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise RowError(name, value, "must be text or a list of messages, and not empty")
    return tuple(_message(f"{name}[{i}]", message) for i, message in enumerate(value))


def _message(name: str, raw: object) -> Message:
    value = _object(name, raw, "role and content")
    if value.get("from") is not None:
        return _turn(name, value)
    fields = ("role", "content", "tool_calls", "tool_call_id", "name", "weight", *_REASONING)
    given = _known(name, value, fields)
    role = given.get("role")
    if role not in ROLES:
        raise RowError(f"{name}.role", role, f"must be one of {', '.join(ROLES)}")
    for key in ("tool_calls", "weight", *_REASONING):
        if key in given and role != "assistant":
            raise RowError(f"{name}.{key}", given[key], "is only for messages of the assistant")
    if "tool_call_id" in given and role != "tool":
        raise RowError(f"{name}.tool_call_id", given["tool_call_id"], "is only for messages of the role tool")
    reasoning = [_text(f"{name}.{key}", given[key], blank=True) for key in _REASONING if key in given]
    if len(set(reasoning)) > 1:
        raise RowError(f"{name}.reasoning", reasoning, "must be given once")
    calls = _calls(f"{name}.tool_calls", given.get("tool_calls", []))
    blank = role == "tool" or bool(calls) or any(reasoning)
    message = Message(role=role, content=_content(f"{name}.content", given.get("content"), blank=blank))
    if any(reasoning):
        message["reasoning_content"] = reasoning[0]
    if calls:
        message["tool_calls"] = calls
    if "tool_call_id" in given:
        message["tool_call_id"] = _text(f"{name}.tool_call_id", given["tool_call_id"])
    if "name" in given:
        message["name"] = _text(f"{name}.name", given["name"])
    if "weight" in given:
        if given["weight"] not in (0, 1) or isinstance(given["weight"], bool):
            raise RowError(f"{name}.weight", given["weight"], "must be 0 (only read) or 1 (trained on)")
        if given["weight"] == 0:
            message["weight"] = 0
    return message


def _content(name: str, value: object, *, blank: bool) -> str:
    """A message's content as one text. The parts of a list are joined by line breaks."""
    if value is None and blank:
        return ""
    if isinstance(value, list):
        value = "\n".join(_part(f"{name}[{i}]", part) for i, part in enumerate(value))
    return _text(name, value, blank=blank)


def _part(name: str, raw: object) -> str:
    part = _object(name, raw, "type and text")
    if part.get("type") != "text":
        raise RowError(f"{name}.type", part.get("type"), "must be 'text': pipelines do not train on images or audio")
    return _text(f"{name}.text", _known(name, part, ("type", "text")).get("text"), blank=True)


def _calls(name: str, value: object) -> list[Json]:
    """Tool calls in the form that templates take.

    A call may be {id, type, function: {name, arguments}} or {name, arguments}.
    """
    if not isinstance(value, list):
        raise RowError(name, value, "must be a list of tool calls")
    calls = []
    for i, raw in enumerate(value):
        at = f"{name}[{i}]"
        call = _object(at, raw, "type and function")
        nested = call.get("function") is not None
        given = _known(at, call, ("id", "type", *(("function",) if nested else ("name", "arguments"))))
        if given.get("type", "function") != "function":
            raise RowError(f"{at}.type", given["type"], "must be 'function'")
        if nested:
            at = f"{at}.function"
            function = _known(at, _object(at, given["function"], "name and arguments"), ("name", "arguments"))
        else:
            function = {key: given[key] for key in ("name", "arguments") if key in given}
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _from_json(f"{at}.arguments", arguments) if arguments.strip() else {}
        if not isinstance(arguments, dict):
            raise RowError(f"{at}.arguments", arguments, "must be an object, or an object as JSON")
        named = {"name": _text(f"{at}.name", function.get("name")), "arguments": _plain(f"{at}.arguments", arguments)}
        id_ = {"id": _text(f"{name}[{i}].id", given["id"])} if "id" in given else {}
        calls.append({**id_, "type": "function", "function": named})
    return calls


def _tools(value: object) -> list[Json]:
    """Tools in OpenAI's form. A tool may also be given as only its function."""
    if value is None or value == []:
        return []
    tools = []
    for i, raw in enumerate(_list("tools", value)):
        at = f"tools[{i}]"
        tool = _object(at, raw, "type and function")
        if tool.get("function") is not None:
            given = _known(at, tool, ("type", "function"))
            if given.get("type", "function") != "function":
                raise RowError(f"{at}.type", given["type"], "must be 'function'")
            at, tool = f"{at}.function", _object(f"{at}.function", given["function"], "name and parameters")
        elif tool.get("type") == "function":
            tool = {key: held for key, held in tool.items() if key != "type"}
        _text(f"{at}.name", tool.get("name"))
        tools.append({"type": "function", "function": {key: held for key, held in tool.items() if held is not None}})
    return tools


def _check_links(messages: Sequence[Message]) -> None:
    """Raise RowError for a tool result without an earlier tool call of its id, if calls have ids."""
    ids: set[str] = set()
    for i, message in enumerate(messages):
        ids |= {call["id"] for call in message.get("tool_calls", []) if "id" in call}
        if "tool_call_id" in message and ids and message["tool_call_id"] not in ids:
            rule = f"must be the id of an earlier tool call ({', '.join(sorted(ids))})"
            raise RowError(f"messages[{i}].tool_call_id", message["tool_call_id"], rule)


def _answer(name: str, value: object) -> tuple[Message, ...]:
    messages = _messages(name, value, "assistant")
    if messages[0]["role"] != "assistant":
        raise RowError(f"{name}[0].role", messages[0]["role"], "must be assistant: it answers the prompt")
    return messages


def _split(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The messages before the first assistant message, and the others."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
    if first is None:
        roles = [message["role"] for message in messages]
        raise RowError("messages", roles, "must contain an assistant message to learn from")
    if first == 0:
        raise RowError("messages[0].role", "assistant", "must be another role: the assistant answers a message")
    return messages[:first], messages[first:]


def _turn(name: str, raw: object) -> Message:
    """A message in ShareGPT's form. The value of a function_call is a call or a list of calls as JSON."""
    value = _object(name, raw, "from and value")
    if value.get("from") is None:
        return _message(name, value)
    given = _known(name, value, ("from", "value", "weight"))
    role = _SPEAKERS.get(str(given["from"]))
    if role is None:
        raise RowError(f"{name}.from", given["from"], f"must be one of {', '.join(_SPEAKERS)}")
    weight = {"weight": given["weight"]} if "weight" in given else {}
    if given["from"] == "function_call":
        calls = _from_json(f"{name}.value", _text(f"{name}.value", given.get("value")))
        return _message(name, {"role": role, "tool_calls": calls if isinstance(calls, list) else [calls], **weight})
    return _message(name, {"role": role, "content": given.get("value"), **weight})


def _alpaca(values: Json) -> tuple[Message, ...]:
    """The prompt of an Alpaca row: system, history, and the instruction with its input."""
    messages = []
    if values.get("system") not in (None, ""):
        messages.append(Message(role="system", content=_text("system", values["system"])))
    history = values.get("history")
    for i, pair in enumerate([] if history in (None, []) else _list("history", history)):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"history[{i}]", pair, "must be a pair: an instruction and its output")
        messages.append(Message(role="user", content=_text(f"history[{i}][0]", pair[0])))
        messages.append(Message(role="assistant", content=_text(f"history[{i}][1]", pair[1])))
    parts = [_text("instruction", values["instruction"])]
    if values.get("input") not in (None, ""):
        parts.append(_text("input", values["input"]))
    return (*messages, Message(role="user", content="\n\n".join(parts)))


def _preference(values: Json) -> tuple[tuple[Message, ...], ...]:
    """Prompt, chosen and rejected messages. A prompt that an answer repeats is cut off the answer."""
    chosen = _messages("chosen", values["chosen"], "assistant")
    rejected = _messages("rejected", values["rejected"], "assistant")
    if values.get("prompt") is None:
        pairs = enumerate(zip(chosen, rejected, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
        if not same:
            raise RowError("prompt", None, "is missing, and chosen and rejected do not begin with the same messages")
        prompt = chosen[:same]
        chosen, rejected = chosen[same:], rejected[same:]
    else:
        prompt = _messages("prompt", values["prompt"], "user")
        chosen, rejected = (_behind(prompt, answer) for answer in (chosen, rejected))
    if chosen == rejected:
        raise RowError("rejected", values["rejected"], "must differ from chosen")
    return prompt, _answer("chosen", list(chosen)), _answer("rejected", list(rejected))


def _behind(prompt: tuple[Message, ...], answer: tuple[Message, ...]) -> tuple[Message, ...]:
    repeats = len(answer) > len(prompt) and answer[: len(prompt)] == prompt
    return answer[len(prompt) :] if repeats else answer
