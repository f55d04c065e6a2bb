"""The models that can be used with the OpenAI-compatible endpoints (`/v1/models`)."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from tinkerflow.api.call import Authorized, Router
from tinkerflow.api.endpoints.targets import Listed, find, list_models
from tinkerflow.api.schemas import OPEN_API, Wire
from tinkerflow.backend.core.errors import UserError

router = Router(busy=3, at=OPEN_API)


class ModelShown(Wire):
    """A model that requests can name, with the fields of both OpenAI and Anthropic. root: the weights behind the name.

    parent: the base model of an adapter. max_model_len: the most tokens in a prompt and its answer.
    """

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"
    display_name: str
    created: int
    created_at: datetime
    max_model_len: int
    owned_by: str
    root: str
    parent: str | None = None


class ModelList(Wire):
    """A list of models."""

    object: Literal["list"] = "list"
    data: list[ModelShown]


@router.get("/models")
async def get_models(call: Authorized) -> ModelList:
    """Base models, champions, and the project's newest weights for sampling."""
    return ModelList(data=[_shown(found) for found in await list_models(call)])


@router.get("/models/{model:path}")
async def get_model(model: str, call: Authorized) -> ModelShown:
    """One model, by any name that requests accept as `model`."""
    return _shown(await find(call, model))


@router.post("/embeddings")
async def refuse_embeddings(call: Authorized) -> ModelShown:
    """Refuse the request: the models served here generate text and have no embeddings."""
    raise UserError("/v1/embeddings is not supported: the served models generate text and have no embeddings")


def _shown(found: Listed) -> ModelShown:
    parent = None if found.name == found.base_model else found.base_model
    return ModelShown(
        id=found.name,
        display_name=found.name,
        created=int(found.created_at.timestamp()),
        created_at=found.created_at,
        max_model_len=found.context,
        owned_by=found.owned_by,
        root=found.root,
        parent=parent,
    )
