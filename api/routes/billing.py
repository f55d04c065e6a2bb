"""Usage by hour, session and base model. An admin key sees the usage of all projects.

Forward-only passes count as training, because the SDK has no other kind of usage for them. A prompt counts once,
however many sequences are sampled from it. The user of a session is the key that created it.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from tinkerflow.api.call import Authorized, Router
from tinkerflow.api.schemas import Wire
from tinkerflow.backend.core.errors import UserError, broken
from tinkerflow.backend.journal import StoredUsage, Usage, UsageKind, plain_metadata
from tinkerflow.backend.settings import Settings

router = Router(busy=1)

HOUR = timedelta(hours=1)
LONGEST = timedelta(days=14)
GIGABYTE = 10**9
_PRICED = {  # kinds of usage, by the column of the vendor's price list
    "prefill": UsageKind.PREFILL,
    "cached_prefill": UsageKind.CACHED_PREFILL,
    "sample": UsageKind.SAMPLE,
    "train": UsageKind.TRAINING,
}
MONTH_HOURS = 720  # the SDK's unit: a gigabyte-month is 720 gigabyte-hours


class TokenUsage(Wire):
    """The number of tokens. cached: for prefill only, whether a prefix cache held them."""

    type: Literal["training", "sampling_prefill", "sampling_sample"]
    cached: bool | None = None
    token_count: int


class CheckpointUsage(Wire):
    """The number of checkpoints saved."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageUsage(Wire):
    """The storage used by checkpoints. A gigabyte is 10^9 bytes."""

    type: Literal["storage"] = "storage"
    free: bool = False
    gigabyte_hours: float


class UsageEvent(Wire):
    """One kind of usage within an hour. Storage has no session. Costs are set only if prices are configured."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: TokenUsage | CheckpointUsage | StorageUsage


class UsedSession(Wire):
    """The metadata of a session with usage."""

    user_metadata: dict[str, str]


class BillingUsage(Wire):
    """Usage sorted by hour. Within an hour, the largest numbers of tokens come first, and storage comes last."""

    data: list[UsageEvent]
    sessions: dict[str, UsedSession]


class StorageItem(Wire):
    """The current storage of the checkpoints of one project and key."""

    project_id: str
    org_user_urn: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentStorage(Wire):
    """All storage currently in use, and its price if one is configured."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[StorageItem]


class ModelPrices(Wire):
    """The prices of one base model in US dollars per million tokens ("$1.5"), in the form of the vendor's price list.

    Only configured prices are set.
    """

    tinker_id: str
    prefill: str | None = None
    cached_prefill: str | None = None
    sample: str | None = None
    train: str | None = None


@router.get("/billing/prices", response_model_exclude_none=True)
async def prices(call: Authorized) -> list[ModelPrices]:
    """The prices of each served base model. Programs of tinker-cookbook compute the costs of their steps from them."""
    settings = call.services.settings
    listed = {column: f"${price}" for column, kind in _PRICED.items() if (price := _price(kind, settings))}
    names = await asyncio.to_thread(lambda: [row.name for row in call.journal.base_models.all()])
    return [ModelPrices(tinker_id=name, **listed) for name in names]


@router.get("/billing/usage/events", response_model_exclude_none=True)
async def usage(call: Authorized, starting_on: datetime, ending_before: datetime) -> BillingUsage:
    """The usage of the hours in [starting_on, ending_before), at most 14 days. A time without a zone is UTC."""
    start, end = _hour("starting_on", starting_on), _hour("ending_before", ending_before)
    if not timedelta(0) < end - start <= LONGEST:
        raise UserError(f"ending_before is {end.isoformat()}: must be after starting_on, and at most 14 days after it")
    settings = call.services.settings

    def read() -> BillingUsage:
        used = call.journal.usage.hourly(call.visible(), start, end)
        stored = call.journal.usage.stored(call.visible(), start, end)
        events = [_used(one, settings) for one in used] + [_stored(one, settings) for one in stored]
        return BillingUsage(
            data=sorted(events, key=lambda event: event.bucket_start),
            sessions={one.session_id: UsedSession(user_metadata=plain_metadata(one.user_metadata)) for one in used},
        )

    return await asyncio.to_thread(read)


@router.get("/billing/usage/checkpoints/current", response_model_exclude_none=True)
async def current_storage(call: Authorized, project_id: str | None = None) -> CurrentStorage:
    """The current storage of checkpoints, by project and key; with project_id, only that project's."""
    rate = call.services.settings.price_storage or None
    rows = await asyncio.to_thread(call.journal.usage.stored_now, call.visible(), project_id)
    items = [
        StorageItem(
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
    return CurrentStorage(effective_rate_usd_per_gigabyte_month=rate, data=items)


def _hour(name: str, moment: datetime) -> datetime:
    try:
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError:  # the time in UTC is outside the calendar
        raise broken(name, moment.isoformat(), "a time within the years 1 to 9999 in UTC") from None
    if moment.minute or moment.second or moment.microsecond:
        raise UserError(f"{name} is {moment.isoformat()}: must be a whole hour in UTC")
    return moment


def _event(of: Usage | StoredUsage, **more: Any) -> UsageEvent:
    return UsageEvent(
        bucket_start=of.bucket_start,
        bucket_end=of.bucket_start + HOUR,
        base_model=of.base_model,
        user_id=of.key_id or None,
        user_name=of.key_name,
        project_id=of.project,
        **more,
    )


def _used(used: Usage, settings: Settings) -> UsageEvent:
    rate = _price(used.kind, settings)
    return _event(
        used,
        session_id=used.session_id,
        estimated_cost_usd=rate * used.quantity / 1e6 if rate else None,
        effective_rate_usd_per_million_tokens=rate or None,
        event_info=_info(used.kind, used.quantity),
    )


def _price(kind: UsageKind, settings: Settings) -> float:
    """The price of a million tokens; 0 if it is not configured, or if the usage is not counted in tokens."""
    return float(getattr(settings, f"price_{kind}", 0.0))


def _info(kind: UsageKind, count: int) -> TokenUsage | CheckpointUsage:
    """The usage in the client's form."""
    match kind:
        case UsageKind.TRAINING:
            return TokenUsage(type="training", token_count=count)
        case UsageKind.SAMPLE:
            return TokenUsage(type="sampling_sample", token_count=count)
        case UsageKind.PREFILL | UsageKind.CACHED_PREFILL:
            cached = kind is UsageKind.CACHED_PREFILL
            return TokenUsage(type="sampling_prefill", cached=cached, token_count=count)
        case UsageKind.CHECKPOINT:
            return CheckpointUsage(count=count)


def _stored(stored: StoredUsage, settings: Settings) -> UsageEvent:
    amount, rate = stored.byte_hours / GIGABYTE, settings.price_storage
    return _event(
        stored,
        estimated_cost_usd=rate * amount / MONTH_HOURS if rate else None,
        effective_rate_usd_per_gigabyte_month=rate or None,
        event_info=StorageUsage(gigabyte_hours=amount),
    )
