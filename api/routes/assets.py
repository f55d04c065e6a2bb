"""Images that a project uploads once, and refers to in its requests by their location."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import datetime
from typing import Any

from fastapi.responses import Response

from tinkerflow.api.call import Authorized, Call, PageLimit, PageOffset, Router
from tinkerflow.api.openapi import takes_bytes
from tinkerflow.api.schemas import Wire
from tinkerflow.backend.core.errors import BodyTooLargeError, NotFoundError, StoreError, UserError
from tinkerflow.backend.core.ids import new_id
from tinkerflow.backend.spec.limits import MAX_ASSET_BYTES
from tinkerflow.backend.wire.images import LOCATIONS

router = Router()

_BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")  # the first bytes of PNG and JPEG files


class AssetStored(Wire):
    """An uploaded image, with its location for requests."""

    asset_id: str
    location: str
    size_bytes: int


class Asset(AssetStored):
    """An image in a list."""

    created_at: datetime


class AssetList(Wire):
    """A list of images, newest first."""

    assets: list[Asset]


@router.post("/assets", openapi_extra=takes_bytes())
async def upload_asset(call: Authorized) -> AssetStored:
    """Store an image, a PNG or JPEG file. Uploading the same file again returns the same location."""
    file = await call.body(MAX_ASSET_BYTES)
    return await call.on_body(len(file), _keep, call, file)


@router.get("/assets")
async def assets(call: Authorized, limit: PageLimit = 100, offset: PageOffset = 0) -> AssetList:
    """The images of the key's project, newest first."""
    found = await asyncio.to_thread(call.journal.assets.page, call.owner, limit=limit, offset=offset)
    return AssetList(assets=[Asset(created_at=one.created_at, **_named(one.id, one.size_bytes)) for one in found])


@router.delete("/assets/{asset_id}", status_code=204)
async def delete_asset(asset_id: str, call: Authorized) -> Response:
    """Delete an image. Requests that were already accepted contain its bytes."""
    await asyncio.to_thread(_delete, call, asset_id)
    return Response(status_code=204)


def _keep(call: Call, file: bytes) -> AssetStored:
    if len(file) > MAX_ASSET_BYTES:
        raise BodyTooLargeError(f"the image has {len(file)} bytes: must be at most {MAX_ASSET_BYTES}")
    if not file.startswith(_BEGINNINGS):
        raise UserError(f"the image begins with {file[:8]!r}: must be a PNG or JPEG file")
    assets, store = call.journal.assets, call.services.store
    digest = hashlib.sha256(call.owner.encode() + b"\0" + file).hexdigest()
    asset_id = f"asset-{digest[:32]}"
    if not assets.begin(asset_id, call.owner, len(file), call.limits).piece:
        name = new_id("put")
        try:
            store.uploads.write_piece(asset_id, name, 0, file)
        except StoreError:
            assets.give_up(asset_id, call.owner)  # otherwise the image would count, but no list would show it
            raise
        try:
            first = assets.arrived(asset_id, call.owner, name, call.key_id)
        except NotFoundError:
            store.uploads.remove_attempt(asset_id, name)  # the image was deleted meanwhile
            raise
        if first != name:
            store.uploads.remove_attempt(asset_id, name)
    return AssetStored(**_named(asset_id, len(file)))


def _named(asset_id: str, size: int) -> dict[str, Any]:
    return {"asset_id": asset_id, "location": f"{LOCATIONS}{asset_id}", "size_bytes": size}


def _delete(call: Call, asset_id: str) -> None:
    assets, store = call.journal.assets, call.services.store
    assets.withdraw(asset_id, call.owner, call.key_id)
    store.uploads.remove_upload(asset_id)  # before the row is deleted, so that no file is orphaned
    if late := assets.forget(asset_id, call.owner):
        store.uploads.remove_attempt(asset_id, late)
