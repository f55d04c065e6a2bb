"""Creates models, and accepts the operations that train them."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any, Literal

from fastapi import HTTPException
from fastapi.responses import Response

from tinkerflow.api.call import Authorized, Call, Router
from tinkerflow.api.openapi import takes, takes_protobuf
from tinkerflow.api.schemas import Wire
from tinkerflow.api.submit import (
    base_model_card,
    checked,
    content_hash,
    refuse,
    response,
    submit_for_model,
    uploaded_files,
)
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.errors import NotFoundError, TooManyError, UserError
from tinkerflow.backend.core.ids import model_id
from tinkerflow.backend.journal import Journal, Kind, NewCustomLoss, NewModel, NewRequest, access_hash
from tinkerflow.backend.spec.commands import LoraSpec
from tinkerflow.backend.spec.history import HISTORY_KEY
from tinkerflow.backend.spec.optimizers import OPTIMIZERS
from tinkerflow.backend.spec.ranks import expert_rank
from tinkerflow.backend.wire import (
    CreateCustomLoss,
    CreateModel,
    CustomLossAddress,
    LoadModel,
    LoadWeights,
    OnModel,
    OnNewModel,
    OptimStepBody,
    dump_custom_loss,
    forward_backward_header,
    hash_token,
    parse,
    read_custom_loss,
    training_tokens,
    with_files_to_train,
)

router = Router(busy=8)

_SEED_BITS = 31
_MOST_OF_A_LOSS = 2**22  # maximum size of a traced loss in bytes


class NamedModel(Wire):
    """The model that a request refers to."""

    model_id: str


class ModelData(Wire):
    """The parts of a model. tokenizer_id: the argument of AutoTokenizer on the client."""

    arch: str
    model_name: str
    tokenizer_id: str


class ModelInfo(Wire):
    """A model. Without model_name the SDK would request samplers/{id}, and its get_tokenizer() would fail."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_data: ModelData
    is_lora: bool
    lora_rank: int
    model_name: str
    optimizer_config: dict[str, str | int]


# The busiest endpoints come first: routes are tried in order.
@router.post("/forward_backward", openapi_extra=takes_protobuf())
async def forward_backward(call: Authorized) -> Response:
    """Accept a chunk. Invalid chunks are never answered with 4xx, which would hang the client: see `refuse`."""
    try:
        body = await call.body(call.services.settings.max_body_bytes)
        return await call.on_body(len(body), _submit_chunk, call, body)
    except TooManyError:
        raise  # nothing was stored yet, and the SDK sends the chunk again
    except UserError as e:
        return response(refuse(e.message))


def _submit_chunk(call: Call, body: bytes) -> Response:
    header, limits = forward_backward_header(body), call.limits
    if not header.model_id or "\0" in header.model_id or header.seq_id < 1:
        raise UserError(
            f"model_id is {header.model_id!r}, seq_id {header.seq_id}: must both be given, model_id without NUL "
            "characters, seq_id from 1"
        )
    filled, error = checked(partial(with_files_to_train, find=partial(uploaded_files, call)), body)
    new = NewRequest(
        kind=Kind.FORWARD if header.forward_only else Kind.FORWARD_BACKWARD,
        owner=call.owner,
        payload=body if filled is None else filled,
        content_hash=hashlib.sha256(body).hexdigest(),
        error=error,
        model_id=header.model_id,
        seq_id=header.seq_id,
        tokens=training_tokens(body) if limits.queued_tokens else 0,
    )
    return response(call.journal.requests.submit(new, limits), model_id=header.model_id)


@router.post("/optim_step", openapi_extra=takes(OnModel, OptimStepBody))
async def optim_step(call: Authorized) -> Response:
    """Accept an optimizer step."""
    return await submit_for_model(call, Kind.OPTIM_STEP, lambda values: OptimStepBody.from_values(values).params)


@router.post("/create_custom_loss", openapi_extra=takes(CustomLossAddress, CreateCustomLoss))
async def create_custom_loss(call: Authorized) -> Response:
    """Store a traced loss for its session. An invalid graph fails the future."""
    body = await call.body(_MOST_OF_A_LOSS)
    return await call.on_body(len(body), _keep_loss, call, body)


def _keep_loss(call: Call, body: bytes) -> Response:
    values = parse(body)
    address = CustomLossAddress.from_values(values)
    loss, error = checked(read_custom_loss, values)
    new = NewCustomLoss(
        session_id=address.session_id,
        owner=call.owner,
        seq_id=address.custom_loss_seq_id,
        name="" if loss is None else loss.name,
        definition="" if loss is None else dump_custom_loss(loss),
        content_hash=content_hash(values),
        error=error,
    )
    return response(call.journal.custom_losses.submit(new, call.limits))


@router.post("/create_model", openapi_extra=takes(OnNewModel, CreateModel))
async def create_model(call: Authorized) -> Response:
    """Create a model with a new adapter. Its id is `{session}:train:{n}`."""
    return await asyncio.to_thread(_create, call, await call.body(), Kind.CREATE_MODEL)


@router.post("/load_weights", openapi_extra=takes(OnNewModel, LoadModel, OnModel))
async def load_weights(call: Authorized) -> Response:
    """Create a model from a checkpoint (with session_id), or load a checkpoint into a model (with model_id)."""
    body = hash_token(await call.body(), access_hash)
    if parse(body).get("session_id") is not None:
        return await asyncio.to_thread(_create, call, body, Kind.LOAD_MODEL)
    return await submit_for_model(call, Kind.LOAD_WEIGHTS, LoadWeights.from_values, body=body)


def _create(call: Call, body: bytes, kind: Kind) -> Response:
    values = parse(body)
    address = OnNewModel.from_values(values)
    new_id = model_id(address.session_id, address.model_seq_id)
    # The description of a model that could not be created. Its request holds the reason.
    known = NewModel(new_id, address.session_id, call.owner, address.base_name, rank=0)
    describe = _fresh if kind is Kind.CREATE_MODEL else _from_checkpoint
    model, error = checked(lambda values: describe(call, known, values), values)
    if model is not None:
        model = replace(model, history=_keeps_history(call, model.user_metadata))
    request = NewRequest(
        kind=kind,
        owner=call.owner,
        payload=body,
        content_hash=content_hash(values),
        model_id=new_id,
        seq_id=0,
        error=error,
    )
    request_id = call.journal.models.create(model or known, request, call.limits)
    return response(request_id, model_id=new_id)


def _keeps_history(call: Call, metadata: Mapping[str, str]) -> bool:
    setting = call.services.settings.history
    return setting == "all" or (setting == "chosen" and metadata.get(HISTORY_KEY, "").lower() == "true")


def _fresh(call: Call, known: NewModel, values: dict[str, Any]) -> NewModel:
    asked = CreateModel.from_values(values)
    card = base_model_card(call.journal, asked.base_model)
    spec = {
        **asdict(asked.lora.spec),
        "expert_rank": expert_rank(asked.lora.rank, card.experts_per_token, call.services.settings.expert_rank),
    }
    seed = secrets.randbits(_SEED_BITS) if asked.lora.seed is None else asked.lora.seed
    model = replace(known, base_model=card.name, seed=seed, optimizer=asked.optimizer, **spec)
    return replace(model, user_metadata=asked.user_metadata)


def _from_checkpoint(call: Call, known: NewModel, values: dict[str, Any]) -> NewModel:
    asked = LoadModel.from_values(values)
    saved = call.journal.checkpoints.get(asked.path, call.owner, access=asked.access)
    base_model = base_model_card(call.journal, asked.base_model or saved.base_model).name
    spec = {field.name: getattr(saved, field.name) for field in fields(LoraSpec)}
    optimizer = saved.optimizer if asked.optimizer else asked.fresh
    made = replace(known, base_model=base_model, optimizer=optimizer, origin=saved.path, **spec)
    return replace(made, user_metadata=asked.user_metadata)


@router.post("/unload_model", openapi_extra=takes(NamedModel))
async def unload_model(call: Authorized) -> Response:
    """Unload a model after its operations. It then no longer counts toward max_live_models, and its session continues.

    410: the model has already ended.
    """
    wanted = (await call.parsed(NamedModel)).model_id
    request_id = await asyncio.to_thread(call.journal.models.request_unload, wanted, "by its client", call.owner)
    if request_id is None:
        raise HTTPException(410, f"model {wanted} has already ended: there is nothing to unload")
    return response(request_id, model_id=wanted)


@router.post("/get_info", openapi_extra=takes(NamedModel))
async def get_info(call: Authorized) -> ModelInfo:
    """The details of a model. The SDK requests them once, right after creating the model."""
    body = await call.parsed(NamedModel)
    return await asyncio.to_thread(_info, call.journal, call.owner, body.model_id)


def _info(journal: Journal, owner: str, wanted: str) -> ModelInfo:
    model = journal.models.get(wanted, owner)
    cards = {row.name: row.card for row in journal.base_models.all()}
    if model.base_model not in cards:
        raise NotFoundError(f"model {wanted}: its base model {model.base_model!r} is no longer served here")
    card = ModelCard.from_json(cards[model.base_model])
    return ModelInfo(
        model_id=model.id,
        model_data=ModelData(arch=card.architecture, model_name=card.name, tokenizer_id=card.tokenizer_id),
        is_lora=model.is_lora,
        lora_rank=model.rank,
        optimizer_config=OPTIMIZERS[model.optimizer].config,
        model_name=card.name,
    )
