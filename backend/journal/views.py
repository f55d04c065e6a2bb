"""What comes out of the journal: frozen dataclasses, each made from a table row in one place here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from sqlalchemy import Row

from tinkerflow.backend.commands import CompileStatus, Optimizer
from tinkerflow.backend.errors import Category, TinkerflowError
from tinkerflow.backend.journal.kinds import (
    CheckpointKind,
    Kind,
    ModelState,
    PayloadType,
    RequestState,
    SamplerState,
    SessionState,
    UsageKind,
)
from tinkerflow.backend.journal.records import Effect, Outcome

T = TypeVar("T")


@dataclass(frozen=True)
class SessionFailure:
    """What an expired session had failed at: a `training_run`, `sampling_session` or `request` with this id.

    request_kind: the Kind of the request, None for the others. message: its error, or why it was lost.
    """

    category: Category
    what: Literal["training_run", "sampling_session", "request"]
    id: str
    request_kind: str | None
    message: str


@dataclass(frozen=True)
class SessionView:
    """A session. finish_reason, detail: what the client said when it finished; or detail: why it expired.

    failure: of expired sessions, None when nothing had failed. key_id: the key that made it, "" without keys.
    """

    id: str
    owner: str
    key_id: str
    tags: tuple[str, ...]
    user_metadata: Mapping[str, object]
    sdk_version: str
    project_id: str | None
    display_name: str | None
    state: SessionState
    detail: str | None
    finish_reason: str | None
    failure: SessionFailure | None
    created_at: datetime
    last_seen_at: datetime
    ended_at: datetime | None

    @property
    def project(self) -> str:
        """The project it is in: its label, or its owner when it has none."""
        return self.project_id or self.owner


@dataclass(frozen=True)
class SessionSummary:
    """A session with how many checkpoints its runs have now, and their bytes."""

    session: SessionView
    checkpoints: int
    stored_bytes: int


@dataclass(frozen=True)
class ModelView:
    """A model (training run). detail: why it is in its state; step: optimizer steps; next_seq: next to execute.

    held: why people let it wait, None when they do not.
    """

    id: str
    session_id: str
    owner: str
    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    optimizer: Optimizer
    seed: int | None
    user_metadata: Mapping[str, str]
    state: ModelState
    detail: str | None
    held: str | None
    next_seq: int
    step: int
    created_at: datetime
    last_request_at: datetime


@dataclass(frozen=True)
class SamplerView:
    """A sampling session; see NewSampler for model_path and snapshot_id."""

    id: str
    session_id: str
    owner: str
    base_model: str
    model_path: str | None
    snapshot_id: str | None
    state: SamplerState
    detail: str | None
    created_at: datetime


@dataclass(frozen=True)
class CheckpointView:
    """A saved checkpoint that was not deleted; run_id is the id of the model it was saved from.

    attempt: the store's name for these bytes, "" when unknown; the path saved anew has another.
    """

    path: str
    run_id: str
    kind: CheckpointKind
    name: str
    owner: str
    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    optimizer: Optimizer
    step: int
    size_bytes: int
    user_metadata: Mapping[str, str]
    created_at: datetime
    expires_at: datetime | None
    public: bool
    attempt: str


@dataclass(frozen=True)
class ShareView:
    """A token for one checkpoint, without the token; good until it expires, is revoked, or the path is saved anew."""

    id: str
    path: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True)
class RunView:
    """A training run with the newest checkpoint of each kind."""

    model: ModelView
    last_checkpoint: CheckpointView | None
    last_sampler_checkpoint: CheckpointView | None


@dataclass(frozen=True)
class KeyView:
    """An API key without its secret. prefix: its first characters, for people to recognise it by."""

    id: str
    prefix: str
    name: str
    project: str
    admin: bool
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None

    @property
    def owner(self) -> str:
        """Whose rows this key reads and writes: everybody's in its project."""
        return self.project


@dataclass(frozen=True)
class AuditView:
    """An entry of the audit log. event: `{resource}_{action}`; details hold what else is known, and repeat the ids."""

    at: datetime
    owner: str
    event: str
    model_id: str | None
    tinker_path: str | None
    purpose: str | None
    details: Mapping[str, object]


@dataclass(frozen=True)
class Usage:
    """What a session used of one kind on a base model, in the hour from bucket_start on.

    project: the session's today. key_id, key_name: of the key that made the session, "" and None without keys.
    """

    bucket_start: datetime
    session_id: str
    base_model: str
    kind: UsageKind
    quantity: int
    project: str
    key_id: str
    key_name: str | None
    user_metadata: Mapping[str, object]


@dataclass(frozen=True)
class Timed:
    """When a request came, when work on it began (None: not, or not yet), and when it was answered."""

    id: str
    kind: Kind
    model_id: str | None
    sampler_id: str | None
    seq_id: int | None
    state: str
    base_model: str
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True)
class StoredUsage:
    """What checkpoints of a base model took up in the hour from bucket_start on, in byte-hours."""

    bucket_start: datetime
    base_model: str
    project: str
    key_id: str
    key_name: str | None
    byte_hours: float


@dataclass(frozen=True)
class StoredNow:
    """How many checkpoints of a project and key there are, and their bytes."""

    project: str
    key_id: str
    key_name: str | None
    checkpoints: int
    size_bytes: int


@dataclass(frozen=True)
class BaseModelView:
    """A base model that the engine serves; card is the JSON text of its ModelCard.

    compile_status: which programs its worker group has compiled, as far as was noted.
    """

    name: str
    card: str
    compile_status: CompileStatus | None = None


@dataclass(frozen=True)
class Pending:
    """A request that waits for its answer. sampler is set for samples.

    answered: it does not wait any more, and is executed again, or has something left to do (history.py).
    """

    id: str
    kind: Kind
    owner: str
    session_id: str
    model_id: str | None
    sampler_id: str | None
    seq_id: int | None
    payload: bytes
    payload_type: PayloadType
    created_at: datetime
    sampler: SamplerView | None = None
    answered: bool = False

    def done(self, result: bytes, result_type: PayloadType, *effects: Effect) -> Outcome:
        """The outcome that answers this request with `result`."""
        return Outcome(
            self.id,
            result=result,
            result_type=result_type,
            model_id=self.model_id,
            sampler_id=self.sampler_id,
            seq_id=self.seq_id,
            effects=effects,
        )

    def failed(self, error: TinkerflowError | str, category: Category | None = None, *effects: Effect) -> Outcome:
        """The outcome that answers this request with `error`; a plain text is the server's fault by default."""
        text, own = (error.message, error.category) if isinstance(error, TinkerflowError) else (error, "server")
        return Outcome(
            self.id,
            error=text,
            category=category or own,
            model_id=self.model_id,
            sampler_id=self.sampler_id,
            seq_id=self.seq_id,
            effects=effects,
        )


@dataclass(frozen=True)
class Executed:
    """A request to replay. succeeded: how it ended the first time, None when that is not known any more.

    answered_at: when that was; None: it is a save that later requests have overtaken, and still to be answered. A save
    that is answered and replayed is not stored yet.
    """

    request: Pending
    succeeded: bool | None
    answered_at: datetime | None


@dataclass(frozen=True)
class SnapshotView:
    """A committed recovery snapshot; see SnapshotTaken."""

    path: str
    model_id: str
    seq_id: int
    snapshot_id: str | None
    step: int
    size_bytes: int
    created_at: datetime


@dataclass(frozen=True)
class Result:
    """A request's answer: `result` bytes of `result_type` when done, else `error` and `category`.

    size: of the result in bytes. Results over the size that the reader allowed have a size and no bytes.
    """

    request_id: str
    kind: Kind
    result: bytes | None
    result_type: PayloadType
    error: str | None
    category: Category | None
    size: int


@dataclass(frozen=True)
class Completion:
    """One answered request of a sampler; size: of its result in bytes, 0 when it failed or was dropped."""

    request_id: str
    done: bool
    size: int


@dataclass(frozen=True)
class Completions:
    """What was answered after one cursor, oldest first, and the next cursor."""

    rows: tuple[Completion, ...]
    cursor: int


@dataclass(frozen=True)
class Gap:
    """Of the sequence ids [next_seq, first_waiting) of a model, `missing` never came; later ones wait since `since`."""

    model_id: str
    next_seq: int
    first_waiting: int
    missing: int
    since: datetime


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some rows of a longer list, and how long that list is."""

    rows: tuple[T, ...]
    total: int


# ------------------------------------------------------------------ rows to views
def session_view(row: Row[Any]) -> SessionView:
    """A row of `session`."""
    failure = None if row.failure is None else SessionFailure(**row.failure)
    changed = {"tags": tuple(row.tags), "state": SessionState(row.state), "failure": failure}
    return SessionView(**{**_same(SessionView, row), **changed})


def model_view(row: Row[Any]) -> ModelView:
    """A row of `model`."""
    return ModelView(**{**_same(ModelView, row), "state": ModelState(row.state)})


def sampler_view(row: Row[Any], prefix: str = "") -> SamplerView:
    """A row of `sampler`, or the part of a joined row whose columns start with `prefix`."""
    values = _same(SamplerView, row, prefix)
    return SamplerView(**{**values, "state": SamplerState(values["state"])})


def checkpoint_view(row: Row[Any]) -> CheckpointView:
    """A row of `checkpoint`."""
    return CheckpointView(**{**_same(CheckpointView, row), "kind": CheckpointKind(row.kind)})


def share_view(row: Row[Any]) -> ShareView:
    """A row of `weights_share`."""
    return ShareView(**_same(ShareView, row))


def snapshot_view(row: Row[Any]) -> SnapshotView:
    """A row of `recovery_snapshot`."""
    return SnapshotView(**_same(SnapshotView, row))


def key_view(row: Row[Any]) -> KeyView:
    """A row of `api_key`."""
    return KeyView(**_same(KeyView, row))


def audit_view(row: Row[Any]) -> AuditView:
    """A row of `audit_event`."""
    return AuditView(**_same(AuditView, row))


def pending_view(row: Row[Any], sampler: SamplerView | None = None) -> Pending:
    """A row of `request` that waits, with its sampler if it has one."""
    return Pending(
        id=row.id,
        kind=Kind(row.kind),
        owner=row.owner,
        session_id=row.session_id,
        model_id=row.model_id,
        sampler_id=row.sampler_id,
        seq_id=row.seq_id,
        payload=row.payload,
        payload_type=row.payload_type,
        created_at=row.created_at,
        sampler=sampler,
        answered=row.state != RequestState.PENDING,
    )


def result_view(row: Row[Any]) -> Result:
    """A row of `request` that is answered."""
    return Result(row.id, Kind(row.kind), row.result, row.result_type, row.error, row.category, row.size or 0)


def _same(view: type[Any], row: Row[Any], prefix: str = "") -> dict[str, Any]:
    return {field.name: getattr(row, prefix + field.name) for field in fields(view)}
