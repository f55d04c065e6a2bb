"""Making models, and the operations that train them."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal

from fastapi.responses import Response

from tinkerflow.api.call import Authorised, Call, Router, Wire
from tinkerflow.api.openapi import takes, takes_object, takes_protobuf
from tinkerflow.api.routes.futures import accepted, refuse
from tinkerflow.api.routes.weights import optimizer_config
from tinkerflow.api.submit import content_hash, submit_for_model
from tinkerflow.backend.commands import LoraSpec, Optimizer
from tinkerflow.backend.errors import NotFoundError, UserError
from tinkerflow.backend.ids import model_id
from tinkerflow.backend.journal import Journal, Kind, NewCustomLoss, NewModel, NewRequest, access_hash
from tinkerflow.backend.model_card import ModelCard
from tinkerflow.backend.spec.limits import MAX_SEQ
from tinkerflow.backend.wire import (
    Fields,
    custom_loss_header,
    decode_create_model,
    decode_custom_loss,
    decode_load_model,
    decode_load_weights,
    decode_optim_step,
    dump_custom_loss,
    forward_backward_header,
    hash_token,
    training_tokens,
)

router = Router(busy=8)

_SEED_BITS = 31


class GetInfo(Wire):
    """The model that is asked about."""

    model_id: str


class ModelData(Wire):
    """What a model is made of; tokenizer_id is what AutoTokenizer loads on the client."""

    arch: str
    model_name: str
    tokenizer_id: str


class ModelInfo(Wire):
    """A model. Without model_name the SDK would ask samplers/{id}, and its get_tokenizer() would fail."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int
    model_name: str
    optimizer_config: dict[str, str | int]


# The busiest endpoints come first: routes are tried in order.
@router.post("/forward_backward", openapi_extra=takes_protobuf())
async def forward_backward(call: Authorised) -> Response:
    """Store a chunk. Never a 4xx, which would hang the client: what cannot be stored gets the id of a failure."""
    try:
        return await asyncio.to_thread(_submit_chunk, call, await call.body())
    except UserError as e:
        return accepted(refuse(e.message))


def _submit_chunk(call: Call, body: bytes) -> Response:
    header, limits = forward_backward_header(body), call.services.limits
    if not header.model_id or "\0" in header.model_id or header.seq_id < 1:
        raise UserError(
            f"model_id is {header.model_id!r}, seq_id {header.seq_id}: both must be given, model_id without NUL "
            "characters, seq_id from 1"
        )
    new = NewRequest(
        kind=Kind.FORWARD if header.forward_only else Kind.FORWARD_BACKWARD,
        owner=call.owner,
        payload=body,
        payload_type="proto",
        content_hash=hashlib.sha256(body).hexdigest(),
        model_id=header.model_id,
        seq_id=header.seq_id,
        tokens=training_tokens(body) if limits.queued_tokens else 0,
    )
    return accepted(call.journal.requests.submit(new, limits), model_id=header.model_id)


@router.post("/optim_step", openapi_extra=takes_object())
async def optim_step(call: Authorised) -> Response:
    """Store an optimizer step."""
    return await asyncio.to_thread(submit_for_model, call, Kind.OPTIM_STEP, await call.body(), decode_optim_step)


@router.post("/create_custom_loss", openapi_extra=takes_object())
async def create_custom_loss(call: Authorised) -> Response:
    """Keep a traced loss for its session; what is wrong with the graph fails the future."""
    return await asyncio.to_thread(_keep_loss, call, await call.body())


def _keep_loss(call: Call, body: bytes) -> Response:
    header = custom_loss_header(body)
    name, definition, error = "", "", None
    try:
        loss = decode_custom_loss(body)
        name, definition = loss.name, dump_custom_loss(loss)
    except UserError as e:
        error = e.message
    new = NewCustomLoss(
        session_id=header.session_id,
        owner=call.owner,
        seq_id=header.seq_id,
        name=name,
        definition=definition,
        payload=body,
        content_hash=content_hash(body),
        error=error,
    )
    return accepted(call.journal.losses.submit(new))


@router.post("/create_model", openapi_extra=takes_object())
async def create_model(call: Authorised) -> Response:
    """Make a model with a fresh adapter; its id is `{session}:train:{n}`."""
    return await asyncio.to_thread(_create, call, await call.body(), Kind.CREATE_MODEL)


@router.post("/load_weights", openapi_extra=takes_object())
async def load_weights(call: Authorised) -> Response:
    """With session_id, make a model from a checkpoint (the client works out its id); with model_id, load into that."""
    body = hash_token(await call.body(), access_hash)
    if Fields.parse(body).has("session_id"):
        return await asyncio.to_thread(_create, call, body, Kind.LOAD_MODEL)
    return await asyncio.to_thread(submit_for_model, call, Kind.LOAD_WEIGHTS, body, decode_load_weights)


@dataclass(frozen=True)
class _WantedModel:
    """The model that a request asks for."""

    base_model: str
    spec: LoraSpec
    user_metadata: dict[str, str]
    seed: int | None = None
    optimizer: Optimizer = "adamw"


def _create(call: Call, body: bytes, kind: Kind) -> Response:
    journal, owner = call.journal, call.owner
    values = Fields.parse(body)
    session_id = values.text("session_id")
    new_id = model_id(session_id, values.whole("model_seq_id", 0, MAX_SEQ))
    describe = _fresh if kind is Kind.CREATE_MODEL else _from_checkpoint
    error = None
    try:
        wanted = describe(journal, owner, body)
        _must_be_served(journal, wanted.base_model)
    except UserError as e:
        # The row says what can be said of a model that never came to be; the request says why.
        base_model = values.get("base_model")
        wanted = _WantedModel(base_model if isinstance(base_model, str) else "", LoraSpec(rank=0), {})
        error = e.message
    model = NewModel(
        id=new_id,
        session_id=session_id,
        owner=owner,
        base_model=wanted.base_model,
        rank=wanted.spec.rank,
        train_attn=wanted.spec.train_attn,
        train_mlp=wanted.spec.train_mlp,
        train_unembed=wanted.spec.train_unembed,
        optimizer=wanted.optimizer,
        seed=wanted.seed,
        user_metadata=wanted.user_metadata,
    )
    request = NewRequest(
        kind=kind,
        owner=owner,
        payload=body,
        payload_type="json",
        content_hash=content_hash(body),
        model_id=new_id,
        seq_id=0,
        error=error,
    )
    return accepted(journal.models.create(model, request, call.services.limits), model_id=new_id)


def _fresh(journal: Journal, owner: str, body: bytes) -> _WantedModel:
    asked = decode_create_model(body)
    seed = secrets.randbits(_SEED_BITS) if asked.seed is None else asked.seed
    return _WantedModel(asked.base_model, asked.spec, asked.user_metadata, seed, asked.optimizer)


def _from_checkpoint(journal: Journal, owner: str, body: bytes) -> _WantedModel:
    asked = decode_load_model(body)
    saved = journal.checkpoints.get(asked.path, owner, access=asked.access)
    spec = LoraSpec(saved.rank, saved.train_attn, saved.train_mlp, saved.train_unembed)
    optimizer = saved.optimizer if asked.optimizer else asked.fresh
    return _WantedModel(asked.base_model or saved.base_model, spec, asked.user_metadata, optimizer=optimizer)


def _must_be_served(journal: Journal, base_model: str) -> None:
    names = [row.name for row in journal.base_models.all()]
    if base_model not in names:
        raise NotFoundError(f"base_model is {base_model!r}: must be one that is served here: {', '.join(names)}")


@router.post("/get_info", openapi_extra=takes(GetInfo))
async def get_info(call: Authorised) -> ModelInfo:
    """What a model is: the SDK asks once, right after making it."""
    body = await call.parsed(GetInfo)
    return await asyncio.to_thread(_info, call.journal, call.owner, body.model_id)


def _info(journal: Journal, owner: str, wanted: str) -> ModelInfo:
    model = journal.models.get(wanted, owner)
    cards = {row.name: row.card for row in journal.base_models.all()}
    if model.base_model not in cards:
        raise NotFoundError(f"model {wanted}: its base model {model.base_model!r} is not served here any more")
    card = ModelCard.from_json(cards[model.base_model])
    return ModelInfo(
        model_id=model.id,
        model_data=ModelData(arch=card.architecture, model_name=card.name, tokenizer_id=card.tokenizer_id),
        lora_rank=model.rank,
        optimizer_config=optimizer_config(model.optimizer),
        model_name=card.name,
    )
