"""Rewrites a JSON schema so that llguidance enforces the whole schema. An error names any unsupported keyword.

llguidance compiles most of JSON Schema (draft 2020-12). Its gaps would produce answers that do not validate:

- It reads numbers as doubles and compiles some bounds wrongly. Here, bounds become inclusive and move inward to numbers
that llguidance reads exactly. Other numbers in `const` or `enum` are rejected.
- It compiles patterns with Rust's syntax, which differs from ECMA-262 (`_ecma_pattern`).
- The keyword `x-guidance` turns its checks off, and it rejects an unknown `format`, which is only an annotation.
  Therefore all keywords are removed except those that restrict values. The text of annotations is never interpreted.
- It does not compare alternatives of `oneOf` that are `$ref`s. Here they are inlined.

The target of each `$ref` is rewritten once, and moves to `$defs` of the whole schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from graphlib import CycleError, TopologicalSorter
from typing import Any, NoReturn
from urllib.parse import unquote

MAX_DEPTH = 200  # keywords and names on the way to a schema
MAX_SCHEMAS = 20_000  # of a rewritten schema; inlined alternatives can multiply them
MAX_INLINED = 2**18  # characters of all inlined alternatives, because a short one may hold a long `const`
EXACT = 2**53  # doubles hold every integer up to here
_DIGITS = 15  # every parser of doubles reads decimals with at most this many digits exactly
_LONGEST = 2**31  # no answer that fits a context is longer
_REMAINDERS = 2**32  # llguidance computes remainders for multipleOf in unsigned integers of 32 bits, which wrap
_TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07", "2019-09")
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # of names to schemas
_IN_PLACE = ("allOf", "anyOf", "oneOf")  # lists of schemas for the same value
_LISTS = {*_IN_PLACE, "prefixItems"}  # of schemas
_SINGLE = {"items", "additionalItems", "additionalProperties"}
# Unsupported keywords that restrict values, each with the values that restrict nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "if": (),
    "contains": (),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
_PART = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|\[\^|.", re.DOTALL)  # of a pattern
# A control character without a short escape in JSON. llguidance drops such a character from a text, or mistakes a class
# with all of them for a class with quotes and backslashes.
_CONTROLS = r"[\x00-\x07\x0b\x0e-\x1f\x7f]"
_CONTROL_PART = re.compile(_CONTROLS + r"|\\(?:[v0c]|x[01].|x7[fF]|u00[01].|u007[fF])")
_NO_CONTROLS = r"&&[^\x00-\x07\x0b\x0e-\x1f\x7f]]"
_ESCAPES = "bBtnrfv0xucpPk"  # letters that have a meaning after a backslash in ECMA-262
# Character classes: the characters that the class has in all of ECMA-262, Python and Rust, and those that it has in any
# of them.
_SPACE = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}"
_CLASSES = {
    "d": ("0-9", r"\p{Nd}"),
    "w": ("0-9A-Za-z_", r"_\p{L}\p{N}\p{M}\p{Pc}"),
    "s": (_SPACE, _SPACE + r"\x1c-\x1f\x85\u{feff}"),
}


@dataclass(frozen=True)
class ExactSchema:
    """A rewritten schema. expressions: the number of regular expressions in its compilation. inlined: the number of
    characters of its inlined alternatives.
    """

    schema: dict[str, Any]
    expressions: int
    inlined: int


def exact_schema(schema: Mapping[str, Any]) -> ExactSchema:
    """Rewrite a schema. Every answer that its grammar accepts validates against `schema`.

    ValueError: llguidance could not enforce the schema. The error names the keyword, its value and the rule.
    """
    rewriter = _Rewriter(schema)
    return ExactSchema(rewriter.rewrite(), rewriter.expressions, rewriter.inlined)


@dataclass(frozen=True)
class _Place:
    """A schema in the request. root: the resource that its references are relative to. path: for errors."""

    schema: Any
    root: Mapping[str, Any]
    path: str = ""
    depth: int = 0

    def at(self, schema: Any, *names: object) -> _Place:
        """The nested schema at these keys."""
        return _Place(schema, self.root, ".".join(map(str, filter(str, [self.path, *names]))), self.depth + 1)


class _Rewriter:
    """Rewrites one schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """schema: to rewrite."""
        self._schema = schema
        self._resources = {each["$id"]: each for each in _schemas(schema) if isinstance(each.get("$id"), str)}
        self._names: dict[int, str] = {}  # of the targets of references, by identity
        self._pending: list[tuple[str, _Place]] = []
        self._multiples: set[Decimal] = set()
        self._targets: dict[tuple[int, str], tuple[Any, Mapping[str, Any]]] = {}  # by resource and reference
        self._anchors: dict[int, dict[str, Any]] = {}  # by resource
        self._count = 0
        self.expressions = 0
        self.inlined = 0

    def rewrite(self) -> dict[str, Any]:
        """Rewrite the schema, with its referenced definitions."""
        rewritten = self._object(_Place(self._schema, self._schema))
        definitions: dict[str, dict[str, Any] | bool] = {}
        paths: dict[str, str] = {}
        while self._pending:
            name, place = self._pending.pop()
            definitions[name], paths[name] = self._any(place), place.path
        try:
            TopologicalSorter({name: _same_value(schema) for name, schema in definitions.items()}).prepare()
        except CycleError as error:  # no answer would ever be known to be valid
            _fail("$ref", paths[error.args[1][0]], "a reference that does not lead back to itself for the same value")
        if len(self._multiples) > 1 and not _fits_remainders(self._multiples):
            raise ValueError(f"multipleOf has the values {_listed(self._multiples)}: too large together")
        return {**rewritten, "$defs": definitions} if definitions else rewritten

    def _any(self, place: _Place) -> dict[str, Any] | bool:
        if isinstance(place.schema, bool):
            return place.schema
        if not isinstance(place.schema, Mapping):
            _fail(place.path or "the schema", place.schema, "a schema, an object or a boolean")
        return self._object(place)

    def _object(self, place: _Place) -> dict[str, Any]:
        self._count += 1
        if place.depth > MAX_DEPTH or self._count > MAX_SCHEMAS:
            raise ValueError(f"it nests more than {MAX_DEPTH} keywords, or has more than {MAX_SCHEMAS} schemas")
        if isinstance(place.schema.get("$id"), str):
            place = _Place(place.schema, place.schema, place.path, place.depth)
        result: dict[str, Any] = {}
        for key, value in place.schema.items():
            here = place.at(value, key)
            if key == "$ref":
                result[key] = f"#/$defs/{self._definition(self._target(here))}"
            elif key in _LISTS or key in _SINGLE or key in ("properties", "patternProperties"):
                result |= self._nested(key, here, place)
            elif key in _UNSUPPORTED:
                if not any(type(value) is type(no) and value == no for no in _UNSUPPORTED[key]):
                    raise ValueError(f"{here.path} is not supported")
            else:
                result |= self._restriction(key, here)
        self._check_properties(result, place)
        return result | _bounds(place)

    # ------------------------------------------------------------------ schemas inside schemas
    def _nested(self, key: str, here: _Place, place: _Place) -> dict[str, Any]:
        """Rewrite a keyword whose value contains schemas."""
        value, schema = here.schema, place.schema
        if key in ("properties", "patternProperties"):
            _check(isinstance(value, Mapping), here, "an object of schemas")
            if key == "properties":
                return {key: {name: self._any(here.at(each, name)) for name, each in value.items()}}
            self.expressions += len(value)
            return {key: {_ecma_pattern(name): self._any(here.at(each, name)) for name, each in value.items()}}
        old = any(draft in str(place.root.get("$schema")) for draft in _OLD_DRAFTS)
        if key in _LISTS or (key == "items" and isinstance(value, list)):
            _check(isinstance(value, list), here, "a list of schemas")
            if key == "prefixItems" and old:
                return {}
            places = [here.at(each, number) for number, each in enumerate(value)]
            if key == "oneOf":
                places = [self._inlined(each) for each in places]
            return {"prefixItems" if key == "items" else key: [self._any(each) for each in places]}
        if key == "additionalItems":
            return {"items": self._any(here)} if isinstance(schema.get("items"), list) else {}
        return {key: self._any(here)}

    def _inlined(self, place: _Place) -> _Place:
        """The target of a schema that is only a reference, else the schema itself."""
        while isinstance(place.schema, Mapping) and "$ref" in place.schema:
            if place.schema.keys() - {"$ref", "title", "description"} or place.depth > MAX_DEPTH:
                break
            place = self._target(place.at(place.schema["$ref"], "$ref"))
            self.inlined += len(json.dumps(place.schema))
            if self.inlined > MAX_INLINED:
                rule = f"its alternatives have at most {MAX_INLINED} characters after each $ref is replaced"
                raise ValueError(f"oneOf is too large: must be such that {rule}")
        return place

    def _definition(self, target: _Place) -> str:
        name = self._names.get(id(target.schema))
        if name is None:
            name = self._names[id(target.schema)] = str(len(self._names))
            self._pending.append((name, target))
        return name

    def _target(self, here: _Place) -> _Place:
        """The target of a reference."""
        reference = here.schema
        _check(isinstance(reference, str), here, "a string")
        key = (id(here.root), reference)
        if key not in self._targets:
            self._targets[key] = self._search(here, reference)
        target, root = self._targets[key]
        return _Place(target, root, reference, here.depth)

    def _search(self, here: _Place, reference: str) -> tuple[Any, Mapping[str, Any]]:
        """The target of a reference, and the resource that contains it."""
        resource, _, fragment = reference.partition("#")
        root = self._resources.get(resource) if resource else here.root
        target: Any = root
        if root is not None and fragment and not fragment.startswith("/"):
            target = self._anchors_of(root).get(fragment)
        elif root is not None:
            for step in unquote(fragment).split("/")[1:]:
                name = step.replace("~1", "/").replace("~0", "~")
                target = _step(target, name)
                root = target if isinstance(target, Mapping) and isinstance(target.get("$id"), str) else root
        if target is None or root is None:
            _fail(here.path, reference, "a reference to a place in this schema")
        return target, root

    def _anchors_of(self, root: Mapping[str, Any]) -> dict[str, Any]:
        """The schemas of a resource by `$anchor`; the first one of each name."""
        if (found := self._anchors.get(id(root))) is None:
            found = self._anchors[id(root)] = {}
            for each in _schemas(root):
                if isinstance(anchor := each.get("$anchor"), str):
                    found.setdefault(anchor, each)
        return found

    # ------------------------------------------------------------------ values
    def _restriction(self, key: str, here: _Place) -> dict[str, Any]:
        """Rewrite a keyword that itself restricts values. Returns {} for an annotation."""
        value = here.schema
        if key == "type":
            given = value if isinstance(value, list) else [value]
            _check(all(isinstance(each, str) and each in _TYPES for each in given), here, f"one of {_listed(_TYPES)}")
        elif key in ("const", "enum"):
            _check(key == "const" or isinstance(value, list), here, "a list of values")
            for number in map(_decimal, filter(_is_number, _leaves(value))):
                if abs(number) > EXACT or _inward(number, ROUND_FLOOR) != number:
                    rule = f"an integer up to 2**53 or a decimal of at most {_DIGITS} digits"
                    raise ValueError(f"{here.path} has the number {number}: must be {rule}, to be exact")
            if any(re.search(_CONTROLS, text) for text in _leaves(value, str)):
                raise ValueError(
                    f"{here.path} has a string with a control character: must have none but \\b \\f \\n \\r \\t"
                )
        elif key == "required":
            _check(isinstance(value, list) and all(isinstance(name, str) for name in value), here, "a list of names")
        elif key == "pattern":
            _check(isinstance(value, str), here, "a regular expression")
            self.expressions += 1
            return {key: _ecma_pattern(value)}
        elif key == "format":
            self.expressions += 1
            return {key: value} if isinstance(value, str) and value in _FORMATS else {}
        elif key in _COUNTS:
            _check(_is_number(value) and value == value // 1 and value >= 0, here, "a whole number, 0 or more")
            return {key: int(value)} if value < _LONGEST or key.startswith("min") else {}
        elif key == "multipleOf":
            return {key: self._multiple(here)}
        else:
            return {}
        return {key: value}

    def _check_properties(self, result: Mapping[str, Any], place: _Place) -> None:
        """Check minProperties of a rewritten schema. An answer may repeat a name, which counts only once."""
        if "minProperties" in result or "maxProperties" in result:
            self.expressions += len(result.get("properties", ()))
        if result.get("minProperties", 0) > len(set(result.get("required", ()))) + 1:
            rule = "at most one more than the properties that are required"
            _fail(place.at(None, "minProperties").path, result["minProperties"], rule)

    def _multiple(self, here: _Place) -> int | float:
        value = here.schema
        _check(_is_number(value) and 0 < value < _REMAINDERS // 10, here, f"above 0 and below {_REMAINDERS // 10}")
        exact, read = _decimal(value), float(value)
        while read % 1 and read < _REMAINDERS:  # as llguidance does, in doubles
            read *= 10
        if int(read) != int(exact.scaleb(_scale([exact]))) or not _fits_remainders([exact]):
            _fail(here.path, value, "a decimal of few digits")
        self._multiples.add(exact.normalize())
        return int(value) if exact % 1 == 0 else float(value)


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all nested schemas that are objects. Values of literals and annotations are not schemas."""
    pending = [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            yield each
            for key, value in each.items():
                if key in _MAPS and isinstance(value, Mapping):
                    pending += value.values()
                elif key in _LISTS | _SINGLE:
                    pending += value if isinstance(value, list) else [value]


def _step(value: Any, name: str) -> Any:
    if isinstance(value, list) and name.isdecimal() and len(name) < _DIGITS:
        return value[int(name)] if int(name) < len(value) else None
    return value.get(name) if isinstance(value, Mapping) else None


def _same_value(schema: dict[str, Any] | bool) -> set[str]:
    """The definitions that a rewritten schema applies to its own value."""
    if isinstance(schema, bool):
        return set()
    found = {schema["$ref"].rpartition("/")[2]} if "$ref" in schema else set()
    return found.union(*(_same_value(each) for key in _IN_PLACE for each in schema.get(key, ())))


def _fail(path: str, value: object, rule: str) -> NoReturn:
    text = value if isinstance(value, Decimal) else repr(value)
    raise ValueError(f"{path[-200:]} is {str(text)[:100]}: must be {rule}")


def _check(right: bool, here: _Place, rule: str) -> None:
    if not right:
        _fail(here.path, here.schema, rule)


def _listed(values: set[Any]) -> str:
    return ", ".join(map(str, sorted(values)))


# ------------------------------------------------------------------ numbers
def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decimal(value: float) -> Decimal:
    """The number as written in JSON."""
    return Decimal(value if isinstance(value, int) else repr(value))


def _exponent(value: Decimal) -> int:
    return int(value.normalize().as_tuple().exponent)


def _scale(values: Iterable[Decimal]) -> int:
    """The most digits after the decimal point that a value needs."""
    return max(0, *(-_exponent(value) for value in values))


def _fits_remainders(multiples: Collection[Decimal]) -> bool:
    """Whether remainders of the product of `multiples` are exact: ten times one plus a digit must not wrap."""
    scale = _scale(multiples)
    return 10 * math.prod(int(each.scaleb(scale)) for each in multiples) + 9 * int(10**scale) < _REMAINDERS


def _unit(value: Decimal) -> Decimal:
    """The distance of decimals with `_DIGITS` digits around a value, at most 1."""
    before = max(value.adjusted() + 1, 1) if value else 1
    return Decimal(1).scaleb(min(before - _DIGITS, 0))


def _inward(value: Decimal, rounding: str) -> Decimal:
    return (value / _unit(value)).to_integral_value(rounding) * _unit(value)


def _bounds(place: _Place) -> dict[str, int | float]:
    """Inclusive bounds of numbers, moved inward to decimals that are read exactly and to integers within 2**53."""
    schema, result = place.schema, dict[str, int | float]()
    for side, sign, rounding in (("minimum", 1, ROUND_CEILING), ("maximum", -1, ROUND_FLOOR)):
        exclusive = schema.get(f"exclusive{side.title()}")
        found = []
        for key, value, strict in (
            (side, schema.get(side), exclusive is True),  # draft 4
            (f"exclusive{side.title()}", None if isinstance(exclusive, bool) else exclusive, True),
        ):
            if value is None:
                continue
            _check(_is_number(value), place.at(value, key), "a number")
            exact = max(_decimal(value), Decimal(-EXACT)) if sign > 0 else min(_decimal(value), Decimal(EXACT))
            if abs(exact) > EXACT:
                _fail(place.at(value, key).path, value, f"{'at most 2**53' if sign > 0 else 'at least -2**53'}")
            bound = _inward(exact, rounding)
            if strict and bound == exact == _decimal(value):
                bound += sign * _unit(exact)
            found.append(bound)
        if found:
            bound = max(found) if sign > 0 else min(found)
            result[side] = int(bound) if bound % 1 == 0 else float(bound)
    return result


def _leaves(value: Any, kind: type = object) -> Iterator[Any]:
    """The values of this kind anywhere in a JSON value, but not names, lists and objects."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            pending += each.values()
        elif isinstance(each, list):
            pending += each
        elif isinstance(each, kind):
            yield each


# ------------------------------------------------------------------ patterns
def _ecma_pattern(pattern: str) -> str:
    """An ECMA-262 pattern in Rust's syntax. It matches nothing that ECMA-262 or Python would not match.

    ValueError: the three engines read a part differently, or it matches a control character without a short escape in
    JSON.
    """

    def refuse(part: str, rule: str = "without parts that engines interpret differently") -> NoReturn:
        raise ValueError(f"pattern {pattern[:100]!r} has {part!r}: must be {rule}")

    result: list[str] = []
    inside = negated = False
    place = 0
    while place < len(pattern):
        match = _PART.match(pattern, place)
        assert match is not None
        part, place = match[0], match.end()
        letter = part[1] if len(part) == 2 and part[0] == "\\" else ""
        if letter and letter.lower() in _CLASSES:
            if inside and pattern.startswith("-", place) and not pattern.startswith("-]", place):
                refuse(f"{part}-")
            common, union = _CLASSES[letter.lower()]
            if letter.islower():
                text = union if negated else common
                part = text if inside else f"[{text}{_NO_CONTROLS}"
            else:
                part = f"[^{common if negated else union}]" + ("" if inside else _NO_CONTROLS)
                part = part if inside else f"[{part}"
        elif letter in ("<", ">") or (letter.isalpha() and letter not in _ESCAPES):
            refuse(part)
        elif inside:
            if part in ("[", "&", "~"):
                part = "\\" + part
            elif part == "-" and pattern.startswith("-", place):
                refuse("--")
            elif part == "]":
                part, inside = f"]{_NO_CONTROLS}", False
        elif part in ("[", "[^"):
            inside, negated = True, part == "[^"
            if pattern.startswith("]", place):
                refuse(f"{part}]")
            part = f"[{part}"
        elif part == ".":
            part = rf"[[^\n\r\u{{2028}}\u{{2029}}]{_NO_CONTROLS}"
        elif part == "{" and pattern.startswith(",", place):
            refuse("{,")
        elif _CONTROL_PART.fullmatch(part):
            refuse(part, "without control characters")
        result.append(part)
    return "".join(result)
