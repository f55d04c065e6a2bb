"""Every answer that a rewritten schema's grammar accepts is valid. Errors name unsupported keywords and values."""

from __future__ import annotations

import cProfile
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from tinkerflow.backend.spec.constraints import grammar_of, limits, on_large_stack
from tinkerflow.backend.spec.json_schemas import EXACT, exact_schema

STRING = {"type": "string"}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NULL = {"type": "null"}
INTEGERS = (
    EXACT - 1,
    EXACT,
    EXACT + 1,
    12345678901234567,
    10**18 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64 + 5,
    10**25 + 1,
)
INTEGERS += tuple(-number for number in INTEGERS)
UNION = {
    "c": {"type": "object", "properties": {"k": {"const": "c"}, "n": {"$ref": "#/$defs/u"}}, "required": ["k"]},
    "d": {"type": "object", "properties": {"k": {"const": "d"}}, "required": ["k"]},
    "u": {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "discriminator": {"propertyName": "k"}},
}


def obj(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def pattern(text: str) -> dict[str, Any]:
    return {"type": "string", "pattern": text}


NUMBERS = [
    *({"const": number} for number in INTEGERS),
    *({"enum": [number, 1]} for number in INTEGERS),
    *({"type": "integer", "minimum": number, "maximum": number + 3} for number in INTEGERS),
    *({"type": "integer", key: number} for number in INTEGERS for key in ("minimum", "maximum", "exclusiveMaximum")),
    *(
        {"type": "number", "minimum": a, "maximum": b}
        for a, b in [(0.1, 0.3), (-1e300, 1e300), (1.5, 1.5), (-0.5, 0.25)]
    ),
    *({"exclusiveMinimum": a, "exclusiveMaximum": b} for a, b in [(0, 1), (1, 1.0000001), (-0.5, 0), (0.1, 0.3)]),
    *({"type": "integer", "exclusiveMinimum": a, "exclusiveMaximum": b} for a, b in [(0, 2), (0.5, 2.5), (-3, 2**70)]),
    *({"const": number} for number in (1.0, 1.5, -0.0, 1e-7, 0.1, 123456789.12345679, 1e300)),
    *({"type": kind, "multipleOf": number} for kind in ("integer", "number") for number in (1, 7, 1000, 0.5, 0.07)),
    {"type": "integer", "allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]},
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3, "exclusiveMinimum": True},
    {"type": ["integer", "null"], "minimum": 3, "maximum": 4},
]
TEXTS = [
    {"type": "string", "minLength": 1.0, "maxLength": 2.0},
    {"type": "string", "maxLength": 2**40},
    *({"type": "string", "maxLength": 5, "format": name} for name in ("uuid4", "path", "int64", "regex", "nonsense")),
    {"type": "string", "format": "date"},
    {"type": "integer", "format": "int64"},
    {"enum": ["\t\n", 'a"\\', "é😀", r"\v"]},
    *map(
        pattern,
        [r"^\d{2}$", r"^[^a]$", r"^\W\D\S$", r"^[^\s]{2}$", "^[[a]$", "^[a&&b]$", "^[a-c~~]$", r"^[\d-]$", "a|^b$", "$",
         r"^[\w.-]+@x$", r"^[\]\[]$", '^[^"]*$', r"^[^\\]+$", r"^[^\\/:*?<>|]b$", r"^[\x00-\x21]b$", "^.$", r"^\/\.$",
         r"^[^\x00-\x1f]$", r"^\u0041$", r"^a{2,}?$", r"^[\u0041-\u0043]$"],
    ),
]  # fmt: skip
OBJECTS = [
    {"type": "object"},
    {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["b", "c"]},
    {"type": "object", "properties": {"a": DIGIT}, "required": ["a"], "additionalProperties": {"type": "boolean"}},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": NULL},
    {**obj(a=DIGIT, b=DIGIT), "minProperties": 1},
    {"type": "object", "patternProperties": {"^x": DIGIT, "^y": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "properties": {"xa": {"minimum": 5}}, "patternProperties": {"^x": DIGIT}, "required": ["xa"]},
    obj('a"b\\c', "é", "\n", "\u0001", **{'a"b\\c': DIGIT, "é": DIGIT, "\n": DIGIT, "\u0001": DIGIT}),
    {"properties": {"a": False}},
    {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 2.0},
    {"type": "array", "prefixItems": [DIGIT, {"type": "boolean"}], "items": False},
    {"type": "array", "items": NULL, "maxItems": 1, "uniqueItems": False},
]
COMBINED = [
    {"oneOf": [STRING, DIGIT]},
    {"$ref": "#/$defs/u", "$defs": UNION},
    {"anyOf": [obj("a", a=DIGIT), obj("b", b=DIGIT)]},
    {
        "type": "object",
        "allOf": [{"properties": {"a": DIGIT}, "additionalProperties": False}, {"properties": {"b": NULL}}],
    },
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2}}},
    {"$ref": "#/components/schemas/X", "components": {"schemas": {"X": {"const": EXACT}, "Y": 3}}},
    {**obj("a", a={"$id": "t:1", "$ref": "#/$defs/q", "$defs": {"q": NULL}}), "$defs": {"q": {"type": "boolean"}}},
    {"$ref": "#x", "$defs": {"a": {"$anchor": "x", **NULL}}},
    {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": NULL}},
    {"$ref": "http://z/", "$defs": {"a": {"$id": "http://z/", **NULL}}},
    {"enum": ["a", 1, None, True, {"a": [1]}, [2]]},
    {"enum": ["aa", "b"], "pattern": "^a", "type": "string"},
]
_LITERAL = {
    "$ref": "#/nope",
    "$id": "::",
    "type": "objct",
    "format": 3,
    "pattern": "(",
    "uniqueItems": True,
    "$anchor": 1,
}
LITERALS = [
    {"const": _LITERAL},
    {"enum": [_LITERAL, [_LITERAL]]},
    *({**NULL, key: _LITERAL} for key in ("default", "examples", "description", "x-guidance", "discriminator", "xml")),
    {"x-guidance": {"lenient": True, "whitespace_flexible": True}, **obj("a", a=DIGIT)},
    obj("$ref", "type", "format", "enum", "$id", **dict.fromkeys(["$ref", "type", "format", "enum", "$id"], DIGIT)),
    {**NULL, "$schema": "http://unknown", "$comment": 3, "title": "t", "deprecated": True, "$defs": {"a": 3}},
]
ACCEPTED = [*NUMBERS, *TEXTS, *OBJECTS, *COMBINED, *LITERALS]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def start(tokenizer: Any, schema: object) -> Any:
    from llguidance import LLMatcher

    grammar = grammar_of("json_schema", json.dumps(schema))
    return LLMatcher(tokenizer, grammar, limits=limits(), log_level=0)


def walk(tokenizer: Any, matcher: Any, chance: random.Random, most: int = 120) -> str | None:
    """A random text that the matcher accepts, drawn byte by byte, or None if it does not end within `most` bytes."""
    end, text = tokenizer.eos_token, bytearray()
    while len(text) < most:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed and not matcher.is_error(), f"no byte may follow {text!r}: {matcher.get_error()[:99]}"
        if end in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return text.decode()
        allowed = [byte for byte in allowed if byte != end]
        usual = [byte for byte in allowed if byte in b'"}],0123456789aetnu\\.-']
        text.append(chance.choice(usual if usual and chance.random() < 0.85 else allowed))
        matcher.consume_token(text[-1])
    return None


@pytest.mark.filterwarnings("ignore:Possible")  # warnings of Python's re about classes with brackets
@pytest.mark.parametrize("schema", ACCEPTED, ids=lambda schema: json.dumps(schema)[:70])
def test_generated_answers_validate_or_the_schema_is_refused(tokenizer: Any, schema: Any) -> None:
    def sweep() -> None:
        first, chance = start(tokenizer, schema), random.Random(0)
        assert not first.is_error(), first.get_error()
        for _ in range(20):
            if (text := walk(tokenizer, first.deep_copy(), chance)) is not None:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))

    try:
        exact_schema(schema)
    except ValueError:
        assert schema in NUMBERS
    else:
        on_large_stack(sweep)


DOUBLING = {str(i): {"oneOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(30)} | {"30": NULL}
REFUSED = [
    ({"const": EXACT + 1}, "const has the number 9007199254740993: must be an integer up to 2**53"),
    (obj(a={"enum": [[EXACT + 1]]}), "properties.a.enum has the number 9007199254740993"),
    ({"const": 2**64 + 5}, "const has the number 18446744073709551621"),
    ({"const": 123456789.12345679}, "const has the number 123456789.12345679"),
    ({"type": "integer", "minimum": 2**63}, "minimum is 9223372036854775808: must be at most 2**53"),
    ({"items": {"maximum": -(2**63)}}, "items.maximum is -9223372036854775808: must be at least -2**53"),
    ({"multipleOf": 0}, "multipleOf is 0: must be above 0"),
    ({"multipleOf": 0.07}, "multipleOf is 0.07: must be a decimal of few digits"),
    ({"multipleOf": 429496729}, "multipleOf is 429496729: must be above 0 and below 429496729"),
    ({"type": "integer", "multipleOf": 10**9}, "multipleOf is 1000000000: must be above 0 and below 429496729"),
    ({"multipleOf": 42949672.5}, "multipleOf is 42949672.5: must be a decimal of few digits"),
    ({"multipleOf": 1e-9}, "multipleOf is 1e-09: must be a decimal of few digits"),
    ({"allOf": [{"multipleOf": 65536}, {"multipleOf": 6561}]}, "multipleOf has the values 6561, 65536: too large"),
    ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multipleOf has the values 65537, 65539: too large"),
    ({"const": "\u001b"}, "const has a string with a control character"),
    ({"type": "objct"}, "type is 'objct': must be one of array, boolean,"),
    ({"type": "object", "minProperties": 2}, "minProperties is 2: must be at most one more than"),
    ({"properties": {"a": 3}}, "properties.a is 3: must be a schema"),
    ({"$ref": "file:///etc/passwd"}, "$ref is 'file:///etc/passwd': must be a reference to a place in this schema"),
    ({"$ref": "#/$defs/a", "$defs": {"b": NULL}}, "$ref is '#/$defs/a': must be a reference to a place"),
    (obj("a", a={"$ref": "#/$defs/r"}) | {"$defs": {"r": {"$ref": "#/$defs/r"}}}, "$ref is '#/$defs/r': must be a"),
    ({"allOf": [{"$ref": "#"}]}, "$ref is '#': must be a reference that does not lead back to itself"),
    ({"maxLength": -1}, "maxLength is -1: must be a whole number"),
    ({"enum": 3}, "enum is 3: must be a list of values"),
    ({"required": [3]}, "required is [3]: must be a list of names"),
    (json.loads('{"items":' * 250 + "{}" + "}" * 250), "it nests more than 200 keywords"),
    ({"prefixItems": [{}] * 20_000}, "more than 20000 schemas"),
    ({**DOUBLING["0"], "$defs": DOUBLING}, "its alternatives have at most 262144 characters after each $ref"),
    *((pattern(text), f"has {part!r}") for text, part in [(r"^\Aa\z", r"\A"), ("^[]a]$", "[]"), ("a{,2}", "{,")]),
    *((pattern(text), f"has {part!r}") for text, part in [(r"[\d-x]", r"\d-"), ("[a--b]", "--"), (r"^\x01$", r"\x01")]),
    *(({key: value}, f"{key} is not supported") for key, value in [
        ("uniqueItems", True), ("not", {}), ("if", {}), ("contains", {}), ("propertyNames", {"pattern": "a"}),
        ("dependentRequired", {"a": ["b"]}), ("dependencies", {"a": ["b"]}), ("dependentSchemas", {"a": {}}),
        ("unevaluatedProperties", False), ("unevaluatedItems", False), ("$dynamicRef", "#a"), ("$recursiveRef", "#"),
    ]),
]  # fmt: skip


def inlined_often(target: str, **definitions: Any) -> dict[str, Any]:
    """A schema of few characters that inlines a target 8,000 times."""

    def often(reference: str, times: int) -> Any:
        return {"properties": {str(i): {"oneOf": [{"$ref": reference}]} for i in range(times)}}

    levels = {"a": often("#/$defs/b", 20), "b": often("#/$defs/c", 20), "c": often(target, 20)}
    return {"oneOf": [{"$ref": "#/$defs/a"}], "$defs": {**levels, **definitions}}


CHAIN = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(90)} | {"90": NULL}
COSTLY = {
    "values": inlined_often("#/$defs/v", v={"const": [0] * 700}),
    "chain of references": inlined_often("#/$defs/0", **CHAIN),
    "anchor": inlined_often("#z", first={"$anchor": "z", **NULL}, many={"prefixItems": [{}] * 700}),
}


@pytest.mark.parametrize("schema", COSTLY.values(), ids=COSTLY)
def test_a_short_schema_does_not_take_long_to_rewrite(schema: Any) -> None:
    assert len(json.dumps(schema)) < 6000
    calls = cProfile.Profile(builtins=False)
    with pytest.raises(ValueError, match="at most 262144 characters after each"):
        calls.runcall(exact_schema, schema)
    # 10 to 45 million when only schemas were counted
    assert sum(each.callcount for each in calls.getstats()) < 2_000_000


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_a_refused_schema_names_the_keyword_its_value_and_the_rule(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        exact_schema(schema)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": DIGIT}}, r'{"\u0061":true}'),  # another spelling of "a"
        ({"type": "object", "patternProperties": {"^a": DIGIT}}, r'{"\u0061":true}'),
        *(
            ({"type": "object"}, text)
            for text in (" {}", "{ }", '{"a" :1}', '{"a":\n1}', '{"a":  1}', '{"a":1,\n"b":1}')
        ),
        *(({"type": "array"}, text) for text in ("[ ]", "[1 ]", "[1,  2]", "[1,\t2]")),
        ({"x-guidance": {"whitespace_flexible": True}, "type": "array"}, "[1,  2]"),
    ],
)
def test_names_have_one_spelling_and_white_space_is_bounded(tokenizer: Any, schema: Any, text: str) -> None:
    matcher = on_large_stack(lambda: start(tokenizer, schema))
    assert matcher.validate_tokens(list(text.encode())) < len(text)
    compact = on_large_stack(lambda: start(tokenizer, {"type": "object"}))
    assert compact.validate_tokens(list(b'{"a": 1, "b":[1,2]}')) == 19
