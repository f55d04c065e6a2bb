"""Validation of JSON bodies: the base of all request models, the types of their fields, and the text of errors.

pydantic validates the bodies. `WireModel` adds two rules of the protocol: a null field counts as absent, and no boolean
or text is read as a number. An error names the field, its value and the rule: `ttl_seconds is 60: must be a whole
number from 3600 to 315360000`.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core.core_schema import CoreSchema

from tinkerflow.backend.core.errors import UserError, broken
from tinkerflow.backend.core.ids import NAME_RULE, is_name
from tinkerflow.backend.wire.request_errors import request_error

_MAX_DEPTH = 254  # of nested lists and objects: orjson can read deeper values, but cannot write them
_NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")  # an escaped NUL, and not an escaped backslash before u0000
STORED: Final = "stored"
_NUMBERS = ("int", "float", "bool")  # types of pydantic's schemas
_NOT_SCHEMAS = ("metadata", "serialization", "function")  # keys of pydantic's schemas without a schema to validate


def parse(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. UserError: the body is something else, or orjson could not write the object again."""
    try:
        values = orjson.loads(body)
        if body.count(b"[") + body.count(b"{") > _MAX_DEPTH:
            orjson.dumps(values)
    except orjson.JSONDecodeError as e:
        raise UserError(f"the request body is not JSON: {e}") from e
    except orjson.JSONEncodeError as e:
        raise UserError(
            f"the request body nests lists and objects too deeply: must be at most {_MAX_DEPTH} deep"
        ) from e
    if not isinstance(values, dict):
        raise broken("the request body", values, "a JSON object")
    return values


# ------------------------------------------------------------------ the base of all models
def _make_numbers_strict(schema: Any, *, in_list: bool = False) -> None:
    """Change a pydantic schema so that no boolean or text is a number, and only true and false are booleans.

    A field's 3.0 still counts as the whole number 3, because JSON has one kind of number. Items of lists are not
    converted, because a list may have millions.
    """
    if isinstance(schema, list):
        for item in schema:
            _make_numbers_strict(item, in_list=in_list)
    elif isinstance(schema, dict) and schema.get("type") in _NUMBERS:
        if "strict" not in schema:
            schema["strict"] = True
            if schema["type"] == "int" and not in_list:
                convert = {"type": "no-info", "function": _whole_if_integral}
                number = dict(schema)
                schema.clear()
                schema |= {"type": "function-before", "function": convert, "schema": number}
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key not in _NOT_SCHEMAS:
                _make_numbers_strict(value, in_list=in_list or key == "items_schema")


def _whole_if_integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class WireModel(BaseModel):
    """Base of the JSON models of requests and answers. Models are frozen, and ignore unknown fields.

    A field with an alias is read only by the alias, because its own name is not part of the protocol. `model_` is an
    ordinary prefix of names, not pydantic's own namespace.

    replaces_nul: whether a NUL character in a body becomes U+FFFD. By default it is refused, because Postgres cannot
    store it.
    """

    model_config = ConfigDict(frozen=True, protected_namespaces=())
    replaces_nul: ClassVar[bool] = False

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Read numbers strictly, in all fields of all models."""
        schema = handler(source)
        _make_numbers_strict(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        """Drop nulls, which count as absent fields, even in unknown fields."""
        if not isinstance(values, dict) or None not in values.values():
            return values
        needed = [field.alias or name for name, field in cls.model_fields.items() if field.is_required()]
        return {name: value for name, value in values.items() if value is not None or name in needed}

    @classmethod
    def of(cls, source: object, **others: Any) -> Self:
        """The model with these fields. All other fields are the attributes of `source` with the same names."""
        return cls(**{name: getattr(source, name) for name in cls.model_fields if name not in others}, **others)

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """The model of a stored JSON body. UserError names the field, its value and the rule.

        A body that an earlier release accepted may exceed today's limits.
        """
        return cls.from_values(parse(payload), context=STORED)

    @classmethod
    def from_values(cls, values: object, prefix: str = "", *, context: Literal["stored"] | None = None) -> Self:
        """The model of parsed values. UserError names the field (after `prefix`), its value and the rule.

        context: STORED for values that were accepted before.
        """
        try:
            return cls.model_validate(values, context=context)
        except ValidationError as e:
            raise request_error(e, cls, prefix) from e

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """The model of a JSON body as received. UserError names the field, its value and the rule."""
        if rb"\u0000" in body and _NUL.search(body) is not None:
            if not cls.replaces_nul:
                raise UserError("the request body contains a NUL character (\\u0000): must have none")
            body = _NUL.sub(rb"\1\\ufffd", body)
        try:
            return cls.model_validate_json(body)
        except ValidationError as e:
            raise request_error(e, cls) from e


# ------------------------------------------------------------------ types of fields
MAX_TEXT = 1024  # characters of a name, a label, a path
MAX_DETAIL = 16_384  # characters of a client's text about the end of a session
MAX_METADATA_PAIRS, MAX_METADATA_BYTES = 256, 2**14  # of the metadata of one object


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("a string without NUL characters")
    return value


def _checkpoint_name(value: str) -> str:
    if not is_name(value):
        raise ValueError(NAME_RULE)
    return value


def _small_metadata(values: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    if info.context == STORED:
        return values
    texts = (value if isinstance(value, str) else _json(value) for value in values.values())
    size = sum(len(text.encode()) for text in (*values, *texts))
    if len(values) > MAX_METADATA_PAIRS or size > MAX_METADATA_BYTES:
        rule = f"at most {MAX_METADATA_PAIRS} pairs with {MAX_METADATA_BYTES} bytes in all"
        raise ValueError(rule, f"{len(values)} pairs with {size} bytes")
    return values


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:  # 1e999 is read as infinity, which JSON cannot write and Postgres does not store
        raise ValueError("JSON in which all numbers are finite") from None


Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT), AfterValidator(_no_nul)]
Label = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_no_nul)]
OptionalText = Annotated[str | None, Field(max_length=MAX_TEXT), AfterValidator(_no_nul)]
Texts = Annotated[tuple[Label, ...], Field(max_length=MAX_METADATA_PAIRS)]
CheckpointName = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_checkpoint_name)]
MetadataText = Annotated[str, AfterValidator(_no_nul)]
Metadata = Annotated[dict[MetadataText, MetadataText], AfterValidator(_small_metadata)]
AnyMetadata = Annotated[dict[str, Any], AfterValidator(_small_metadata)]  # of old SDKs, which send any JSON
