"""What handlers ask for in their signatures: who is calling."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, HTTPException, Query, Request
from pydantic import BaseModel, ValidationError

from tinkerflow.api.auth import Identity
from tinkerflow.api.body import read_body
from tinkerflow.api.services import Services
from tinkerflow.backend.errors import UserError
from tinkerflow.backend.journal import Journal

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
        if rb"\u0000" in body and _holds_nul(body):
            raise UserError("the request body holds a NUL character (\\u0000): must not, the database cannot store it")
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
    call = Call(request, await services.auth.identity(request.headers.get("x-api-key")), services)
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise HTTPException(404, "the URL holds a NUL character (%00): the database has no such name")
    return call


def _holds_nul(body: bytes) -> bool:
    """Whether a JSON text holds a NUL character, and not just the six characters of its escape, escaped themselves."""
    return re.search(rb"(?<!\\)(?:\\\\)*\\u0000", body) is not None


Authorised = Annotated[Call, Depends(authorised)]

PageLimit = Annotated[int, Query(ge=1, le=1000)]
PageOffset = Annotated[int, Query(ge=0, lt=2**63)]  # as far as databases count
