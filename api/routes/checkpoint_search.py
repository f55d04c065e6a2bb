"""Search for checkpoints."""

from __future__ import annotations

import asyncio

from pydantic import AwareDatetime, Field

from tinkerflow.api.call import Authorized, Router
from tinkerflow.api.checkpoints import CheckpointDetails, CheckpointType, checkpoint, kind_of
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import Names, Owner, OwnOwner, UserOwner, Wire
from tinkerflow.backend.journal import CheckpointQuery

router = Router(busy=1)


class CheckpointCursor(Wire):
    """The last checkpoint of a page, identified by its path. The next page begins after it."""

    last_created_at: AwareDatetime
    last_checkpoint_uuid: str


class SearchCheckpoints(Wire):
    """Filters of a search. A checkpoint must match all of them."""

    project_ids: Names | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    checkpoint_type: CheckpointType | None = None
    owner: Owner = OwnOwner()
    base_models: Names | None = None
    limit: int = Field(default=50, ge=1, le=200)
    cursor: CheckpointCursor | None = None


class FoundCheckpoints(Wire):
    """A page of checkpoints, newest first. next_cursor: absent on the last page."""

    checkpoints: list[CheckpointDetails]
    next_cursor: CheckpointCursor | None = None


@router.post("/checkpoints/search", response_model_exclude_none=True, openapi_extra=takes(SearchCheckpoints))
async def search_checkpoints(call: Authorized) -> FoundCheckpoints:
    """Checkpoints that match all filters, newest first; 404 for a project without a visible session."""
    asked = await call.parsed(SearchCheckpoints)
    query = CheckpointQuery(
        projects=asked.project_ids,
        user_metadata=asked.user_metadata,
        kind=None if asked.checkpoint_type is None else kind_of(asked.checkpoint_type),
        owners=asked.owner.owner_urns if isinstance(asked.owner, UserOwner) else None,
        base_models=asked.base_models,
        limit=asked.limit,
        after=None if asked.cursor is None else (asked.cursor.last_created_at, asked.cursor.last_checkpoint_uuid),
    )
    owner = call.visible("owned" if asked.owner.type == "own" else "accessible")
    found, more = await asyncio.to_thread(call.journal.checkpoint_search.search, query, owner)
    last = found[-1] if more else None
    return FoundCheckpoints(
        checkpoints=[checkpoint(row) for row in found],
        next_cursor=last and CheckpointCursor(last_created_at=last.created_at, last_checkpoint_uuid=last.path),
    )
