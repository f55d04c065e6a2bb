"""Base classes of the endpoints' JSON models, models that several endpoints share, and the prefixes of URLs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tinkerflow.backend.wire import WireModel

API = "/api/v1"
OPEN_API = "/v1"  # the prefix of the endpoints that other vendors' clients use

Wire = WireModel


class Strict(WireModel, extra="forbid"):
    """Base of bodies that may contain only known fields. Unknown fields are errors, because we would ignore them."""


# ------------------------------------------------------------------ models that several endpoints share
class Cursor(Wire):
    """The position of a page in a list."""

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
    """Filter: sessions of these owners that the caller may see. An owner's name is its project."""

    type: Literal["user"]
    owner_urns: tuple[str, ...] = Field(min_length=1, max_length=10)


Names = Annotated[tuple[str, ...], Field(max_length=1000)]  # in a filter: databases limit a query's parameters
Owner = Annotated[OwnOwner | AccessibleOwner | UserOwner, Field(discriminator="type")]
FinishedBecause = Literal["success", "errored", "interrupted"]


class FinishReason(Wire):
    """Why a session ends."""

    type: FinishedBecause
