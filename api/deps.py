"""What handlers ask for in their signatures: who is calling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError

from api.auth import Identity
from api.body import read_body
from api.services import Services
from backend.errors import UserError
from backend.journal import Journal

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Call:
    """One authorised request: whose rows it may touch, and what the handler works with."""

    request: Request
    identity: Identity
    services: Services

    @property
    def owner(self) -> str:
        """Whose rows this request reads and writes: those of the key's project."""
        return self.identity.owner

    @property
    def key_id(self) -> str:
        """The key's id; "" on a loopback server for which no key was ever made."""
        return self.identity.key_id

    @property
    def admin(self) -> bool:
        """Whether the key may read the audit log and the bills of all projects; always, where no key is needed."""
        return self.identity.admin

    @property
    def journal(self) -> Journal:
        """The journal."""
        return self.services.journal

    async def body(self) -> bytes:
        """The whole body, decompressed; UserError when it is too large or not what its headers say."""
        return await read_body(self.request, self.services.settings.max_body_bytes)

    async def parsed(self, model: type[M]) -> M:
        """The JSON body as `model`; UserError names the field and the rule."""
        body = await self.body()
        try:
            return model.model_validate_json(body)
        except ValidationError as e:
            first = e.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the request body"
            raise UserError(f"{field}: {first['msg']}, not {str(first['input'])[:80]!r}") from e


async def authorised(request: Request) -> Call:
    """The call, when its X-API-Key is good; else HTTPException 401. Every route but healthz depends on this.

    One dependency that does it all: each further one costs a tenth of a millisecond per request.
    """
    services: Services = request.app.state.services
    return Call(request, await services.auth.identity(request.headers.get("x-api-key")), services)


Authorised = Annotated[Call, Depends(authorised)]
