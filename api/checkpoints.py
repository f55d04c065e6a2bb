"""Checkpoints as clients see them: names, URLs, details, and the destinations of copies."""

from __future__ import annotations

import asyncio
from datetime import datetime
from email.utils import format_datetime
from typing import Literal

from fastapi.responses import Response

from tinkerflow.api.call import Call
from tinkerflow.api.links import link
from tinkerflow.api.schemas import Wire
from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.journal import CheckpointKind, CheckpointView
from tinkerflow.backend.store import CheckpointPath, Saved, Store

CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
ARCHIVE = "checkpoint_archives"  # the first part of the paths of links to tar archives
CheckpointType = Literal["training", "sampler", "external"]
_TYPES: dict[CheckpointKind, CheckpointType] = {
    CheckpointKind.WEIGHTS: "training",
    CheckpointKind.SAMPLER_WEIGHTS: "sampler",
    CheckpointKind.EXTERNAL_WEIGHTS: "external",
}


class CheckpointDetails(Wire):
    """A saved checkpoint; checkpoint_id is `{kind}/{name}`."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    base_model: str
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str]
    expires_at: datetime | None = None


def kind_of(checkpoint_type: CheckpointType) -> CheckpointKind:
    """The kind of checkpoint that clients call `checkpoint_type`."""
    return next(kind for kind, name in _TYPES.items() if name == checkpoint_type)


def checkpoint(row: CheckpointView) -> CheckpointDetails:
    """The details of a checkpoint for clients."""
    named = {"checkpoint_id": f"{row.kind}/{row.name}", "checkpoint_type": _TYPES[row.kind]}
    return CheckpointDetails.of(row, time=row.created_at, tinker_path=row.path, **named)


def destination(call: Call, project_id: str | None) -> tuple[str, str | None]:
    """The project that owns the copy, and the copy's label there.

    An ordinary key writes only into its own project, so any other project_id is a label, like the labels of sessions.
    An admin key also writes into every project that has keys.
    """
    if project_id is None or project_id == call.owner:
        return call.owner, None
    if call.admin and project_id in {made.project for made in call.journal.keys.all()}:
        return project_id, None
    return call.owner, project_id


async def archive_redirect(call: Call, path: CheckpointPath) -> Response:
    """Redirect to a link to a tar archive of the checkpoint's PEFT files."""
    saved = await asyncio.to_thread(readable, call, path, "archive")
    url, expires = link(call, f"{ARCHIVE}/{inside(path, saved)}")
    return Response(status_code=302, headers={"location": url, "expires": format_datetime(expires, usegmt=True)})


def readable(call: Call, path: CheckpointPath, purpose: str) -> Saved:
    """The commit of a checkpoint that the caller may read. The access is recorded in the audit log."""
    call.journal.checkpoints.get_for_download(str(path), call.owner, purpose, call.key_id)
    return committed(call.services.store, path)


def committed(store: Store, path: CheckpointPath) -> Saved:
    """The commit of a checkpoint. NotFoundError: the store does not contain it."""
    saved = store.find(str(path))
    if saved is None:
        raise NotFoundError(f"checkpoint {path}: it is no longer in the store")
    return saved


def inside(path: CheckpointPath, saved: Saved) -> str:
    """The part of a link that names a checkpoint and the attempt in which it was saved."""
    return f"{path.run_id}/{path.kind}/{path.name}/{saved.attempt}"
