"""Start-up, telemetry and what the server can do."""

from __future__ import annotations

import asyncio
import logging
import re

from fastapi import APIRouter

from api.deps import Authorised
from api.models import Capabilities, SupportedModel, Telemetry, TelemetryAccepted
from backend.model_card import ModelCard

log = logging.getLogger(__name__)
router = APIRouter()

_SECRET = re.compile(r"tml-[\w.~+/=-]+|eyJ[\w.~+/=-]+")


@router.post("/client/config")
@router.post("/client/dynamic_config")
async def client_config() -> dict[str, object]:
    """No flags: each flag the SDK knows promises an endpoint or an encoding, and its defaults are what we have."""
    return {}


@router.post("/telemetry")
async def telemetry(call: Authorised) -> TelemetryAccepted:
    """Note what happened in the client. Events hold request headers, keys among them: those are never looked at."""
    body = await call.parsed(Telemetry)
    for event in body.events:
        message = _SECRET.sub("[key]", event.error_message or "")
        log.debug("%s: %s %s %s %s", body.session_id, event.event, event.event_name, event.error_type, message[:500])
    return TelemetryAccepted()


@router.get("/get_server_capabilities")
async def capabilities(call: Authorised) -> Capabilities:
    """The base models served."""
    cards = [ModelCard.from_json(row.card) for row in await asyncio.to_thread(call.journal.base_models)]
    return Capabilities(
        supported_models=[SupportedModel(model_name=c.name, max_context_length=c.max_context) for c in cards]
    )
