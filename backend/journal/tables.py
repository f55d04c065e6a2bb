"""The journal's tables, and the states of their rows. The tables of metrics, events and histories are in other files.

Only the aggregates read and write rows. Their callers get frozen dataclasses.
"""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

import sqlalchemy as sa
from sqlmodel import Field, col

from tinkerflow.backend.core.errors import Category, StateLostError, UserError
from tinkerflow.backend.journal.database import JSON_BYTES, NAME_BYTES, CutText, Json, Table, Text, UtcDateTime

PayloadType = Literal["json", "proto"]


# ------------------------------------------------------------------ states
class RequestState(StrEnum):
    """pending -> done | failed. `failed` is final; `done` becomes `failed` when the result is dropped."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class SessionState(StrEnum):
    """active -> finished (by the client) | expired (its heartbeats stopped)."""

    ACTIVE = "active"
    FINISHED = "finished"
    EXPIRED = "expired"


class ModelState(StrEnum):
    """creating -> live | failed; creating | live -> lost | unloaded; lost | failed -> live when revived."""

    CREATING = "creating"
    LIVE = "live"
    LOST = "lost"
    UNLOADED = "unloaded"
    FAILED = "failed"


TAKES_WORK = (ModelState.CREATING, ModelState.LIVE)


class SamplerState(StrEnum):
    """live -> closed (its session ended)."""

    LIVE = "live"
    CLOSED = "closed"


class UsageKind(StrEnum):
    """The kinds of usage, counted in tokens, or for CHECKPOINT in saved checkpoints."""

    TRAINING = "training"  # tokens of forward_backward and forward: the SDK uses one kind for both
    PREFILL = "prefill"  # computed prompt tokens, once for all sequences of a request
    CACHED_PREFILL = "cached_prefill"  # prompt tokens of all sequences but the first, which reuse the computation
    SAMPLE = "sample"
    CHECKPOINT = "checkpoint"


# ------------------------------------------------------------------ errors of requests after an end
def session_over(session_id: str, state: str, detail: str | None) -> tuple[str, Category]:
    """The error of a request in a session that has ended: text and category."""
    return f"session {session_id} is {state}" + (f": {detail}" if detail else ""), UserError.category


def model_ended(model_id: str, state: ModelState, detail: str | None) -> tuple[str, Category]:
    """The error of a request for a model that has ended: text and category."""
    if state is ModelState.LOST:
        advice = "create it again from its last checkpoint"
        return f"model {model_id} was lost: {detail}; {advice}", StateLostError.category
    word = "was unloaded" if state is ModelState.UNLOADED else "was never created"
    return f"model {model_id} {word}: {detail}", UserError.category


def sampler_ended(sampler_id: str, detail: str | None) -> tuple[str, Category]:
    """The error of a request for a sampler that is closed: text and category."""
    return f"sampler {sampler_id} is closed: {detail}", UserError.category


# ------------------------------------------------------------------ tables
def _partial(name: str, columns: str, where: str) -> sa.Index:
    """An index that contains only the rows that match `where`."""
    on_sqlite = re.sub(r"\b(archives|replays|interactive)\b", r"\1 = 1", where)  # SQLite has no boolean type
    return sa.Index(name, *columns.split(), sqlite_where=sa.text(on_sqlite), postgresql_where=sa.text(where))


def _count() -> Any:
    """A counter that starts at 0."""
    return Field(default=0, sa_type=sa.BigInteger, sa_column_kwargs={"server_default": "0"})


class ApiKey(Table, table=True):
    """An API key: the SHA-256 of its 256 random bits. The key itself is not stored."""

    __tablename__ = "api_key"

    id: str = Field(primary_key=True, sa_type=Text())
    key_hash: str = Field(unique=True, sa_type=Text())
    prefix: str = Field(sa_type=Text(NAME_BYTES))
    name: str = Field(sa_type=Text(NAME_BYTES))
    project: str = Field(sa_type=Text(NAME_BYTES))
    admin: bool
    created_at: datetime = Field(sa_type=UtcDateTime)
    last_used_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    revoked_at: datetime | None = Field(default=None, sa_type=UtcDateTime)


class AuditEvent(Table, table=True):
    """An entry of the audit log (audit.AuditView). Rows never change. actor: "" in rows of earlier releases."""

    __tablename__ = "audit_event"
    __table_args__ = (sa.Index("ix_audit_event_owner_at", "owner", "at"),)

    id: int | None = Field(default=None, primary_key=True)
    owner: str = Field(sa_type=Text(NAME_BYTES))
    at: datetime = Field(sa_type=UtcDateTime, index=True)
    event: str = Field(sa_type=Text())
    actor: str = Field(default="", sa_column_kwargs={"server_default": ""}, sa_type=Text(NAME_BYTES))
    model_id: str | None = Field(default=None, sa_type=Text())
    tinker_path: str | None = Field(default=None, sa_type=Text(NAME_BYTES))
    purpose: str | None = Field(default=None, sa_type=Text(NAME_BYTES))
    details: dict[str, object] = Field(sa_type=Json())


class EndedToken(Table, table=True):
    """The SHA-256 of a token that was signed out before it expired. The row is deleted after the token's expiry."""

    __tablename__ = "ended_token"

    token_hash: str = Field(primary_key=True, sa_type=Text())
    expires_at: datetime = Field(sa_type=UtcDateTime, index=True)


class BaseModelRow(Table, table=True):
    """A base model that the engine serves.

    progress: why its requests wait, or None. compile_status: the programs that its worker group has compiled, a
    CompileStatus (backend/spec/commands.py) as JSON. worker_group: the GroupInfo of its worker group, as JSON.
    """

    __tablename__ = "base_model"

    name: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    card: str = Field(sa_type=Text(JSON_BYTES))
    registered_at: datetime = Field(sa_type=UtcDateTime)
    progress: str | None = Field(default=None, sa_type=CutText())
    compile_status: str | None = Field(default=None, sa_type=Text(JSON_BYTES))
    worker_group: str | None = Field(default=None, sa_type=Text(JSON_BYTES))


class ServiceSecret(Table, table=True):
    """Random bytes that all processes of the service share; see keys.py."""

    __tablename__ = "service_secret"

    name: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    value: bytes
    created_at: datetime = Field(sa_type=UtcDateTime)


class Session(Table, table=True):
    """A client's session. Its models and samplers end with it."""

    __tablename__ = "session"
    __table_args__ = (
        sa.Index("ix_session_state_last_seen_at", "state", "last_seen_at"),
        sa.Index("ix_session_owner_created_at", "owner", "created_at"),
    )

    id: str = Field(primary_key=True, sa_type=Text())
    owner: str = Field(sa_type=Text(NAME_BYTES))
    key_id: str = Field(sa_type=Text())
    tags: list[str] = Field(sa_type=Json())
    user_metadata: dict[str, object] = Field(sa_type=Json())
    sdk_version: str = Field(sa_type=Text(NAME_BYTES))
    project_id: str | None = Field(default=None, sa_type=Text(NAME_BYTES))
    display_name: str | None = Field(default=None, sa_type=Text(NAME_BYTES))
    state: str = Field(sa_type=Text())
    detail: str | None = Field(default=None, sa_type=CutText())
    finish_reason: str | None = Field(default=None, sa_type=Text(NAME_BYTES))
    failure: dict[str, str | None] | None = Field(default=None, sa_type=Json(none_as_null=True))
    created_at: datetime = Field(sa_type=UtcDateTime)
    last_seen_at: datetime = Field(sa_type=UtcDateTime)
    ended_at: datetime | None = Field(default=None, sa_type=UtcDateTime)


class Model(Table, table=True):
    """A training run. next_seq: the next seq_id to execute. Submits and answers synchronize on this row's lock.

    progress: why its requests wait during a restore. paused: why a person paused it. history: whether its requests are
    kept in the store. archived, deleted_at: a person hid or deleted it. origin: the checkpoint that it began with, or
    None. origin_run: the run in that path. flow_run: the id of its flow run in Prefect.
    """

    __tablename__ = "model"
    __table_args__ = (
        sa.Index("ix_model_state_base_model", "state", "base_model"),
        sa.Index("ix_model_owner_state", "owner", "state"),
        _partial("ix_model_origin_run", "origin_run", "origin_run IS NOT NULL"),
    )

    id: str = Field(primary_key=True, sa_type=Text())
    session_id: str = Field(foreign_key="session.id", index=True, sa_type=Text())
    owner: str = Field(sa_type=Text(NAME_BYTES))
    base_model: str = Field(sa_type=Text(NAME_BYTES))
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    expert_rank: int | None = None
    optimizer: str = Field(sa_type=Text())
    seed: int | None = Field(default=None, sa_type=sa.BigInteger)
    user_metadata: dict[str, str] = Field(sa_type=Json())
    state: str = Field(sa_type=Text())
    detail: str | None = Field(default=None, sa_type=CutText())
    progress: str | None = Field(default=None, sa_type=CutText())
    paused: str | None = Field(default=None, sa_type=CutText())
    next_seq: int = Field(sa_type=sa.BigInteger)
    step: int
    created_at: datetime = Field(sa_type=UtcDateTime)
    last_request_at: datetime = Field(sa_type=UtcDateTime)
    history: bool = Field(default=False, sa_column_kwargs={"server_default": sa.false()})
    archived: bool = Field(default=False, sa_column_kwargs={"server_default": sa.false()})
    origin: str | None = Field(default=None, sa_type=Text(NAME_BYTES))
    origin_run: str | None = Field(default=None, sa_type=Text(NAME_BYTES))
    flow_run: str | None = Field(default=None, sa_type=Text())
    deleted_at: datetime | None = Field(default=None, sa_type=UtcDateTime)


class SamplerRow(Table, table=True):
    """A sampling session of a snapshot, of a checkpoint, or of the base model.

    last_completion: the number of the last transaction that answered requests (results.py). clones: the number of
    client copies that have joined.
    """

    __tablename__ = "sampler"
    __table_args__ = (sa.Index("ix_sampler_state_base_model", "state", "base_model"),)

    id: str = Field(primary_key=True, sa_type=Text())
    session_id: str = Field(foreign_key="session.id", index=True, sa_type=Text())
    owner: str = Field(index=True, sa_type=Text(NAME_BYTES))
    base_model: str = Field(sa_type=Text(NAME_BYTES))
    model_path: str | None = Field(default=None, sa_type=Text(NAME_BYTES))
    snapshot_id: str | None = Field(default=None, sa_type=Text())
    state: str = Field(sa_type=Text())
    detail: str | None = Field(default=None, sa_type=CutText())
    created_at: datetime = Field(sa_type=UtcDateTime)
    last_completion: int = Field(sa_type=sa.BigInteger)
    clones: int


class Request(Table, table=True):
    """One operation with its payload and answer. The two unique constraints decide between concurrent replays.

    An unload has no seq_id, because the service creates it without the client's counter. NULLs are distinct.
    The partial indexes contain only requests that wait, have bytes to drop, or may be replayed, so they stay small
    while the table grows. replays: a restore may need the payload. True until two snapshots contain the request, and
    while its published weights are not stored. archives: the request is still missing in the history of its run.
    """

    __tablename__ = "request"
    __table_args__ = (
        sa.UniqueConstraint("model_id", "seq_id"),
        sa.UniqueConstraint("sampler_id", "seq_id"),
        _partial(
            "ix_request_pending_of_model", "model_id seq_id created_at", "state = 'pending' AND model_id IS NOT NULL"
        ),
        _partial("ix_request_pending_samples", "created_at sampler_id", "state = 'pending' AND sampler_id IS NOT NULL"),
        _partial("ix_request_pending_interactive", "created_at sampler_id", "state = 'pending' AND interactive"),
        # `state` is in the index for SQLite, which otherwise reads the row to recheck the index's condition.
        _partial("ix_request_pending_of_owner", "owner kind waiting_tokens waiting_bytes state", "state = 'pending'"),
        _partial("ix_request_completions", "sampler_id completion seq_id", "completion IS NOT NULL"),
        _partial("ix_request_finished_with_bytes", "finished_at", "dropped_at IS NULL AND finished_at IS NOT NULL"),
        _partial("ix_request_replays", "model_id seq_id", "replays"),
        _partial("ix_request_archives", "model_id seq_id finished_at waiting_bytes", "archives"),
    )

    id: str = Field(primary_key=True, sa_type=Text())
    kind: str = Field(sa_type=Text())
    owner: str = Field(sa_type=Text(NAME_BYTES))
    session_id: str = Field(foreign_key="session.id", sa_type=Text())
    model_id: str | None = Field(default=None, foreign_key="model.id", sa_type=Text())
    sampler_id: str | None = Field(default=None, foreign_key="sampler.id", sa_type=Text())
    seq_id: int | None = Field(default=None, sa_type=sa.BigInteger)
    content_hash: str = Field(sa_type=Text())
    state: str = Field(sa_type=Text())
    result_type: str = Field(sa_type=Text())
    error: str | None = Field(default=None, sa_type=CutText())
    category: str | None = Field(default=None, sa_type=Text())
    created_at: datetime = Field(sa_type=UtcDateTime)
    started_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    finished_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    read_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    dropped_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    replays: bool = False
    completion: int | None = Field(default=None, sa_type=sa.BigInteger)
    waiting_tokens: int = Field(sa_type=sa.BigInteger)
    waiting_bytes: int = Field(default=0, sa_type=sa.BigInteger, sa_column_kwargs={"server_default": "0"})
    trace: str | None = Field(default=None, sa_type=Text())  # the span in which it was submitted
    interactive: bool = Field(default=False, sa_column_kwargs={"server_default": sa.false()})  # see `NewRequest`
    archives: bool = Field(default=False, sa_column_kwargs={"server_default": sa.false()})
    # Last, so that SQLite reads the columns above without walking overflow pages.
    payload: bytes
    result: bytes | None = None


# A literal, because SQLite applies the partial indexes only if the condition has no parameter.
IS_PENDING = col(Request.state) == sa.literal_column(f"'{RequestState.PENDING}'")


class Checkpoint(Table, table=True):
    """A committed checkpoint. The row is a copy of the store's commit object and can be rebuilt from it.

    attempt: as in the commit. With it, a late deletion spares the files of a later save to the same path.
    purged_at: when the files of a deleted checkpoint were removed from the store. noted: whether the commit contains
    the row's `public` and `expires_at`, so that a rebuilt row restores them.
    """

    __tablename__ = "checkpoint"
    __table_args__ = (
        sa.Index("ix_checkpoint_run_id_kind_created_at", "run_id", "kind", "created_at"),
        sa.Index("ix_checkpoint_owner_created_at", "owner", "created_at"),
        _partial("ix_checkpoint_stored_by_owner", "owner size_bytes deleted_at", "deleted_at IS NULL"),
        _partial("ix_checkpoint_to_expire", "expires_at", "deleted_at IS NULL AND expires_at IS NOT NULL"),
        _partial("ix_checkpoint_to_purge", "deleted_at", "deleted_at IS NOT NULL AND purged_at IS NULL"),
        _partial("ix_checkpoint_to_note", "path", "deleted_at IS NULL AND NOT noted"),
    )

    path: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    run_id: str = Field(sa_type=Text())
    kind: str = Field(sa_type=Text())
    name: str = Field(sa_type=Text(NAME_BYTES))
    owner: str = Field(sa_type=Text(NAME_BYTES))
    base_model: str = Field(sa_type=Text(NAME_BYTES))
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    expert_rank: int | None = None
    optimizer: str = Field(sa_type=Text())
    step: int
    size_bytes: int = Field(sa_type=sa.BigInteger)
    user_metadata: dict[str, str] = Field(sa_type=Json())
    created_at: datetime = Field(sa_type=UtcDateTime)
    expires_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    public: bool
    deleted_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    attempt: str = Field(sa_type=Text())
    purged_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    noted: bool


class UploadRow(Table, table=True):
    """An upload of an adapter. uploads.UploadView describes the columns."""

    __tablename__ = "upload"
    __table_args__ = (
        sa.Index("ix_upload_owner_expires_at", "owner", "expires_at"),
        sa.Index("ix_upload_expires_at", "expires_at"),
    )

    id: str = Field(primary_key=True, sa_type=Text())
    owner: str = Field(sa_type=Text(NAME_BYTES))
    key_id: str = Field(sa_type=Text())
    project_id: str | None = Field(default=None, sa_type=Text(NAME_BYTES))
    base_model: str = Field(sa_type=Text(NAME_BYTES))
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    max_bytes: int = Field(sa_type=sa.BigInteger)
    expires_at: datetime = Field(sa_type=UtcDateTime)
    created_at: datetime = Field(sa_type=UtcDateTime)
    files: dict[str, tuple[str, int]] = Field(sa_type=Json())
    path: str | None = Field(default=None, sa_type=Text(NAME_BYTES))


class AssetRow(Table, table=True):
    """An image that a project uploaded. assets.AssetView describes the columns."""

    __tablename__ = "asset"
    __table_args__ = (sa.Index("ix_asset_owner_size_bytes", "owner", "size_bytes"),)

    id: str = Field(primary_key=True, sa_type=Text())
    owner: str = Field(sa_type=Text(NAME_BYTES))
    size_bytes: int = Field(sa_type=sa.BigInteger)
    piece: str = Field(sa_type=Text())
    created_at: datetime = Field(sa_type=UtcDateTime)


class CustomLossRow(Table, table=True):
    """A custom loss of a client. definition: its inputs and graph as JSON; None if they were refused."""

    __tablename__ = "custom_loss"
    __table_args__ = (sa.UniqueConstraint("session_id", "seq_id"),)

    id: str = Field(primary_key=True, sa_type=Text())
    session_id: str = Field(foreign_key="session.id", sa_type=Text())
    owner: str = Field(sa_type=Text(NAME_BYTES))
    seq_id: int
    request_id: str = Field(sa_type=Text())
    name: str = Field(sa_type=Text(NAME_BYTES))
    definition: str | None = Field(default=None, sa_type=Text(JSON_BYTES))
    created_at: datetime = Field(sa_type=UtcDateTime)


class StabilityRow(Table, table=True):
    """A sampled sequence: int32 tokens, float32 logprobs, and base_model's experts (int16) and supports, or None."""

    __tablename__ = "stability_info"

    sequence_id: str = Field(primary_key=True, sa_type=Text())
    session_id: str = Field(foreign_key="session.id", index=True, sa_type=Text())
    used_at: datetime = Field(sa_type=UtcDateTime, index=True)
    tokens: bytes
    logprobs: bytes
    routes: bytes | None = None
    base_model: str | None = Field(default=None, sa_type=Text(NAME_BYTES))
    supports: bytes | None = None


class WeightsShare(Table, table=True):
    """A share of one attempt of a checkpoint, not of later saves: the SHA-256 of the token's 256 random bits."""

    __tablename__ = "weights_share"

    id: str = Field(primary_key=True, sa_type=Text())
    token_hash: str = Field(unique=True, sa_type=Text())
    path: str = Field(index=True, sa_type=Text(NAME_BYTES))
    attempt: str = Field(sa_type=Text())
    created_at: datetime = Field(sa_type=UtcDateTime)
    expires_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    revoked_at: datetime | None = Field(default=None, sa_type=UtcDateTime)


class StreamedRow(Table, table=True):
    """Tokens of streamed samples since the previous write (streams.py). id: increases, and is never reused."""

    __tablename__ = "streamed_tokens"
    __table_args__ = (sa.Index("ix_streamed_tokens_written_at", "written_at"), {"sqlite_autoincrement": True})

    id: int | None = Field(default=None, primary_key=True, sa_type=sa.BigInteger().with_variant(sa.Integer(), "sqlite"))
    written_at: datetime = Field(sa_type=UtcDateTime)
    tokens: bytes


class FeedbackRow(Table, table=True):
    """Feedback on a sample, with a copy of the sample, because the bytes of the request are dropped later.

    sample_id: `<request>-<number>`. model_path: the sampled checkpoint; None: the base model. prompt: messages or a
    text. Rows never change.
    """

    __tablename__ = "feedback"
    __table_args__ = (sa.Index("ix_feedback_owner_id", "owner", "id"), {"sqlite_autoincrement": True})

    id: int | None = Field(default=None, primary_key=True, sa_type=sa.BigInteger().with_variant(sa.Integer(), "sqlite"))
    owner: str = Field(sa_type=Text(NAME_BYTES))
    key_id: str = Field(sa_type=Text())
    sample_id: str = Field(sa_type=Text())
    at: datetime = Field(sa_type=UtcDateTime)
    reward: float | None = None
    label: str | None = Field(default=None, sa_type=Text(NAME_BYTES))
    text: str | None = Field(default=None, sa_type=Text(2**22))
    base_model: str = Field(sa_type=Text(NAME_BYTES))
    model_path: str | None = Field(default=None, sa_type=Text(NAME_BYTES))
    prompt: list[dict[str, str]] | str = Field(sa_type=Json(2**24))
    answer: str = Field(sa_type=Text(2**24))
    tokens: bytes
    logprobs: bytes


class ProjectTotal(Table, table=True):
    """The number of a project's rows of each kind in quotas.KEPT, and their bytes."""

    __tablename__ = "project_total"

    owner: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    sessions: int = _count()
    training_runs: int = _count()
    samplers: int = _count()
    custom_losses: int = _count()
    images: int = _count()
    feedback: int = _count()
    metrics: int = _count()
    kept_bytes: int = _count()


class UsageBucket(Table, table=True):
    """The usage of one kind by a session on a base model in one hour. It never decreases."""

    __tablename__ = "usage_bucket"
    __table_args__ = (sa.Index("ix_usage_bucket_bucket_start", "bucket_start"),)

    session_id: str = Field(foreign_key="session.id", primary_key=True, sa_type=Text())
    bucket_start: datetime = Field(sa_type=UtcDateTime, primary_key=True)
    base_model: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    kind: str = Field(primary_key=True, sa_type=Text())
    quantity: int = Field(sa_type=sa.BigInteger)


class TrainingStep(Table, table=True):
    """The figures of one optimizer step of a model, for its curves. Rows outlive the dropped results.

    seq_id: the optim_step's, or UNMADE while the gradients of the step are being accumulated. at: when it was answered.
    weight: the total weight of the step's tokens. loss, and the columns of `DRIFT_FIGURES`: sums over the tokens.
    Figures that were not measured, or are not finite, are NULL.
    """

    __tablename__ = "training_step"

    model_id: str = Field(primary_key=True, foreign_key="model.id", sa_type=Text())
    seq_id: int = Field(primary_key=True, sa_type=sa.BigInteger)
    step: int
    at: datetime = Field(sa_type=UtcDateTime)
    tokens: int = Field(sa_type=sa.BigInteger)
    weight: float
    loss: float | None = None
    kl: float | None = None
    agreement: float | None = None
    first_agreement: float | None = None
    supported: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None


UNMADE = -1


# ------------------------------------------------------------------ tables of recovery
class RecoverySnapshot(Table, table=True):
    """A committed snapshot of a model (snapshot_id None), or of a sampler's weights. Clients never see it.

    seq_id: the snapshot contains exactly the model's requests up to this id. snapshot_id: as in the worker group. If a
    later publication reuses the id, this column becomes the path, which no sampler uses.
    """

    __tablename__ = "recovery_snapshot"
    __table_args__ = (sa.Index("ix_recovery_snapshot_model_id_seq_id", "model_id", "seq_id"),)

    path: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    model_id: str = Field(foreign_key="model.id", sa_type=Text())
    seq_id: int = Field(sa_type=sa.BigInteger)
    snapshot_id: str | None = Field(default=None, unique=True, sa_type=Text())
    step: int
    size_bytes: int = Field(sa_type=sa.BigInteger)
    created_at: datetime = Field(sa_type=UtcDateTime)


class Suspect(Table, table=True):
    """A request that was executing when its worker group ended. crashes: how many of the deaths were crashes."""

    __tablename__ = "suspect"

    request_id: str = Field(primary_key=True, foreign_key="request.id", sa_type=Text())
    deaths: int
    crashes: int


class Process(Table, table=True):
    """The engine's lease, or the API's heartbeats. The engine that last raised `epoch` holds the lease.

    epoch: raised at each start of an engine or API. began_at: since when heartbeats have arrived without a pause.
    """

    __tablename__ = "process"

    name: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    holder: str = Field(sa_type=Text())
    epoch: int
    began_at: datetime = Field(sa_type=UtcDateTime)
    beat_at: datetime = Field(sa_type=UtcDateTime)
