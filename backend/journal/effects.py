"""The row changes that come with an outcome, each in one place. All return the bell's topics for what they did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import assert_never

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal import audit, completions, history, stability
from tinkerflow.backend.journal.kinds import TAKES_WORK, ModelState, SamplerState
from tinkerflow.backend.journal.records import (
    CheckpointSaved,
    Effect,
    ModelEnded,
    ModelLive,
    NewSampler,
    SamplerEnded,
    SamplerLoaded,
    SamplerOpened,
    SequencesRecorded,
    SnapshotTaken,
    StepMade,
    Used,
)
from tinkerflow.backend.journal.statements import (
    answered,
    done,
    fail_pending,
    insert_if_absent,
    model_ended,
    sampler_ended,
)
from tinkerflow.backend.journal.tables import Checkpoint, Model, Request, Sampler

_STEP_MADE = sa.update(Model).where(col(Model.id) == sa.bindparam("of_model")).values(step=sa.bindparam("to_step"))


def apply(connection: sa.Connection, effect: Effect, now: datetime) -> list[str]:
    """Make one effect's row changes in the caller's transaction."""
    match effect:
        case ModelLive():
            _model_live(connection, effect)
        case ModelEnded():
            return end_models(connection, [effect.model_id], effect.state, effect.detail, now)
        case StepMade():
            connection.execute(_STEP_MADE, {"of_model": effect.model_id, "to_step": effect.step})
        case SamplerOpened():
            open_sampler(connection, effect.sampler, now)
        case SamplerLoaded():
            connection.execute(
                sa.update(Sampler).where(col(Sampler.id) == effect.sampler_id).values(snapshot_id=effect.snapshot_id)
            )
        case SamplerEnded():
            return end_samplers(connection, [effect.sampler_id], effect.state, effect.detail, now)
        case SnapshotTaken():
            history.snapshot_taken(connection, effect, now)
        case CheckpointSaved():
            checkpoint_row(connection, effect, now)
            _note_saved(connection, effect, now)
        case SequencesRecorded():
            stability.record(connection, effect, now)
        case Used():
            pass  # finishing.finish adds up those of all outcomes
        case _:
            assert_never(effect)
    return []


def end_models(
    connection: sa.Connection, model_ids: Sequence[str], state: ModelState, detail: str, now: datetime
) -> list[str]:
    """End models that still take work, and fail what waits for them: nothing is left that nobody will answer."""
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
            failed = fail_pending(connection, now, text, category, col(Request.model_id) == model_id)
            if state is ModelState.UNLOADED:  # others may be revived (holding.py)
                history.forget(connection, model_id)
            topics += [*done(failed), f"model:{model_id}"]
    return topics


def end_samplers(
    connection: sa.Connection, sampler_ids: Sequence[str], state: SamplerState, detail: str, now: datetime
) -> list[str]:
    """End live samplers, and fail what waits for them."""
    topics: list[str] = []
    for sampler_id in sampler_ids:
        ended = connection.execute(
            sa.update(Sampler)
            .where(col(Sampler.id) == sampler_id, col(Sampler.state) == SamplerState.LIVE)
            .values(state=state, detail=detail, **completions.NEXT)
            .returning(col(Sampler.id))
        ).first()
        if ended is not None:
            text, category = sampler_ended(sampler_id, state, detail)
            failed = fail_pending(connection, now, text, category, col(Request.sampler_id) == sampler_id)
            topics += [*done(failed), answered(sampler_id)]
    return [*topics, "sample"] if topics else topics


def open_sampler(connection: sa.Connection, sampler: NewSampler, now: datetime) -> bool:
    """Make the sampler's row unless its id exists; whether it was made."""
    values = {**asdict(sampler), "state": SamplerState.LIVE, "created_at": now, "last_completion": 0, "clones": 0}
    return insert_if_absent(connection, Sampler, values)


def _model_live(connection: sa.Connection, effect: ModelLive) -> None:
    decided = {
        name: value
        for name in ("rank", "train_attn", "train_mlp", "train_unembed")
        if (value := getattr(effect, name)) is not None
    }
    connection.execute(
        sa.update(Model)
        .where(col(Model.id) == effect.model_id, col(Model.state).in_(TAKES_WORK))
        .values(state=ModelState.LIVE, detail=None, step=effect.step, **decided)
    )


def checkpoint_row(connection: sa.Connection, saved: CheckpointSaved, now: datetime) -> None:
    """Write the row of a committed checkpoint, over that of an earlier one of its path: what that had set is gone."""
    values = {
        **asdict(saved),
        "user_metadata": dict(saved.user_metadata),
        "created_at": saved.created_at or now,
        "public": False,
        "deleted_at": None,
        "purged_at": None,
        "noted": True,
    }
    if not insert_if_absent(connection, Checkpoint, values):
        connection.execute(sa.update(Checkpoint).where(col(Checkpoint.path) == saved.path).values(**values))


def _note_saved(connection: sa.Connection, effect: CheckpointSaved, now: datetime) -> None:
    details = {"kind": effect.kind, "step": effect.step, "size_bytes": effect.size_bytes}
    audit.note(
        connection,
        now,
        owner=effect.owner,
        event=audit.Event.CHECKPOINT_SAVED,
        model_id=effect.run_id,
        tinker_path=effect.path,
        details=details,
    )
