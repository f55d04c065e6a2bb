"""Uploads of adapters that were trained elsewhere: a signed link for each of PEFT's files, then a checkpoint.

Files are stored in pieces, so that no request holds more than one piece in memory. They stay in the store until the
upload is finished. A file that is sent again replaces the earlier one.
"""

from __future__ import annotations

import asyncio
import hashlib
from datetime import datetime
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from tinkerflow.api.call import Authorized, Call, Router, Services
from tinkerflow.api.checkpoints import destination
from tinkerflow.api.links import Linked, link
from tinkerflow.api.openapi import takes, takes_bytes
from tinkerflow.api.schemas import Wire
from tinkerflow.api.submit import base_model_card
from tinkerflow.backend.catalog.peft_import import import_adapter, import_path, largest_size, save_import
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.core.errors import BodyTooLargeError, ConflictError, UserError
from tinkerflow.backend.core.ids import IMPORTED, new_id
from tinkerflow.backend.journal import CheckpointSaved, NewUpload, UploadView
from tinkerflow.backend.journal.uploads import anew
from tinkerflow.backend.spec.commands import LoraSpec
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG
from tinkerflow.backend.wire import FinishUpload, StartUpload, parse

router = Router()
link_router = APIRouter()  # opened by a signed link instead of a key

_FILES = (ADAPTER_CONFIG, ADAPTER)
_LINKS = "weights_uploads"
_CONFIG_BYTES = 2**20
_PIECE = 8 * 2**20


class UploadStarted(Wire):
    """An upload. urls: for each file's name, the URL to PUT the file to until `expires`."""

    upload_id: str
    urls: dict[str, str]
    expires: datetime


class UploadFinished(Wire):
    """The path of the checkpoint made from an upload. It is a training checkpoint without optimizer state."""

    tinker_path: str


@router.post("/external_weights_upload_start", openapi_extra=takes(StartUpload))
async def external_weights_upload_start(call: Authorized) -> UploadStarted:
    """Begin the upload of an adapter. Returns links for its files."""
    body = StartUpload.from_values(parse(await call.body()))
    return await asyncio.to_thread(_start, call, body)


@router.post("/external_weights_upload_finish", openapi_extra=takes(FinishUpload))
async def external_weights_upload_finish(call: Authorized) -> UploadFinished:
    """Make a checkpoint from the uploaded files. Repeats return the same path. Refused files can be replaced."""
    body = FinishUpload.from_values(parse(await call.body()))
    return UploadFinished(tinker_path=await call.services.imports.run(call.owner, _finish, call, body.upload_id))


@link_router.put(f"/{_LINKS}/{{upload_id}}/{{file}}", openapi_extra=takes_bytes())
async def upload_file(upload_id: str, file: str, services: Linked, request: Request) -> Response:
    """Receive one file."""
    upload = await asyncio.to_thread(services.journal.uploads.get, upload_id, None)
    if upload.path is not None:
        raise ConflictError(f"upload {upload_id!r} is already finished as {upload.path}: begin another")
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise UserError(f"Content-Encoding is {encoding!r}: must be absent, because files are stored unchanged")
    name = f"{file}@{new_id('put')}"
    most = _CONFIG_BYTES if file == ADAPTER_CONFIG else upload.max_bytes
    before = await asyncio.to_thread(services.journal.uploads.begin_file, upload_id, file, name)
    if before:
        await asyncio.to_thread(services.store.uploads.remove_attempt, upload_id, before)
    try:
        count = await _take(services, request, upload, file, name, most)
        await asyncio.to_thread(services.journal.uploads.arrived, upload_id, file, name, count)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(services.store.uploads.remove_attempt, upload_id, name))
        raise
    return Response()


async def _take(services: Services, request: Request, upload: UploadView, file: str, name: str, most: int) -> int:
    """Write the body to the store in pieces. Returns their number. BodyTooLargeError: the body exceeds `most` bytes."""
    piece, count, size = bytearray(), 0, 0
    pieces = services.memories.pieces

    def write() -> None:
        if services.journal.uploads.get(upload.id, None).files[file][0] != name:
            raise anew(file)
        services.store.uploads.write_piece(upload.id, name, count, bytes(piece))

    if int(request.headers.get("content-length", 0)) > most:
        raise _too_large(file, most)
    share = await pieces.take(upload.owner, 2 * _PIECE)  # the piece, and its copy for the store
    try:
        async with pieces.receiving(share):
            async for part in request.stream():
                size += len(part)
                share.arrived = size
                if size > most:
                    raise _too_large(file, most)
                piece += part
                if len(piece) >= _PIECE:
                    await services.heavy.run(upload.owner, write)
                    count, piece = count + 1, bytearray()
        await services.heavy.run(upload.owner, write)
    finally:
        pieces.give_back(share)
    return count + 1


def _too_large(file: str, most: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"{file} is too large: must have at most {most} bytes for the adapter of this upload")


def _start(call: Call, asked: StartUpload) -> UploadStarted:
    card = base_model_card(call.journal, asked.base_model)
    owner, label = destination(call, asked.destination_project_id)
    spec = asked.lora.spec
    upload_id = new_id("upload")
    links = {file: link(call, f"{_LINKS}/{upload_id}/{file}") for file in _FILES}
    expires = max(expires for _, expires in links.values())
    new = NewUpload(
        id=upload_id,
        owner=owner,
        key_id=call.key_id,
        project_id=label,
        base_model=card.name,
        rank=spec.rank,
        train_attn=spec.train_attn,
        train_mlp=spec.train_mlp,
        train_unembed=spec.train_unembed,
        max_bytes=largest_size(load_config(card.path, name=card.name), spec),
        expires_at=expires,
    )
    call.journal.uploads.start(new, call.limits_of(owner))
    return UploadStarted(upload_id=upload_id, urls={file: url for file, (url, _) in links.items()}, expires=expires)


def _finish(call: Call, upload_id: str) -> str:
    journal, store = call.journal, call.services.store
    upload = journal.uploads.get(upload_id, call.visible())
    if upload.path is not None:
        return upload.path
    if upload.expires_at <= call.services.clock.now():
        raise UserError(f"upload {upload_id!r} has expired at {upload.expires_at:%Y-%m-%d %H:%M} UTC; begin another")
    card = base_model_card(journal, upload.base_model)
    spec = LoraSpec(upload.rank, upload.train_attn, upload.train_mlp, upload.train_unembed)
    config, adapter = (_whole(call, upload, file) for file in _FILES)
    state = import_adapter(load_config(card.path, name=card.name), config, adapter, spec, card.path)
    del adapter
    sent = " ".join([upload.id, *(name for name, _ in upload.files.values())])
    save = partial(save_import, store, upload.id, state, base_model=card.name, owner=upload.owner, request_id=sent)
    try:
        saved = save()
    except ConflictError:  # an interrupted or slower finish saved files that were replaced since
        saved = save(name=f"{IMPORTED}-{hashlib.sha256(sent.encode()).hexdigest()[:8]}")
    try:
        path = journal.uploads.finish(upload, CheckpointSaved.of(saved))
    except ConflictError:
        store.delete(saved.path, saved.attempt)
        raise
    for other in {saved.path, str(import_path(upload.id))} - {path}:
        store.delete(other)
    store.uploads.remove_upload(upload.id)
    return path


def _whole(call: Call, upload: UploadView, file: str) -> bytes:
    name, count = upload.files.get(file, ("", 0))
    if not count:
        raise UserError(f"upload {upload.id!r}: {file} was not uploaded: PUT it to its link, then finish the upload")
    return call.services.store.uploads.read_file(upload.id, name, count)
