"""What handlers ask for in their signatures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar, cast

from fastapi import Depends, Header, Request
from pydantic import BaseModel, ValidationError

from api.body import read_body
from api.services import Services
from backend.errors import UserError
from backend.journal import Journal

M = TypeVar("M", bound=BaseModel)


def services(request: Request) -> Services:
    """The app's services."""
    return cast(Services, request.app.state.services)


async def current_owner(
    services: Annotated[Services, Depends(services)], x_api_key: Annotated[str | None, Header()] = None
) -> str:
    """The owner behind the request's key; 401 without a good one."""
    return await services.auth.owner(x_api_key)


async def whole_body(request: Request) -> bytes:
    """The request's body, decompressed."""
    return await read_body(request, services(request).settings.max_body_bytes)


def parsed(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """A dependency that reads the JSON body as `model`; UserError names the field and the rule."""

    async def parse(request: Request) -> M:
        body = await whole_body(request)
        try:
            return model.model_validate_json(body)
        except ValidationError as e:
            first = e.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the request body"
            raise UserError(f"{field}: {first['msg']}, not {str(first['input'])[:80]!r}") from e

    return parse


def _journal(request: Request) -> Journal:
    return services(request).journal


ServicesDep = Annotated[Services, Depends(services)]
JournalDep = Annotated[Journal, Depends(_journal)]
Owner = Annotated[str, Depends(current_owner)]
Body = Annotated[bytes, Depends(whole_body)]
