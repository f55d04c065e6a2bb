"""Downloads of a checkpoint's files: routes that make signed links, and the routes that serve these links."""

from __future__ import annotations

import asyncio
from datetime import datetime
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from tinkerflow.api.bytes import ByteSource, archive, send
from tinkerflow.api.call import Authorized, Call, Router
from tinkerflow.api.checkpoints import ARCHIVE, CHECKPOINT, archive_redirect, committed, inside, readable
from tinkerflow.api.links import LIFETIME, Linked, link
from tinkerflow.api.schemas import Wire
from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.journal import CheckpointKind
from tinkerflow.backend.store import CheckpointPath, Saved, Store
from tinkerflow.backend.store.commit import OPTIMIZER

router = Router()
link_router = APIRouter()  # opened by a signed link instead of a key

_FILE = "checkpoint_files"
_ATTEMPT = "{run_id}/{kind}/{name}/{attempt}"
_COMPLETE = "checkpoint_complete"  # push-hf of SDK 0.25 treats an archive without this file as incomplete


class ExternalWeightsUrls(Wire):
    """A URL for each file, by its relative path. All URLs are valid until `expires`."""

    urls: dict[str, str]
    expires: datetime


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(run_id: str, kind: CheckpointKind, name: str, call: Authorized) -> ExternalWeightsUrls:
    """A URL for each file of exported weights that the caller may read, and when the URLs expire."""
    path = CheckpointPath(run_id, kind, name)
    if kind is not CheckpointKind.EXTERNAL_WEIGHTS:
        raise UserError(
            f"checkpoint {path}: only external_weights have URLs; save_weights_external creates them. "
            "The console offers the adapter of any checkpoint as a tar file"
        )
    return await asyncio.to_thread(_urls, call, path)


def _urls(call: Call, path: CheckpointPath) -> ExternalWeightsUrls:
    saved = readable(call, path, "external_weights_urls")
    urls, expires = {}, call.services.clock.now() + LIFETIME
    for file in saved.files:
        url = call.services.store.signed_url(saved.path, saved.attempt, file, int(LIFETIME.total_seconds()))
        if url is None:
            url, expires = link(call, f"{_FILE}/{inside(path, saved)}/{file}")
        urls[file] = url
    return ExternalWeightsUrls(urls=urls, expires=expires)


@router.get(f"{CHECKPOINT}/archive")
async def archive_link(run_id: str, kind: CheckpointKind, name: str, call: Authorized) -> Response:
    """Redirect to a tar archive of the checkpoint's PEFT files, for SDKs without support for external weights."""
    path = CheckpointPath(run_id, kind, name)
    return await archive_redirect(call, path)


async def _linked_to(run_id: str, kind: CheckpointKind, name: str, attempt: str, services: Linked) -> Saved:
    """The commit of a linked checkpoint. NotFoundError: a new save replaced it, or it was deleted or has expired."""

    def read() -> Saved:
        path = CheckpointPath(run_id, kind, name)
        services.journal.checkpoints.get(str(path), None)
        saved = committed(services.store, path)
        if saved.attempt != attempt:
            raise NotFoundError(f"checkpoint {path} was replaced by a new save: request a new link")
        return saved

    return await asyncio.to_thread(read)


LinkedTo = Annotated[Saved, Depends(_linked_to)]


@link_router.head(f"/{_FILE}/{_ATTEMPT}/{{file}}")
@link_router.get(f"/{_FILE}/{_ATTEMPT}/{{file}}")
async def read_file(file: str, saved: LinkedTo, services: Linked, request: Request) -> Response:
    """One file, whole or in part."""
    if file not in saved.files:
        raise NotFoundError(f"checkpoint {saved.path} has no file {file!r}")
    headers = {"content-disposition": f'attachment; filename="{file}"'}
    return send(request, [_segment(services.store, saved, file)], headers, saved.files[file].sha256)


@link_router.head(f"/{ARCHIVE}/{_ATTEMPT}")
@link_router.get(f"/{ARCHIVE}/{_ATTEMPT}")
async def read_archive(name: str, saved: LinkedTo, services: Linked, request: Request) -> Response:
    """A tar archive of the adapter's files, without the optimizer state."""
    files = [(file, _segment(services.store, saved, file)) for file in saved.files if file != OPTIMIZER]
    headers = {"content-disposition": f'attachment; filename="{name}.tar"', "content-type": "application/x-tar"}
    return send(request, archive([*files, (_COMPLETE, ByteSource.of(b""))], saved.created_at), headers, saved.attempt)


def _segment(store: Store, saved: Saved, file: str) -> ByteSource:
    return ByteSource(saved.files[file].size, partial(store.read_range, saved, file))
