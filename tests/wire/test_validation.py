"""The rules that all request models share, checked for every model and field of the wire and the API."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from tinkerflow.api import console, routes
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.wire import SaveWeights, WireModel
from tinkerflow.backend.wire.validation import MAX_METADATA_BYTES, AnyMetadata, Metadata, Text


def subclasses(model: type[WireModel]) -> Iterator[type[WireModel]]:
    for child in model.__subclasses__():
        yield child
        yield from subclasses(child)


for package in (routes, console):
    for _, name, _ in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(name)
MODELS = sorted({m for m in subclasses(WireModel) if m.__module__.startswith("tinkerflow.")}, key=lambda m: str(m))
# For fields whose validators require more than a type. The first example that makes a body valid is used.
EXAMPLES: tuple[dict[str, Any], ...] = (
    {},
    {"path": "tinker://sess-1:train:0/weights/a"},
    {"type": "json_schema"},
)


def example(schema: dict[str, Any], defs: dict[str, Any]) -> Any:
    """A value of a JSON schema, as small as possible."""
    if "$ref" in schema:
        return example(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return example(schema[key][0], defs)
    match schema.get("type"):
        case "object":
            return {name: example(schema["properties"][name], defs) for name in schema.get("required", ())}
        case "array":
            return [example(schema.get("items", {}), defs)] * schema.get("minItems", 0)
        case "string":
            return "2026-01-01T00:00:00Z" if schema.get("format") == "date-time" else "a" * schema.get("minLength", 1)
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
    return {}


def smallest(model: type[WireModel]) -> dict[str, Any]:
    """A body with only the required fields of a model."""
    schema = model.model_json_schema()
    body = {name: example(schema["properties"][name], schema.get("$defs", {})) for name in schema.get("required", ())}
    bodies = [body | {name: value for name, value in more.items() if name in body} for more in EXAMPLES]
    return next((found for found in bodies if isinstance(read(model, found), WireModel)), body)


def read(model: type[WireModel], body: dict[str, Any]) -> WireModel | str:
    """Parse a body as in a request, and return the model or the error message."""
    try:
        return model.from_json(json.dumps(body).encode())
    except UserError as error:
        return error.message


def optional_fields(model: type[WireModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items() if not field.is_required()]


def test_models_are_found() -> None:
    rooms = {model.__module__ for model in MODELS}
    assert {"tinkerflow.backend.wire.requests", "tinkerflow.api.routes.chat", "tinkerflow.api.routes.sessions"} <= rooms
    assert len(MODELS) > 80


def test_null_counts_as_an_absent_field() -> None:
    wrong = []
    for model in MODELS:
        body = smallest(model)
        without = read(model, body)
        fields = [*optional_fields(model), "a_field_that_nobody_knows"]
        bodies = [{**body, field: None} for field in fields] + [{**body, **dict.fromkeys(fields)}]
        wrong += [(model, given) for given in bodies if read(model, given) != without]
    assert wrong == []


def test_booleans_and_strings_are_not_numbers() -> None:
    wrong, tried = [], 0
    for model in MODELS:
        body = smallest(model)
        for field, schema in model.model_json_schema().get("properties", {}).items():
            options = schema.get("anyOf", [schema])
            kinds = {option.get("type") for option in options} - {"null"}
            values: list[Any] = [True, "1"] if kinds and kinds <= {"integer", "number"} else []
            lists = [option for option in options if option.get("type") == "array"]
            values += [[True] for option in lists if option.get("items", {}).get("type") in ("integer", "number")]
            for value in values:
                tried += 1
                error = read(model, {**body, field: value})
                if not isinstance(error, str) or not error.startswith(field):
                    wrong.append((model, field, value, error))
    assert wrong == []
    assert tried > 80


def test_every_request_model_has_the_one_base() -> None:
    """No request model inherits directly from pydantic's BaseModel."""
    strays = [child for child in BaseModel.__subclasses__() if child.__module__.startswith("tinkerflow.api")]
    assert strays == []


class Inner(WireModel):
    """A model inside another one."""

    text: Text


class Example(WireModel):
    """One field of each kind."""

    count: Annotated[int, Field(ge=1, le=9)] = 1
    least: Annotated[int, Field(ge=1)] = 1
    share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    flag: bool = False
    word: Text = "x"
    choice: Literal["a", "b"] = "a"
    items: Annotated[list[int] | str, Field(max_length=3)] = "x"
    inner: list[Inner] = Field(default_factory=list)
    user_metadata: Metadata = Field(default_factory=dict)
    facts: AnyMetadata = Field(default_factory=dict)
    renamed: int = Field(default=0, alias="wire_name")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"count": 10}, "count is 10: must be a whole number from 1 to 9"),
        ({"count": "a"}, "count is 'a': must be a whole number from 1 to 9"),
        ({"count": 1.5}, "count is 1.5: must be a whole number from 1 to 9"),
        ({"least": 0}, "least is 0: must be a whole number >= 1"),
        ({"share": 2}, "share is 2: must be a finite number >= 0 and <= 1"),
        ({"share": 1e999}, "share is inf: must be a finite number >= 0 and <= 1"),
        ({"flag": 1}, "flag is 1: must be true or false"),
        ({"word": ""}, "word is '': must be a non-empty string"),
        ({"word": "a" * 1025}, "must be at most 1024 characters long"),
        ({"word": 3}, "word is 3: must be a non-empty string"),
        ({"choice": "c"}, "choice is 'c': must be 'a' or 'b'"),
        ({"items": [True]}, "items[0] is True: must be a whole number"),
        ({"items": {}}, "items is {}: must be a list or a string"),
        ({"inner": 1}, "inner is 1: must be a list"),
        ({"inner": [{"text": "a"}, {"text": ""}]}, "inner[1].text is '': must be a non-empty string"),
        ({"inner": [{}]}, "inner[0].text is missing: must be a non-empty string"),
        ({"inner": [2]}, "inner[0] is 2: must be a JSON object"),
        ({"user_metadata": {"a": 1}}, "user_metadata['a'] is 1: must be a string"),
        ({"user_metadata": {"a": "x" * MAX_METADATA_BYTES}}, "must be at most 256 pairs with 16384 bytes in all"),
        ({"facts": {"a": [1e999]}}, "facts is {'a': [inf]}: must be JSON in which all numbers are finite"),
        ({"wire_name": "x"}, "wire_name is 'x': must be a whole number"),
    ],
)
def test_errors_name_the_field_the_value_and_the_rule(body: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=re.escape(error)):
        Example.from_values(body)


def test_integral_floats_are_integers() -> None:
    assert Example.from_json(b'{"count": 3.0, "renamed": 7}') == Example(count=3)
    assert isinstance(Example.from_values({"count": 3.0}).count, int)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"[]", "the request body is []: must be a JSON object"),
        (b"{", "the request body is not JSON: EOF while parsing an object"),
        (rb'{"word": "a\u0000"}', "the request body contains a NUL character"),
    ],
)
def test_json_other_than_an_object_is_refused(body: bytes, error: str) -> None:
    with pytest.raises(UserError, match=re.escape(error)):
        Example.from_json(body)
    assert Example.from_json(rb'{"word": "a\\u0000"}').word == r"a\u0000"


def test_stored_metadata_may_be_larger_than_the_current_limit() -> None:
    """An earlier release accepted such metadata, and a replay reads it again."""
    body = {"path": "a", "user_metadata": {"a": "x" * MAX_METADATA_BYTES}}
    assert SaveWeights.decode(json.dumps(body).encode()).user_metadata == body["user_metadata"]
    with pytest.raises(UserError, match="user_metadata is '1 pairs with 16385 bytes'"):
        SaveWeights.from_values(body)


def test_models_are_documented() -> None:
    assert [model.__name__ for model in MODELS if not inspect.getdoc(model)] == []
