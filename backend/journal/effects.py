"""Effects: the row changes that come with an outcome, in its transaction.

What an operation did to models, samplers, checkpoints and usage is stored together with its answer. Each function
returns the topics to publish after the commit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Literal, assert_never

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.checkpoint import Saved
from tinkerflow.backend.commands import Optimizer, StabilityInfo
from tinkerflow.backend.errors import Category
from tinkerflow.backend.ids import CheckpointKind
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.database import insert_if_absent
from tinkerflow.backend.journal.notify import answered
from tinkerflow.backend.journal.samplers import COMPLETION, NEXT_COMPLETION, NewSampler, insert_sampler
from tinkerflow.backend.journal.tables import (
    IS_PENDING,
    TAKES_WORK,
    UNMADE,
    Checkpoint,
    Kind,
    Model,
    ModelState,
    RecoverySnapshot,
    Request,
    RequestState,
    SamplerRow,
    SamplerState,
    StabilityRow,
    TrainingStep,
    UsageKind,
    model_ended,
    sampler_ended,
)

STABILITY_KEPT = timedelta(days=1)  # after the last use, as the documentation of StableReinforce says
SNAPSHOTS_KEPT = 2  # of a model: the newest one restores it, or if that cannot be read the one before

IS_MODEL_SNAPSHOT = col(RecoverySnapshot.snapshot_id).is_(None)
_USED = sa.exists().where(col(SamplerRow.snapshot_id) == col(Request.id), col(SamplerRow.state) == SamplerState.LIVE)
IS_UNSTORED = sa.and_(col(Request.replays), col(Request.kind) == Kind.SAVE_FOR_SAMPLER, _USED)
_LET_GO = {
    "replays": False,
    "payload": sa.case((col(Request.dropped_at).is_not(None), b""), else_=col(Request.payload)),
}
_STEP_MADE = sa.update(Model).where(col(Model.id) == sa.bindparam("of_model")).values(step=sa.bindparam("to_step"))

_ADD_LOSS = sa.text(
    "INSERT INTO training_step (model_id, seq_id, step, at, tokens, weight, loss, kl)"
    " VALUES (:model_id, :seq_id, :step, :at, :tokens, :weight, :loss, :kl)"
    " ON CONFLICT (model_id, seq_id) DO UPDATE SET"
    " tokens = training_step.tokens + excluded.tokens, weight = training_step.weight + excluded.weight,"
    " loss = training_step.loss + excluded.loss, kl = training_step.kl + excluded.kl"
).bindparams(sa.bindparam("at", type_=sa.inspect(TrainingStep).local_table.c.at.type))
_MADE = ("seq_id", "step", "at", "grad_norm", "learning_rate")
_MAKE_STEP = (
    sa.update(TrainingStep)
    .where(col(TrainingStep.model_id) == sa.bindparam("of_model"), col(TrainingStep.seq_id) == UNMADE)
    .values({name: sa.bindparam(name) for name in _MADE})
)


# ------------------------------------------------------------------ what an operation did
@dataclass(frozen=True)
class ModelLive:
    """The model exists in the worker group now. rank, train_* and expert_rank are given when a checkpoint decided."""

    model_id: str
    step: int = 0
    rank: int | None = None
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None
    expert_rank: int | None = None


@dataclass(frozen=True)
class ModelEnded:
    """The model takes no more work: requests still waiting for it fail in the same transaction, with `detail`."""

    model_id: str
    state: Literal[ModelState.LOST, ModelState.UNLOADED, ModelState.FAILED]
    detail: str


@dataclass(frozen=True)
class StepMade:
    """The model stands at `step` optimizer steps now (after an optim_step, or after loading weights)."""

    model_id: str
    step: int


@dataclass(frozen=True)
class LossMeasured:
    """A forward_backward had this `loss` over so many `tokens`, which have so much `weight` together.

    kl: from the policy that sampled the tokens to the model, a mean over them; None when it was not measured.
    """

    model_id: str
    tokens: int
    weight: float
    loss: float
    kl: float | None = None


@dataclass(frozen=True)
class StepMeasured:
    """The optim_step with this seq_id used the gradients of every LossMeasured since the one before it.

    learning_rate: None of an optimizer that has none.
    """

    model_id: str
    seq_id: int
    step: int
    grad_norm: float
    learning_rate: float | None


@dataclass(frozen=True)
class SamplerOpened:
    """A sampler exists now (an unnamed save_weights_for_sampler makes one). An id that exists stays as it is."""

    sampler: NewSampler


@dataclass(frozen=True)
class SamplerLoaded:
    """The sampler's checkpoint is in the worker group now, as this snapshot; None: it is there no longer."""

    sampler_id: str
    snapshot_id: str | None


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint was committed to the store under `path` (tinker://...). Saving a path again replaces its row.

    run_id: the model it was saved from. size_bytes: all its files together. expires_at: aware, or None for never.
    attempt: the store's name for these bytes, "" when unknown; the path saved anew has another. created_at: when it was
    committed, None: now.
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
    step: int
    size_bytes: int
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    expires_at: datetime | None = None
    optimizer: Optimizer = "adamw"
    attempt: str = ""
    created_at: datetime | None = None
    expert_rank: int | None = None

    @classmethod
    def of(cls, saved: Saved) -> CheckpointSaved:
        """The row that goes with a commit of the store."""
        return CheckpointSaved(
            path=saved.path,
            run_id=saved.run_id,
            kind=CheckpointKind(saved.kind),
            name=saved.name,
            owner=saved.meta.owner,
            base_model=saved.meta.base_model,
            **asdict(saved.spec),
            step=saved.step,
            size_bytes=saved.size_bytes,
            user_metadata=saved.meta.user_metadata,
            expires_at=saved.meta.expires_at,
            optimizer=saved.optimizer,
            attempt=saved.attempt,
            created_at=saved.created_at,
        )


@dataclass(frozen=True)
class SequencesRecorded:
    """Sampled sequences of a session that stable_reinforce may be trained on (record_stability_info)."""

    session_id: str
    sequences: tuple[StabilityInfo, ...]


@dataclass(frozen=True)
class SnapshotTaken:
    """A recovery snapshot was committed to the store under `path`: the model as its requests up to seq_id made it.

    snapshot_id: it holds only the weights that this sampling snapshot of the model was published with.
    """

    path: str
    model_id: str
    seq_id: int
    step: int
    size_bytes: int
    snapshot_id: str | None = None


@dataclass(frozen=True)
class Used:
    """So many tokens (or checkpoints) were used for a session on a base model; counted in the hour of the answer."""

    session_id: str
    base_model: str
    kind: UsageKind
    quantity: int


RowEffect = (
    ModelLive
    | ModelEnded
    | StepMade
    | LossMeasured
    | StepMeasured
    | SamplerOpened
    | SamplerLoaded
    | CheckpointSaved
    | SequencesRecorded
    | SnapshotTaken
)
Effect = RowEffect | Used


def apply(connection: sa.Connection, effect: RowEffect, now: datetime) -> list[str]:
    """Make one effect's row changes in the caller's transaction; the topics. `Used` is added up by results.finish."""
    match effect:
        case ModelLive():
            _model_live(connection, effect)
        case ModelEnded():
            return end_models(connection, [effect.model_id], effect.state, effect.detail, now)
        case StepMade():
            connection.execute(_STEP_MADE, {"of_model": effect.model_id, "to_step": effect.step})
        case LossMeasured():
            _loss_measured(connection, effect, now)
        case StepMeasured():
            _step_measured(connection, effect, now)
        case SamplerOpened():
            insert_sampler(connection, effect.sampler, now)
        case SamplerLoaded():
            connection.execute(
                sa.update(SamplerRow)
                .where(col(SamplerRow.id) == effect.sampler_id)
                .values(snapshot_id=effect.snapshot_id)
            )
        case SnapshotTaken():
            snapshot_taken(connection, effect, now)
        case CheckpointSaved():
            put_checkpoint(connection, effect, now)
            details = {"kind": effect.kind, "step": effect.step, "size_bytes": effect.size_bytes}
            audit.note_checkpoint(connection, now, audit.Event.CHECKPOINT_SAVED, effect, details)
        case SequencesRecorded():
            _record_sequences(connection, effect, now)
        case _:
            assert_never(effect)
    return []


# ------------------------------------------------------------------ models and samplers
def _model_live(connection: sa.Connection, effect: ModelLive) -> None:
    decided = {
        name: value
        for name in ("rank", "train_attn", "train_mlp", "train_unembed")
        if (value := getattr(effect, name)) is not None
    }
    if effect.rank is not None:
        decided["expert_rank"] = effect.expert_rank
        # A checkpoint has no gradients: the losses of those that it replaced belong to no step.
        unmade = (col(TrainingStep.model_id) == effect.model_id, col(TrainingStep.seq_id) == UNMADE)
        connection.execute(sa.delete(TrainingStep).where(*unmade))
    connection.execute(
        sa.update(Model)
        .where(col(Model.id) == effect.model_id, col(Model.state).in_(TAKES_WORK))
        .values(state=ModelState.LIVE, detail=None, step=effect.step, **decided)
    )


def end_models(
    connection: sa.Connection, model_ids: Sequence[str], state: ModelState, detail: str, now: datetime
) -> list[str]:
    """End models that still take work, and fail the requests that wait for them; the topics.

    connection: of the caller's transaction. model_ids: in any state; a model that ended before stays as it is.
    state, detail: what the models end as, and why. now: when. Unloaded models cannot be revived, so what made them is
    forgotten.
    """
    topics: list[str] = []
    for model_id in model_ids:
        ended = connection.execute(
            sa.update(Model)
            .where(col(Model.id) == model_id, col(Model.state).in_(TAKES_WORK))
            .values(state=state, detail=detail)
            .returning(col(Model.id))
        ).first()
        if ended is not None:
            text, category = model_ended(model_id, state, detail)
            failed = _fail_pending(connection, now, text, category, col(Request.model_id) == model_id)
            if state is ModelState.UNLOADED:
                forget(connection, model_id)
            topics += [*failed, f"model:{model_id}"]
    return topics


def close_samplers(connection: sa.Connection, sampler_ids: Sequence[str], detail: str, now: datetime) -> list[str]:
    """Close live samplers, and fail the requests that wait for them; the topics."""
    topics: list[str] = []
    for sampler_id in sampler_ids:
        closed = connection.execute(
            sa.update(SamplerRow)
            .where(col(SamplerRow.id) == sampler_id, col(SamplerRow.state) == SamplerState.LIVE)
            .values(state=SamplerState.CLOSED, detail=detail, **NEXT_COMPLETION)
            .returning(col(SamplerRow.id))
        ).first()
        if closed is not None:
            text, category = sampler_ended(sampler_id, detail)
            failed = _fail_pending(connection, now, text, category, col(Request.sampler_id) == sampler_id)
            topics += [*failed, answered(sampler_id)]
    return [*topics, "sample"] if topics else topics


def _fail_pending(
    connection: sa.Connection, now: datetime, error: str, category: Category, *where: sa.ColumnElement[bool]
) -> list[str]:
    """Fail every request that waits and is `where`; the topics. One statement, which locks them in order of id.

    The caller has taken the next number of every sampler whose requests may be among them.
    """
    waiting = sa.select(col(Request.id)).where(IS_PENDING, *where).order_by(col(Request.id)).with_for_update()
    statement = (
        sa.update(Request)
        .where(col(Request.id).in_(waiting))
        .values(state=RequestState.FAILED, error=error, category=category, finished_at=now, completion=COMPLETION)
        .returning(col(Request.id))
    )
    return [f"done:{request_id}" for request_id in connection.execute(statement).scalars()]


# ------------------------------------------------------------------ curves (curves.py reads them)
def _loss_measured(connection: sa.Connection, effect: LossMeasured, now: datetime) -> None:
    """Add a loss to the step that is not made yet."""
    kl = None if effect.kl is None else _finite(effect.kl * effect.tokens)
    figures = {"tokens": effect.tokens, "weight": effect.weight, "loss": _finite(effect.loss), "kl": kl}
    connection.execute(_ADD_LOSS, {"model_id": effect.model_id, "seq_id": UNMADE, "step": 0, "at": now, **figures})


def _step_measured(connection: sa.Connection, effect: StepMeasured, now: datetime) -> None:
    """Make a row of the step out of its losses; a step without any has a row, too."""
    figures = {"grad_norm": _finite(effect.grad_norm), "learning_rate": effect.learning_rate}
    made = {"seq_id": effect.seq_id, "step": effect.step, "at": now, **figures}
    if not connection.execute(_MAKE_STEP, {"of_model": effect.model_id, **made}).rowcount:
        insert_if_absent(connection, TrainingStep, {"model_id": effect.model_id, "tokens": 0, "weight": 0.0, **made})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ------------------------------------------------------------------ checkpoints
def put_checkpoint(connection: sa.Connection, saved: CheckpointSaved, now: datetime, *, public: bool = False) -> None:
    """Write the row of a committed checkpoint. It replaces the row of an earlier one of its path, settings included."""
    values = {
        **asdict(saved),
        "user_metadata": dict(saved.user_metadata),
        "created_at": saved.created_at or now,
        "public": public,
        "deleted_at": None,
        "purged_at": None,
        "noted": True,
    }
    if not insert_if_absent(connection, Checkpoint, values):
        connection.execute(sa.update(Checkpoint).where(col(Checkpoint.path) == saved.path).values(**values))


# ------------------------------------------------------------------ stable_reinforce
def _record_sequences(connection: sa.Connection, effect: SequencesRecorded, now: datetime) -> None:
    """Keep what was recorded of a session's sequences, and drop what nobody used for a day."""
    connection.execute(sa.delete(StabilityRow).where(col(StabilityRow.used_at) < now - STABILITY_KEPT))
    for info in effect.sequences:
        row = {
            "sequence_id": info.sequence_id,
            "session_id": effect.session_id,
            "used_at": now,
            "tokens": info.tokens_T.astype("<i4", copy=False).tobytes(),
            "logprobs": info.logprobs_T.astype("<f4", copy=False).tobytes(),
        }
        insert_if_absent(connection, StabilityRow, row)


# ------------------------------------------------------------------ recovery snapshots (recovery.py says what they are)
def snapshot_taken(connection: sa.Connection, taken: SnapshotTaken, now: datetime) -> bool:
    """Record a committed snapshot, and let go of what it makes superfluous; False when it must not be used.

    It must not be used when the model has ended, when a request in it is not answered yet (it would be executed twice,
    or a save that later requests have overtaken would find another state), or when an unnamed save in it is not stored.
    """
    if taken.snapshot_id is not None:
        return _published(connection, taken, now)
    model = connection.execute(
        sa.select(col(Model.next_seq), col(Model.state)).where(col(Model.id) == taken.model_id).with_for_update()
    ).one()
    if model.state not in TAKES_WORK or model.next_seq <= taken.seq_id:
        return False
    up_to = (col(Request.model_id) == taken.model_id, col(Request.seq_id) <= taken.seq_id)
    waiting, unstored = (sa.exists().where(*up_to, where) for where in (IS_PENDING, IS_UNSTORED))
    if connection.execute(sa.select(sa.or_(waiting, unstored))).scalar():
        return False
    if not insert_if_absent(connection, RecoverySnapshot, {**asdict(taken), "created_at": now}):
        return False
    # Requests that all kept snapshots hold are not replayed any more.
    newest = sa.select(col(RecoverySnapshot.seq_id)).where(
        col(RecoverySnapshot.model_id) == taken.model_id, IS_MODEL_SNAPSHOT
    )
    last_kept = newest.order_by(col(RecoverySnapshot.seq_id).desc()).offset(SNAPSHOTS_KEPT - 1).limit(1)
    forget(connection, taken.model_id, col(Request.seq_id) <= last_kept.scalar_subquery())
    return True


def _published(connection: sa.Connection, taken: SnapshotTaken, now: datetime) -> bool:
    """Record the snapshot that a sampler samples. It may outlive the model; `superfluous` finds unused ones."""
    # Inflight samplers of a model share one snapshot: what it held before goes.
    held = col(RecoverySnapshot.snapshot_id) == taken.snapshot_id
    connection.execute(sa.update(RecoverySnapshot).where(held).values(snapshot_id=RecoverySnapshot.path))
    connection.execute(sa.update(Request).where(col(Request.id) == taken.snapshot_id).values(**_LET_GO))
    return insert_if_absent(connection, RecoverySnapshot, {**asdict(taken), "created_at": now})


def forget(connection: sa.Connection, model_id: str, *where: sa.ColumnElement[bool]) -> None:
    """Replay the model's requests that are `where` (all by default) no more: their payloads may go."""
    replayed = (col(Request.model_id) == model_id, *where, col(Request.replays))
    connection.execute(sa.update(Request).where(*replayed).values(**_LET_GO))
