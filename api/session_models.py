"""The JSON of looking at sessions: one, many, a search."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from tinkerflow.api.models import Wire

FinishedBecause = Literal["success", "errored", "interrupted"]


# ------------------------------------------------------------------ requests
class AssignProject(Wire):
    """sessions/{id}/project."""

    project_id: str = Field(min_length=1, max_length=128)


class PlainStatus(Wire):
    """Sessions in a status that needs no more words."""

    type: Literal["active", "cancelled", "failed"]


class ClientFinishedStatus(Wire):
    """Sessions whose client said that it was done, for one of these reasons."""

    type: Literal["client_finished"]
    reasons: tuple[FinishedBecause, ...] | None = Field(default=None, min_length=1)


class OwnOwner(Wire):
    """The caller's project's sessions."""

    type: Literal["own"] = "own"


class AccessibleOwner(Wire):
    """All that the caller may see."""

    type: Literal["accessible"]


class UserOwner(Wire):
    """These owners' sessions, as far as the caller may see them. An owner is named by its project."""

    type: Literal["user"]
    owner_urns: tuple[str, ...] = Field(min_length=1, max_length=10)


class SearchCursor(Wire):
    """Where a page ended."""

    last_created_at: AwareDatetime
    last_session_id: str


class SearchSessions(Wire):
    """sessions/search."""

    session_id: str | None = None
    project_ids: tuple[str, ...] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: str | None = Field(default=None, min_length=1)
    owner: Annotated[OwnOwner | AccessibleOwner | UserOwner, Field(discriminator="type")] = OwnOwner()
    statuses: tuple[Annotated[PlainStatus | ClientFinishedStatus, Field(discriminator="type")], ...] | None = Field(
        default=None, min_length=1
    )
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None


# ------------------------------------------------------------------ answers
class Session(Wire):
    """sessions/{id}."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str]
    display_name: str | None = None


class SessionIds(Wire):
    """sessions, newest first."""

    sessions: list[str]


class Active(Wire):
    """Its client is there."""

    type: Literal["active"] = "active"


class Cancelled(Wire):
    """Its client fell silent, and nothing had failed."""

    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class FinishReason(Wire):
    """What its client said."""

    type: FinishedBecause


class ClientFinished(Wire):
    """Its client said that it was done."""

    type: Literal["client_finished"] = "client_finished"
    reason: FinishReason
    detail: str | None = None


class FailedReason(Wire):
    """What failed: the id that belongs to the type."""

    type: Literal["request", "training_run", "sampling_session"]
    request_id: str | None = None
    request_type: str | None = None
    training_run_id: str | None = None
    sampling_session_id: str | None = None


class Failed(Wire):
    """Its client fell silent after something had failed."""

    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: FailedReason
    message: str


class SessionSummary(Wire):
    """A session that was found. project_id is its label, or its owner when it has none."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: Active | Cancelled | ClientFinished | Failed
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str]
    checkpoint_storage_bytes: int


class FoundSessions(Wire):
    """sessions/search, newest first."""

    sessions: list[SessionSummary]
    next_cursor: SearchCursor | None = None


class TraceExport(Wire):
    """sessions/{id}/trace_export: always ready, for the trace is made when it is downloaded."""

    status: Literal["ready"] = "ready"
    url: str


class AuditEntry(Wire):
    """Something that was done."""

    timestamp: datetime
    event: str
    event_details: dict[str, object]
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLog(Wire):
    """audit, sorted by time."""

    entries: list[AuditEntry]
