"""Constraints of requests: valid, invalid, and hostile ones, which could end the process that reads them."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from tests.wire.test_sample import body, decode

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec import constraints
from tinkerflow.backend.spec.commands import Constraint
from tinkerflow.backend.spec.constraints import on_large_stack


def constrained(kind: Any, value: Any = None) -> bytes:
    return body({"constraint": {"type": kind, "value": value}})


@pytest.mark.parametrize(
    ("kind", "value", "made"),
    [
        ("json_object", None, Constraint("json_schema", '{"type":"object"}', (9,))),
        ("json_schema", {"type": "null"}, Constraint("json_schema", '{"type":"null"}', (9,))),
        ("regex", "a|b", Constraint("regex", "a|b", (9,))),
        ("grammar", 'start: "a"', Constraint("grammar", 'start: "a"', (9,))),
    ],
)
def test_every_kind_of_constraint_is_read(kind: str, value: Any, made: Constraint) -> None:
    assert decode(constrained(kind, value)).constraint == made
    assert decode(body()).constraint is None


VALUE = "sampling_params.constraint.value "
WRONG = [
    (body({"constraint": 3}), "sampling_params.constraint is 3: must be a JSON object"),
    (body({"constraint": {}}), "sampling_params.constraint.type is missing: must be given"),
    (constrained("yaml"), "sampling_params.constraint.type is 'yaml': must be 'json_schema', 'json_object'"),
    (constrained(["regex"]), "sampling_params.constraint.type is ['regex']: must be 'json_schema'"),
    (constrained("json_object", {}), VALUE + "is {}: must be absent"),
    (constrained("json_schema", "{}"), VALUE + "is '{}': must be a JSON schema, an object"),
    (constrained("regex"), VALUE + "is None: must be a non-empty string"),
    (constrained("grammar", ""), VALUE + "is '': must be a non-empty string"),
    (constrained("regex", "a(b"), VALUE + "is not a regex that can be enforced"),
    (constrained("grammar", "start: a"), VALUE + "is not a grammar that can be enforced"),
    (
        constrained("json_schema", {"type": "objct"}),
        VALUE + "is not a json_schema that can be enforced: type is 'objct': must be one of array",
    ),
    (constrained("json_schema", {"$ref": "http://127.0.0.1:1/x"}), VALUE + "is not a json_schema that can be enforced"),
    (constrained("json_schema", {"uniqueItems": True}), "can be enforced: uniqueItems is not supported"),
    (constrained("json_schema", {"const": 2**53 + 1}), "can be enforced: const has the number 9007199254740993"),
    (constrained("json_schema", {"$ref": "#"}), "can be enforced: $ref is '#': must be a reference that does not lead"),
    (constrained("regex", r"[^\s\S]"), "is not a regex that can be enforced: no text satisfies it"),
    (constrained("regex", "a" * 65_537), VALUE + "has 65537 characters: must have at most 65536"),
]


@pytest.mark.parametrize(("payload", "text"), WRONG, ids=[text[:60] for _, text in WRONG])
def test_invalid_input_is_named_in_the_error(payload: bytes, text: str) -> None:
    with pytest.raises(UserError) as caught:
        decode(payload)
    assert text in caught.value.message
    assert len(caught.value.message) < 500


def test_constraints_need_an_end_of_text_token() -> None:
    with pytest.raises(UserError, match="the model names no end-of-text token"):
        decode(constrained("regex", "a"), eos=())


def chain(length: int) -> str:
    """A grammar whose rules refer to each other in a chain."""
    return "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(length)) + f'\na{length}: "z"'


HOSTILE = {
    "chain of rules": ("grammar", chain(5_000)),
    "chain of references": (
        "json_schema",
        {"$ref": "#/$defs/0", "$defs": {**{str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2_000)}, "2000": {}}},
    ),
    "parentheses": ("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "nested schema": ("json_schema", json.loads('{"allOf":[' * 120 + "{}" + "]}" * 120)),
    "repetition": ("regex", "((a{1000}){1000}){1000}"),
    "alternatives": ("regex", "|".join(f"(a|b{i})*" for i in range(4_000))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_constraint_cannot_crash_its_reader(name: str) -> None:
    kind, value = HOSTILE[name]
    try:
        assert decode(constrained(kind, value)).constraint is not None
    except UserError as error:
        assert VALUE in error.message and len(error.message) < 500


def met(count: int, length: int) -> Any:
    """A schema for a text that matches several patterns."""
    return {"type": "string", "allOf": [{"pattern": f".*{chr(97 + i)}.{{{length}}}"} for i in range(count)]}


WITHIN = "start: %json " + json.dumps(met(20, 5)).replace("pattern", "p\\u0061ttern")
OPTIONAL = {f"{i:x}": {"type": "null"} for i in range(2000)}


@pytest.mark.parametrize(
    "request_",
    [
        constrained("json_schema", met(20, 5)),  # once took a minute and 2 GB
        constrained("grammar", WITHIN),
        constrained("json_schema", {"properties": OPTIONAL, "minProperties": 1, "additionalProperties": False}),
        constrained("json_schema", {"patternProperties": {f"^{i:03d}(a|b)*a(a|b){{12}}$": {} for i in range(300)}}),
        constrained("grammar", 'start: %json {"const": -9223372036854775808}'),  # once overflowed any stack
    ],
    ids=["patterns", "patterns in a grammar", "one of many properties", "names of properties", "recursion"],
)
def test_costly_constraint_is_refused_in_a_subprocess(request_: bytes) -> None:
    with pytest.raises(UserError, match="it takes more than 1 second or 1 GB to compile"):
        decode(request_)


def test_a_large_constraint_may_be_cheap() -> None:
    apart = {"type": "object", "properties": {str(i): {"type": "string", "pattern": f"ä{i}"} for i in range(20)}}
    many = {"type": "object", "properties": {f"name {i}": {"type": "integer"} for i in range(500)}}
    for schema in (apart, many, {"enum": [f"{i:09d}" for i in range(1000)]}):
        assert decode(constrained("json_schema", schema)).constraint is not None
    with pytest.raises(UserError, match="Unable to determine if regex is empty"):
        decode(constrained("json_schema", met(9, 200)))


def test_a_short_schema_that_inlines_much_is_checked_in_a_subprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "_problem_in_process", lambda *_: "checked in a process")
    objects = {"properties": {str(i): {"oneOf": [{"$ref": "#/$defs/v"}]} for i in range(50)}}
    assert decode(constrained("json_schema", {**objects, "$defs": {"v": {"const": 1}}})).constraint is not None
    with pytest.raises(UserError, match="checked in a process"):
        decode(constrained("json_schema", {**objects, "$defs": {"v": {"const": [0] * 500}}}))


def test_only_the_constraint_thread_has_a_large_stack() -> None:
    before = threading.stack_size()
    assert on_large_stack(lambda: threading.current_thread().name) == "constraint"
    assert threading.stack_size() == before
    with pytest.raises(ZeroDivisionError):
        on_large_stack(lambda: 1 // 0)
