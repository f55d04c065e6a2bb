"""The text of validation errors: the first error of a body, with its field, its value and the rule."""

from __future__ import annotations

import re
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tinkerflow.backend.core.errors import UserError, broken

# Names that pydantic gives to members of a union. In a path, they are not names of fields.
_UNION_MEMBER = re.compile(r"(str|int|float|bool|dict|list|tuple|bytes|none|any|is-instance)|.*\[.*\]|[A-Z]\w*")
_JSON_NAMES = {"True": "true", "False": "false"}
_RULES = {
    "model_type": "a JSON object",
    "model_attributes_type": "a JSON object",
    "dict_type": "a JSON object",
    "list_type": "a list",
    "tuple_type": "a list",
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "finite_number": "a finite number",
    "string_too_short": "a non-empty string",
}
# The errors of a member of a union for a value of another kind.
_OTHER_KINDS = {
    "model_type", "model_attributes_type", "dict_type", "list_type", "tuple_type", "string_type", "int_type",
    "literal_error", "bool_type",
}  # fmt: skip


def request_error(error: ValidationError, model: type[BaseModel], prefix: str = "") -> UserError:
    """The first error of a body as a sentence: `field is value: must be rule`.

    A value that fits no member of a union has an error for each member. Their rules are joined by "or", unless the
    value is of one member's kind. In that case, the error inside the value is used.
    """
    details = _nearest_member(model, error.errors(include_url=False))
    first, located = details[0], [_locate(model, detail["loc"]) for detail in details]
    name, field = located[0]
    path = prefix + name.removeprefix(".") or "the request body"
    if first["type"] == "json_invalid":
        return UserError(f"the request body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if first["type"] == "extra_forbidden":
        return UserError(f"{path} is not supported by this endpoint: must be left out")
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):  # the union's members differ in this field
        context = first["ctx"]
        path, tags = f"{path}.{context['discriminator'].strip(chr(39))}", context.get("expected_tags", "")
        return broken(path, context.get("tag"), " or ".join(tags.rsplit(", ", 1)) or "given")
    same_field = [detail for detail, (other, _) in zip(details, located, strict=True) if other == name]
    rule = " or ".join(dict.fromkeys(_rule(detail, field) for detail in same_field))
    if first["type"] == "missing":
        return UserError(f"{path} is missing: must be {rule}")
    value = first["input"]
    if first["type"] == "value_error" and len(reason := first["ctx"]["error"].args) > 1:
        value = reason[1]  # a validator may give a shorter value to show than the one that came
    return broken(path, value, rule)


def parameter_error(details: ErrorDetails) -> UserError:
    """The error of a parameter in a URL as a sentence. details: from pydantic, located in the query or the path."""
    name = str(details["loc"][-1])
    if details["type"] == "missing":
        return UserError(f"{name} is missing: must be given")
    return broken(name, details["input"], _rule(details, None))


def _nearest_member(model: type[BaseModel], details: list[ErrorDetails]) -> list[ErrorDetails]:
    """The errors, ordered so that those of the union member nearest to the first value come first.

    This is the member with the fewest errors inside the value. Among equals, it is the one whose error comes last.
    """
    if details[0]["type"] not in _OTHER_KINDS:
        return details
    name, _ = _locate(model, details[0]["loc"])
    inside: dict[object, list[ErrorDetails]] = {}
    for detail in details:
        path, _ = _locate(model, detail["loc"])
        if path.startswith((f"{name}.", f"{name}[")):
            inside.setdefault(detail["loc"][: len(details[0]["loc"])], []).append(detail)
    if not inside:
        return details
    fewest = min(map(len, inside.values()))
    nearest = [member for member in inside.values() if len(member) == fewest]
    last = max(_locate(model, member[0]["loc"])[0] for member in nearest)
    return [member[0] for member in nearest if _locate(model, member[0]["loc"])[0] == last] + details


def _locate(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[str, FieldInfo | None]:
    """The path of an error in clients' notation, such as `.messages[0].content`, and the field if the path ends in one.

    pydantic's location also contains the members of unions, which clients do not know.
    """
    path, models, field = "", [model], None
    in_object = False
    for part in location:
        if isinstance(part, int):
            path, field = f"{path}[{part}]", None
            continue
        known = next((f for m in models for name, f in m.model_fields.items() if part in (f.alias, name)), None)
        if known is not None:
            path, field, in_object = f"{path}.{part}", known, dict in _kinds(known.annotation)
            models = [
                kind for kind in _kinds(known.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)
            ]
        elif in_object and part != "[key]" and not _UNION_MEMBER.fullmatch(part):
            path, field = f"{path}[{part!r}]", None
        elif part != "[key]" and not _UNION_MEMBER.fullmatch(part):
            path, field = f"{path}.{part}", None
    return path, field


def _kinds(annotation: Any) -> list[Any]:
    """The types in an annotation, including those inside unions and lists; only `dict` for an object."""
    origin = get_origin(annotation)
    if origin is dict:
        return [dict]
    members = list(get_args(annotation)) if origin in (list, tuple) else _members(annotation)
    return members if members == [annotation] else [kind for member in members for kind in _kinds(member)]


def _rule(detail: ErrorDetails, field: FieldInfo | None) -> str:
    """The rule that an error reports, as the words after "must be"."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"].args[0])
    if kind == "string_pattern_mismatch":
        return f"a string that matches {context['pattern']}"
    if kind == "string_too_long":
        return f"at most {context['max_length']} characters long"
    if kind in ("too_long", "too_short"):
        most, count = (
            ("at most", context.get("max_length")) if kind == "too_long" else ("at least", context["min_length"])
        )
        return f"a list of {most} {count}"
    if kind.startswith("datetime_"):
        return "a time, such as 2026-01-31T12:00:00Z"
    if kind.startswith("date_"):
        return "a date, such as 2026-01-31"
    if kind == "timezone_aware":
        return "a time with a time zone, such as 2026-01-31T12:00:00Z"
    rule = None if field is None else _declared_rule(field)
    if rule is not None or kind == "missing":
        return rule or "given"
    text = detail["msg"].removeprefix("Input should be ").replace(" valid ", " ")
    return _RULES.get(kind, _JSON_NAMES.get(text, text))


def _declared_rule(field: FieldInfo) -> str | None:
    """The rule of a field for one number, text or boolean, from its declaration; None for other fields."""
    kinds = [kind for kind in _members(field.annotation) if kind is not NoneType]
    low = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
    high = next((bound.le for bound in field.metadata if isinstance(bound, Le)), None)
    above = next((bound.gt for bound in field.metadata if isinstance(bound, Gt)), None)
    if len(kinds) != 1:
        return None
    if kinds[0] is bool:
        return "true or false"
    if kinds[0] is str:
        return "a non-empty string" if any(isinstance(bound, MinLen) for bound in field.metadata) else "a string"
    if kinds[0] is int:
        return (
            f"a whole number from {low} to {high}" if None not in (low, high) else _number("a whole number", low, high)
        )
    return _number("a finite number", low, high, above) if kinds[0] is float else None


def _members(annotation: Any) -> list[Any]:
    """The members of a union, or the annotation itself."""
    origin = get_origin(annotation)
    if origin in (Annotated, Union, UnionType):
        members = get_args(annotation)[:1] if origin is Annotated else get_args(annotation)
        return [kind for member in members for kind in _members(member)]
    return [annotation]


def _number(rule: str, low: Any, high: Any, above: Any = None) -> str:
    bounds = ((">", above), (">=", low), ("<=", high))
    limits = [f"{sign} {limit:g}" for sign, limit in bounds if limit is not None]
    return " ".join([rule, " and ".join(limits)]).strip()
