"""Health, telemetry, metrics and the server's capabilities."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Literal

from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from tinkerflow.api.call import Authorized, Router
from tinkerflow.api.metrics import Known
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import Wire
from tinkerflow.api.tokens import TOKEN_PREFIX
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.ids import KEY_PREFIX

log = logging.getLogger(__name__)
router = Router(busy=6)

_MOST_TELEMETRY = 2**22  # bytes
_SECRET = re.compile(rf"(?:{KEY_PREFIX}|{TOKEN_PREFIX})[\w.~+/=-]+")


class TelemetryEvent(Wire):
    """One event. Its other fields are not read, because they may contain API keys."""

    event: str = ""
    event_name: str | None = None
    error_type: str | None = None
    error_message: str | None = None


class Telemetry(Wire):
    """Events of one client, at most a few hundred at a time."""

    session_id: str = ""
    events: tuple[TelemetryEvent, ...] = ()


class TelemetryAccepted(Wire):
    """The response to events that were read."""

    status: Literal["accepted"] = "accepted"


class SupportedModel(Wire):
    """A base model that is served."""

    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True


class Capabilities(Wire):
    """The base models that clients can train and sample."""

    supported_models: list[SupportedModel]


@router.post("/client/config")
async def client_config() -> dict[str, object]:
    """Flags for the SDK. Each flag promises an endpoint or an encoding. The SDK has defaults for all others."""
    return {
        # For older SDKs, at least 0.25 to 0.36: creating a model from a checkpoint takes one request instead of three.
        "create_model_via_load_weights": True,
        "custom_loss_server_side": True,
        # Also set on servers that need no key, because the command `whoami` reads the token.
        "pjwt_auth_enabled": True,
        "sample_use_retrieve_futures": True,
        "sample_join_sampling_session": True,
    }


@router.post("/client/dynamic_config")
async def client_dynamic_config() -> dict[str, object]:
    """Flags that clients refresh every few minutes."""
    return {"sample_cancel_enabled": True}


@router.post("/telemetry", openapi_extra=takes(Telemetry))
async def telemetry(call: Authorized) -> TelemetryAccepted:
    """Log events of the client. Fields that may contain request headers with keys are never read."""
    body = await call.parsed(Telemetry, _MOST_TELEMETRY)
    for event in body.events:
        message = _SECRET.sub("[key]", event.error_message or "")
        log.debug("%s: %s %s %s %s", body.session_id, event.event, event.event_name, event.error_type, message[:500])
    return TelemetryAccepted()


@router.get("/metrics")
async def metrics(call: Authorized) -> Response:
    """Metrics of requests, of the worker groups and of the whole service. No metric is specific to a project."""

    def read() -> bytes:
        journal = call.journal
        samples = sum(journal.queue.waiting_samples().values())
        waiting = {"samples": samples, "models": len(journal.queue.pending_models())}
        bases, observed, parts = journal.base_models.all(), journal.metrics.now(), journal.leases.beats()
        return call.services.metrics.page(Known(bases, waiting, observed, parts, call.services.clock.now()))

    return Response(await asyncio.to_thread(read), media_type=CONTENT_TYPE_LATEST)


@router.get("/get_server_capabilities")
async def capabilities(call: Authorized) -> Capabilities:
    """The served base models. The embedded one's name is its folder, because clients load its tokenizer there."""
    cards = [ModelCard.from_json(row.card) for row in await asyncio.to_thread(call.journal.base_models.all)]
    return Capabilities(
        supported_models=[SupportedModel(model_name=c.name, max_context_length=c.max_context) for c in cards]
    )
