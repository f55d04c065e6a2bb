"""The JSON of what was used, and what it would cost."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from tinkerflow.api.models import Wire


class TokenUsage(Wire):
    """Tokens. cached: of prefill only, whether a cache spared them."""

    type: Literal["training", "sampling_prefill", "sampling_sample"]
    cached: bool | None = None
    token_count: int


class CheckpointUsage(Wire):
    """Checkpoints that were saved."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageUsage(Wire):
    """What checkpoints took up; a gigabyte is 10^9 bytes."""

    type: Literal["storage"] = "storage"
    free: bool = False
    gigabyte_hours: float


class UsageEvent(Wire):
    """An hour of one kind of usage. Storage has no session. Costs are there when prices are configured."""

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
    """What is known of a session that used something."""

    user_metadata: dict[str, str]


class BillingUsage(Wire):
    """billing/usage/events: by hour, then the most tokens first, then storage."""

    data: list[UsageEvent]
    sessions: dict[str, UsedSession]


class StorageItem(Wire):
    """What the checkpoints of one project and key take up now."""

    project_id: str
    org_user_urn: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentStorage(Wire):
    """billing/usage/checkpoints/current."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[StorageItem]
