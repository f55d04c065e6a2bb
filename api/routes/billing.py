"""What was used, by the hour, session and base model; an admin key sees every project's.

Forward-only passes count as training: the SDK's usage has no other kind for them ("tokens processed by forward/backward
passes"). Prompts count once, however many sequences are sampled from one. The user is the key that made the session.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from fastapi import APIRouter

from tinkerflow.api import billing_models as models
from tinkerflow.api.deps import Authorised
from tinkerflow.api.scope import visible
from tinkerflow.backend.errors import UserError
from tinkerflow.backend.journal import StoredUsage, Usage, UsageKind, plain_metadata
from tinkerflow.backend.settings import Settings

router = APIRouter()

HOUR = timedelta(hours=1)
LONGEST = timedelta(days=14)
GIGABYTE = 10**9
MONTH_HOURS = 720  # the SDK's: a gigabyte-month is 720 gigabyte-hours


@router.get("/billing/usage/events", response_model_exclude_none=True)
async def usage(call: Authorised, starting_on: datetime, ending_before: datetime) -> models.BillingUsage:
    """The usage of the hours in [starting_on, ending_before): 14 days at most. A time without a zone is UTC."""
    start, end = _hour("starting_on", starting_on), _hour("ending_before", ending_before)
    if not timedelta(0) < end - start <= LONGEST:
        raise UserError(f"ending_before is {end.isoformat()}: must be after starting_on, and at most 14 days after it")
    settings = call.services.settings

    def read() -> models.BillingUsage:
        used = call.journal.usage(visible(call), start, end)
        stored = call.journal.stored(visible(call), start, end)
        events = [_used(one, settings) for one in used] + [_stored(one, settings) for one in stored]
        return models.BillingUsage(
            data=sorted(events, key=lambda event: event.bucket_start),
            sessions={
                one.session_id: models.UsedSession(user_metadata=plain_metadata(one.user_metadata)) for one in used
            },
        )

    return await asyncio.to_thread(read)


@router.get("/billing/usage/checkpoints/current", response_model_exclude_none=True)
async def current_storage(call: Authorised, project_id: str | None = None) -> models.CurrentStorage:
    """What checkpoints take up now, by project and key; of one project when project_id is given."""
    rate = call.services.settings.price_storage or None
    rows = await asyncio.to_thread(call.journal.stored_now, visible(call), project_id)
    items = [
        models.StorageItem(
            project_id=row.project,
            org_user_urn=row.key_id or None,
            user_name=row.key_name,
            checkpoint_count=row.checkpoints,
            size_bytes=row.size_bytes,
            size_gigabytes=row.size_bytes / GIGABYTE,
            estimated_monthly_cost_usd=None if rate is None else rate * row.size_bytes / GIGABYTE,
        )
        for row in rows
    ]
    return models.CurrentStorage(effective_rate_usd_per_gigabyte_month=rate, data=items)


def _hour(name: str, moment: datetime) -> datetime:
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    if moment.minute or moment.second or moment.microsecond:
        raise UserError(f"{name} is {moment.isoformat()}: must be a whole hour in UTC")
    return moment


def _used(used: Usage, settings: Settings) -> models.UsageEvent:
    rate, info = _kind(used.kind, used.quantity, settings)
    return models.UsageEvent(
        bucket_start=used.bucket_start,
        bucket_end=used.bucket_start + HOUR,
        base_model=used.base_model,
        user_id=used.key_id or None,
        user_name=used.key_name,
        session_id=used.session_id,
        project_id=used.project,
        estimated_cost_usd=rate * used.quantity / 1e6 if rate else None,
        effective_rate_usd_per_million_tokens=rate or None,
        event_info=info,
    )


def _kind(kind: UsageKind, count: int, settings: Settings) -> tuple[float, models.TokenUsage | models.CheckpointUsage]:
    """The price of a million tokens (0: none configured), and what the client is told."""
    match kind:
        case UsageKind.TRAINING:
            return settings.price_training, models.TokenUsage(type="training", token_count=count)
        case UsageKind.SAMPLE:
            return settings.price_sample, models.TokenUsage(type="sampling_sample", token_count=count)
        case UsageKind.PREFILL:
            return settings.price_prefill, models.TokenUsage(type="sampling_prefill", cached=False, token_count=count)
        case UsageKind.CACHED_PREFILL:
            cached = models.TokenUsage(type="sampling_prefill", cached=True, token_count=count)
            return settings.price_cached_prefill, cached
        case UsageKind.CHECKPOINT:
            return 0.0, models.CheckpointUsage(count=count)


def _stored(stored: StoredUsage, settings: Settings) -> models.UsageEvent:
    amount, rate = stored.byte_hours / GIGABYTE, settings.price_storage
    return models.UsageEvent(
        bucket_start=stored.bucket_start,
        bucket_end=stored.bucket_start + HOUR,
        base_model=stored.base_model,
        user_id=stored.key_id or None,
        user_name=stored.key_name,
        project_id=stored.project,
        estimated_cost_usd=rate * amount / MONTH_HOURS if rate else None,
        effective_rate_usd_per_gigabyte_month=rate or None,
        event_info=models.StorageUsage(gigabyte_hours=amount),
    )
