"""The journal's tables, and the states that their rows pass through.

Only the aggregates read and write rows; their callers get frozen dataclasses.
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


# ------------------------------------------------------------------ kinds and states
class Kind(StrEnum):
    """What a request asks for."""

    CREATE_MODEL = "create_model"
    LOAD_MODEL = "load_model"  # create-via-load
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    LOAD_WEIGHTS = "load_weights"
    SAVE_FOR_SAMPLER = "save_for_sampler"
    SAVE_EXTERNAL = "save_weights_external"
    SAMPLE = "sample"
    CREATE_CUSTOM_LOSS = "create_custom_loss"  # answered as it is stored: nothing executes it
    UNLOAD = "unload"


class RequestState(StrEnum):
    """pending -> done | failed; nothing leaves `failed`, and `done` becomes `failed` only when its result expires."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class SessionState(StrEnum):
    """active -> finished (the client said so) | expired (its heartbeats stopped)."""

    ACTIVE = "active"
    FINISHED = "finished"
    EXPIRED = "expired"


class ModelState(StrEnum):
    """creating -> live | failed; creating | live -> lost | unloaded, an end; lost | failed -> live when revived."""

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
    """What is counted: tokens, and for CHECKPOINT the saved checkpoints."""

    TRAINING = "training"  # tokens of forward_backward and forward: the SDK knows no other kind for either
    PREFILL = "prefill"  # prompt tokens that were computed: once for all sequences of a request
    CACHED_PREFILL = "cached_prefill"  # prompt tokens of all sequences but the first, which are not computed again
    SAMPLE = "sample"
    CHECKPOINT = "checkpoint"


# ------------------------------------------------------------------ what requests are answered after an end
def session_over(session_id: str, state: str, detail: str | None) -> tuple[str, Category]:
    """The answer to a request in a session that is over: text and category."""
    return f"session {session_id} is {state}" + (f": {detail}" if detail else ""), UserError.category


def model_ended(model_id: str, state: ModelState, detail: str | None) -> tuple[str, Category]:
    """The answer to a request for a model that has ended: text and category."""
    if state is ModelState.LOST:
        advice = "create it again from its last checkpoint"
        return f"model {model_id} was lost: {detail}; {advice}", StateLostError.category
    word = "was unloaded" if state is ModelState.UNLOADED else "was never created"
    return f"model {model_id} {word}: {detail}", UserError.category


def sampler_ended(sampler_id: str, detail: str | None) -> tuple[str, Category]:
    """The answer to a request for a sampler that is closed: text and category."""
    return f"sampler {sampler_id} is closed: {detail}", UserError.category


# ------------------------------------------------------------------ tables
def _partial(name: str, columns: str, where: str) -> sa.Index:
    """An index of the rows `where` alone."""
    on_sqlite = re.sub(r"\b(replays|interactive)\b", r"\1 = 1", where)  # SQLite has no booleans
    return sa.Index(name, *columns.split(), sqlite_where=sa.text(on_sqlite), postgresql_where=sa.text(where))


def _count() -> Any:
    """A number that is 0 in a row that is made for another number."""
    return Field(default=0, sa_type=sa.BigInteger, sa_column_kwargs={"server_default": "0"})


class ApiKey(Table, table=True):
    """An API key: only the SHA-256 of its 256 random bits is kept."""

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
    """An entry of the audit log (audit.AuditView). Rows are only ever added. actor: "" in rows of earlier releases."""

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
    """A token that was signed out before its time: the SHA-256 of the token. The row goes when the token expires."""

    __tablename__ = "ended_token"

    token_hash: str = Field(primary_key=True, sa_type=Text())
    expires_at: datetime = Field(sa_type=UtcDateTime, index=True)


class BaseModelRow(Table, table=True):
    """A base model that the engine serves.

    progress: what all its requests wait for, None when nothing holds them up. compile_status: which programs its worker
    group has compiled, a CompileStatus (backend/spec/commands.py) as JSON. worker_group: that group's
    GroupInfo as JSON.
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
    """A client's session: it owns models and samplers, and they end with it."""

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
    """A training run. next_seq is the next seq_id to execute; submit and finish meet on this row's lock.

    progress: what its requests wait for while it is being restored; paused: why people let it wait.
    """

    __tablename__ = "model"
    __table_args__ = (
        sa.Index("ix_model_state_base_model", "state", "base_model"),
        sa.Index("ix_model_owner_state", "owner", "state"),
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


class SamplerRow(Table, table=True):
    """A sampling session of a snapshot, of a checkpoint, or of the base model.

    last_completion: the number of the last transaction that answered its requests (results.py); clones: how many
    copies of its client have joined.
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
    """One operation: payload in, answer out. The two unique constraints judge concurrent replays.

    An unload has no seq_id (it comes from the service, not from the client's counter), and NULLs are distinct.
    The partial indexes hold only what waits, still has bytes to drop, or may be replayed: they stay small while the
    table grows. replays: keep the payload, because a restore may need it: true until two snapshots contain the request,
    or while its published weights are not stored yet.
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
        # `state` for SQLite: it looks at the row for what the index's condition says already
        _partial("ix_request_pending_of_owner", "owner kind waiting_tokens waiting_bytes state", "state = 'pending'"),
        _partial("ix_request_completions", "sampler_id completion seq_id", "completion IS NOT NULL"),
        _partial("ix_request_finished_with_bytes", "finished_at", "dropped_at IS NULL AND finished_at IS NOT NULL"),
        _partial("ix_request_replays", "model_id seq_id", "replays"),
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
    interactive: bool = Field(default=False, sa_column_kwargs={"server_default": sa.false()})  # a sample somebody reads
    # Last, so that SQLite reads the columns before them without walking overflow pages.
    payload: bytes
    result: bytes | None = None


# A literal, not a parameter: only so does SQLite see that the partial indexes apply.
IS_PENDING = col(Request.state) == sa.literal_column(f"'{RequestState.PENDING}'")


class Checkpoint(Table, table=True):
    """A committed checkpoint. The store's commit object is the truth; this row follows it and can be rebuilt.

    attempt: the store's, so that deleting files late never meets those of a later save under the same path. purged_at:
    when the files of a deleted checkpoint were gone from the store. noted: the commit says of `public` and `expires_at`
    what the row says, so that they are not lost with it.
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
    """An adapter that somebody uploads; uploads.UploadView says what each column is."""

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
    """An image that a project uploaded; assets.AssetView says what each column is."""

    __tablename__ = "asset"
    __table_args__ = (sa.Index("ix_asset_owner_size_bytes", "owner", "size_bytes"),)

    id: str = Field(primary_key=True, sa_type=Text())
    owner: str = Field(sa_type=Text(NAME_BYTES))
    size_bytes: int = Field(sa_type=sa.BigInteger)
    piece: str = Field(sa_type=Text())
    created_at: datetime = Field(sa_type=UtcDateTime)


class CustomLossRow(Table, table=True):
    """A loss that a client traced and sent; `definition`: its inputs and graph as JSON, None if they were refused."""

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
    """What was recorded of a sampled sequence for stable_reinforce: int32 tokens, float32 logprobs."""

    __tablename__ = "stability_info"

    sequence_id: str = Field(primary_key=True, sa_type=Text())
    session_id: str = Field(foreign_key="session.id", index=True, sa_type=Text())
    used_at: datetime = Field(sa_type=UtcDateTime, index=True)
    tokens: bytes
    logprobs: bytes


class WeightsShare(Table, table=True):
    """A token that opens one checkpoint to whoever has it: only the SHA-256 of its 256 random bits is kept.

    It is good for the bytes it was made for: a checkpoint saved again under the path has another attempt.
    """

    __tablename__ = "weights_share"

    id: str = Field(primary_key=True, sa_type=Text())
    token_hash: str = Field(unique=True, sa_type=Text())
    path: str = Field(index=True, sa_type=Text(NAME_BYTES))
    attempt: str = Field(sa_type=Text())
    created_at: datetime = Field(sa_type=UtcDateTime)
    expires_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    revoked_at: datetime | None = Field(default=None, sa_type=UtcDateTime)


class StreamedRow(Table, table=True):
    """Tokens of samples that stream, as the engine wrote them between two writes (streams.py). Gone within a minute.

    id: rises with every write, and none is used twice.
    """

    __tablename__ = "streamed_tokens"
    __table_args__ = (sa.Index("ix_streamed_tokens_written_at", "written_at"), {"sqlite_autoincrement": True})

    id: int | None = Field(default=None, primary_key=True, sa_type=sa.BigInteger().with_variant(sa.Integer(), "sqlite"))
    written_at: datetime = Field(sa_type=UtcDateTime)
    tokens: bytes


class FeedbackRow(Table, table=True):
    """What somebody thought of a sample, with the sample itself: its request's bytes are dropped after a while.

    sample_id: `<request>-<number>`. model_path: the checkpoint that was sampled, None for the base model. prompt: the
    messages or the text that were asked. Rows are only ever added.
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
    """How much a project keeps, by quotas.KEPT: rows of each kind, and the bytes of their texts."""

    __tablename__ = "project_total"

    owner: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    sessions: int = _count()
    training_runs: int = _count()
    samplers: int = _count()
    custom_losses: int = _count()
    images: int = _count()
    feedback: int = _count()
    kept_bytes: int = _count()


class UsageBucket(Table, table=True):
    """How much of one kind a session used on a base model in one hour. Only ever added to."""

    __tablename__ = "usage_bucket"
    __table_args__ = (sa.Index("ix_usage_bucket_bucket_start", "bucket_start"),)

    session_id: str = Field(foreign_key="session.id", primary_key=True, sa_type=Text())
    bucket_start: datetime = Field(sa_type=UtcDateTime, primary_key=True)
    base_model: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    kind: str = Field(primary_key=True, sa_type=Text())
    quantity: int = Field(sa_type=sa.BigInteger)


class TrainingStep(Table, table=True):
    """The figures of one optimizer step of a model, for its curves. They stay when the results are dropped.

    seq_id: of the optim_step, or UNMADE for the step whose gradients are still being accumulated. at: when it was
    answered. loss: the sum over the step's tokens, which have so much `weight` together; kl: summed over the tokens
    too. A figure that was not measured, or is not finite, is NULL.
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
    grad_norm: float | None = None
    learning_rate: float | None = None


UNMADE = -1


# ------------------------------------------------------------------ tables of recovery
class RecoverySnapshot(Table, table=True):
    """A committed snapshot of a model (snapshot_id None), or of what one sampler samples. Clients never see it.

    seq_id: every request of the model up to it, and none after it, is in the snapshot. snapshot_id: as in the worker
    group; when a later publication has taken the id over, the path stands for it, which no sampler uses.
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
    """A request that a worker group was executing when it ended. crashes: how many groups ended by themselves."""

    __tablename__ = "suspect"

    request_id: str = Field(primary_key=True, foreign_key="request.id", sa_type=Text())
    deaths: int
    crashes: int


class Process(Table, table=True):
    """A part of the service. Of the engine: its lease; whoever raised `epoch` last holds it. Of the API: its beats.

    began_at: since when it beats without a pause.
    """

    __tablename__ = "process"

    name: str = Field(primary_key=True, sa_type=Text(NAME_BYTES))
    holder: str = Field(sa_type=Text())
    epoch: int
    began_at: datetime = Field(sa_type=UtcDateTime)
    beat_at: datetime = Field(sa_type=UtcDateTime)
