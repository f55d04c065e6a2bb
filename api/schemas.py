"""The bases of the JSON models of the endpoints, how their errors read, and the beginnings of their URLs."""

from __future__ import annotations

import re
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tinkerflow.backend.core.errors import UserError, shown

API = "/api/v1"
OPEN_API = "/v1"  # of the endpoints that other vendors' clients use

M = TypeVar("M", bound=BaseModel)


class Wire(BaseModel):
    """Base of the JSON models. Requests may hold unknown fields.

    Clients write null for fields that they leave out, so null counts as absent wherever it has no meaning. `model_` is
    an ordinary field prefix here, not pydantic's own namespace.
    """

    model_config = ConfigDict(protected_namespaces=(), frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict) or None not in values.values():
            return values
        return {name: value for name, value in values.items() if value is not None or name not in _never_null(cls)}


class Strict(Wire):
    """Base of bodies that hold known fields only. An unknown field would change nothing, so it is refused by name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict) or None not in values.values():
            return values
        known = _names(cls)
        return {name: value for name, value in values.items() if value is not None or name in known}


# ------------------------------------------------------------------ shapes that several endpoints share
class Cursor(Wire):
    """Which part of a list a page is."""

    offset: int
    limit: int
    total_count: int


class OwnOwner(Wire):
    """Filter: sessions of the caller's project."""

    type: Literal["own"] = "own"


class AccessibleOwner(Wire):
    """Filter: every session that the caller may see."""

    type: Literal["accessible"]


class UserOwner(Wire):
    """Filter: sessions of these owners that the caller may see. An owner is named by its project."""

    type: Literal["user"]
    owner_urns: tuple[str, ...] = Field(min_length=1, max_length=10)


Owner = Annotated[OwnOwner | AccessibleOwner | UserOwner, Field(discriminator="type")]
FinishedBecause = Literal["success", "errored", "interrupted"]


class FinishReason(Wire):
    """Why a session ends."""

    type: FinishedBecause


# ------------------------------------------------------------------ reading
@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


@cache
def _never_null(model: type[BaseModel]) -> frozenset[str]:
    """The names of a model's fields that have no meaning for null."""
    return frozenset(
        field.alias or name for name, field in model.model_fields.items() if NoneType not in get_args(field.annotation)
    )


def read_json(model: type[M], body: bytes) -> M:
    """A JSON body as `model`; UserError names the field and the rule."""
    if rb"\u0000" in body and _holds_nul(body):
        raise UserError("the request body holds a NUL character (\\u0000): must not, the database cannot store it")
    try:
        return model.model_validate_json(body)
    except ValidationError as e:
        raise first_broken(e) from e


def first_broken(error: ValidationError) -> UserError:
    """The first error of a body: its field, its rule, and the value if there is one."""
    first = error.errors()[0]
    kind, text = first["type"], first["msg"]
    if kind == "json_invalid":
        return UserError(f"the request body is no JSON: {text.removeprefix('Invalid JSON: ')}")
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    field = "".join(parts).removeprefix(".") or "the request body"
    if kind == "extra_forbidden":
        return UserError(f"{field} is not supported by this endpoint: must be left out")
    given = "" if kind in ("missing", "too_short", "too_long") else f", not {shown(first['input'])}"
    return UserError(f"{field}: {text}{given}")


def _holds_nul(body: bytes) -> bool:
    """Whether a JSON text holds a NUL character, and not just the six characters of an escaped escape sequence."""
    return re.search(rb"(?<!\\)(?:\\\\)*\\u0000", body) is not None
