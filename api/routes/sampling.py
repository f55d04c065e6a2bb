"""Sampling sessions and samples."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal

from fastapi.responses import Response
from pydantic import Field

from tinkerflow.api.call import Authorized, Call, Router
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import Wire
from tinkerflow.api.submit import base_model_card, checked, prompt_body, response, submit_sample
from tinkerflow.backend.catalog.model_card import alias_of
from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.core.ids import sampler_id
from tinkerflow.backend.journal import NewSampler
from tinkerflow.backend.wire import NumSamples, OnSampler, SampleBody, parse
from tinkerflow.backend.wire.validation import OptionalText

router = Router(busy=7)


class CreateSamplingSession(Wire):
    """A sampler to open, on a base model or on a saved checkpoint (model_path)."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, lt=2**31)
    base_model: OptionalText = None
    model_path: OptionalText = None


class SamplingSessionCreated(Wire):
    """The id of a new sampler."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSession(Wire):
    """The sampling session that another copy of its client joins."""

    sampling_session_id: str


class SamplingSessionJoined(Wire):
    """client_counter: the number of this copy of the client, which determines its block of sequence ids."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class SamplerDetails(Wire):
    """The weights of a sampler: its base model, and its checkpoint if it has one."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


@router.post("/asample", openapi_extra=takes(OnSampler, SampleBody))
async def asample(call: Authorized) -> Response:
    """Accept a sample request. The response names each of its sequences, because the SDK needs them for the result.

    429: the project has the maximum number of waiting samples. The SDK then waits a second and repeats the request.
    """
    body = await prompt_body(call)
    return await call.on_body(len(body), _submit_sample, call, body)


def _submit_sample(call: Call, body: bytes) -> Response:
    values = parse(body)
    request_id = submit_sample(call, body, values)
    asked, _ = checked(NumSamples.from_values, values)
    count = 0 if asked is None else asked.num_samples
    return response(request_id, sample_sequence_ids=[f"{request_id}-{i}" for i in range(count)])


@router.post("/create_sampling_session", openapi_extra=takes(CreateSamplingSession))
async def create_sampling_session(call: Authorized) -> SamplingSessionCreated:
    """Open a sampler on a base model or on a saved checkpoint."""
    body = await call.parsed(CreateSamplingSession)
    return SamplingSessionCreated(sampling_session_id=await asyncio.to_thread(_open, call, body))


def _open(call: Call, body: CreateSamplingSession) -> str:
    journal, owner, base_model = call.journal, call.owner, body.base_model
    new_id = sampler_id(body.session_id, body.sampling_session_seq_id)
    if body.model_path is not None:
        try:
            saved = journal.checkpoints.get(body.model_path, owner)
        except NotFoundError:
            with suppress(NotFoundError):  # the client repeats a request from before the checkpoint was deleted
                if journal.samplers.get(new_id, owner).model_path == body.model_path:
                    return new_id
            raise
        if saved.unsampled:
            raise UserError(f"model_path is {body.model_path!r}: {saved.unsampled}")
        base_model = base_model or saved.base_model
        if base_model not in (saved.base_model, alias_of(saved.base_model)):
            raise UserError(f"base_model is {base_model!r}: must be {saved.base_model!r}, as in {body.model_path}")
    card = base_model_card(journal, base_model)
    new = NewSampler(new_id, body.session_id, owner, card.name, body.model_path)
    return journal.samplers.open(new, call.limits)


@router.post("/join_sampling_session", openapi_extra=takes(JoinSamplingSession))
async def join_sampling_session(call: Authorized) -> SamplingSessionJoined:
    """Give a copy of a sampling client its own block of sequence ids."""
    body = await call.parsed(JoinSamplingSession)
    clone = await asyncio.to_thread(call.journal.samplers.join, body.sampling_session_id, call.owner)
    return SamplingSessionJoined(client_counter=clone)


@router.get("/samplers/{wanted}", response_model_exclude_none=True)
async def get_sampler(wanted: str, call: Authorized) -> SamplerDetails:
    """The weights of a sampler."""
    row = await asyncio.to_thread(call.journal.samplers.get, wanted, call.owner)
    return SamplerDetails(sampler_id=row.id, base_model=row.base_model, model_path=row.model_path)
