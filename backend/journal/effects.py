"""Effects of operations on models, and the ends of models and samplers, which fail the requests waiting for them.

Effects, and functions that end models or samplers, return the topics to publish after the commit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Literal

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.errors import Category
from tinkerflow.backend.journal.database import CutText, in_chunks, in_id_order, locked_ids
from tinkerflow.backend.journal.run_events import put_event
from tinkerflow.backend.journal.samplers import COMPLETION, NEXT_COMPLETION
from tinkerflow.backend.journal.tables import (
    IS_PENDING,
    TAKES_WORK,
    UNMADE,
    Model,
    ModelState,
    Request,
    RequestState,
    SamplerRow,
    SamplerState,
    TrainingStep,
    model_ended,
    sampler_ended,
)
from tinkerflow.backend.journal.topics import answered
from tinkerflow.backend.spec.history import Kind

_SAMPLER = ":sampler"  # stands for its id in a text
LET_GO = {
    "replays": False,
    "payload": sa.case((col(Request.dropped_at).is_not(None), b""), else_=col(Request.payload)),
}
_STEP_MADE = sa.update(Model).where(col(Model.id) == sa.bindparam("of_model")).values(step=sa.bindparam("to_step"))


# ------------------------------------------------------------------ effects of operations
@dataclass(frozen=True)
class ModelLive:
    """The model now exists in the worker group. rank, train_*, expert_rank: set if a checkpoint determines them."""

    model_id: str
    step: int = 0
    rank: int | None = None
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None
    expert_rank: int | None = None

    def apply(self, connection: sa.Connection, now: datetime) -> Sequence[str]:
        """Mark the model live, with its adapter's settings if a checkpoint determines them."""
        decided = {
            name: value
            for name in ("rank", "train_attn", "train_mlp", "train_unembed")
            if (value := getattr(self, name)) is not None
        }
        if self.rank is not None:
            decided["expert_rank"] = self.expert_rank
            # A checkpoint contains no gradients, so losses of the replaced gradients belong to no step.
            unmade = (col(TrainingStep.model_id) == self.model_id, col(TrainingStep.seq_id) == UNMADE)
            connection.execute(sa.delete(TrainingStep).where(*unmade))
        connection.execute(
            sa.update(Model)
            .where(col(Model.id) == self.model_id, col(Model.state).in_(TAKES_WORK))
            .values(state=ModelState.LIVE, detail=None, step=self.step, **decided)
        )
        return ()


@dataclass(frozen=True)
class ModelEnded:
    """The model accepts no more work. Requests that wait for it fail in the same transaction, with `detail`."""

    model_id: str
    state: Literal[ModelState.LOST, ModelState.UNLOADED, ModelState.FAILED]
    detail: str

    def apply(self, connection: sa.Connection, now: datetime) -> Sequence[str]:
        return end_models(connection, [self.model_id], self.state, self.detail, now)


@dataclass(frozen=True)
class StepMade:
    """The model has now made `step` optimizer steps (after an optim_step, or after loading weights)."""

    model_id: str
    step: int

    def apply(self, connection: sa.Connection, now: datetime) -> Sequence[str]:
        connection.execute(_STEP_MADE, {"of_model": self.model_id, "to_step": self.step})
        return ()


# ------------------------------------------------------------------ the end of models and samplers
def end_models(
    connection: sa.Connection, model_ids: Sequence[str], state: ModelState, detail: str, now: datetime
) -> list[str]:
    """End models that still accept work, and fail the requests that wait for them. Returns the topics.

    connection: the caller's transaction. model_ids: models in any state; ended models are left unchanged. state,
    detail: the final state and its reason. now: the time of the end. Unloaded models cannot be revived, so their
    requests are no longer kept for replays.
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
            level = logging.INFO if state is ModelState.UNLOADED else logging.ERROR
            put_event(connection, model_id, now, f"{state}: {detail}", level)
            topics += [*failed, f"model:{model_id}"]
    return topics


def close_samplers(connection: sa.Connection, session_id: str, detail: str, now: datetime) -> list[str]:
    """Close the session's live samplers, and fail the requests that wait for them. Returns the topics.

    Four statements, because a session may have thousands of samplers.
    """
    # Not `state = 'live'`, for which SQLite reads the live samplers of all sessions.
    live = (col(SamplerRow.session_id) == session_id, col(SamplerRow.state) != SamplerState.CLOSED)
    if not locked_ids(connection, SamplerRow, *live):
        return []
    closed = sa.update(SamplerRow).where(*live).values(state=SamplerState.CLOSED, detail=detail, **NEXT_COMPLETION)
    ids = connection.execute(closed.returning(col(SamplerRow.id))).scalars().all()
    text, category = sampler_ended(_SAMPLER, detail)
    before, after = text.split(_SAMPLER, 1)
    error = sa.literal(before, sa.String) + col(Request.sampler_id) + sa.literal(after, CutText())
    # A condition on sampler_id would make SQLite read the samplers' answered requests, too.
    waiting = (IS_PENDING, col(Request.session_id) == session_id, col(Request.kind) == Kind.SAMPLE)
    pending = connection.execute(sa.select(col(Request.id)).where(*waiting)).scalars().all()
    failed = [_fail_pending(connection, now, error, category, col(Request.id).in_(some)) for some in in_chunks(pending)]
    return [*chain.from_iterable(failed), *map(answered, ids), "sample"]


def _fail_pending(
    connection: sa.Connection,
    now: datetime,
    error: str | sa.ColumnElement[str],
    category: Category,
    *where: sa.ColumnElement[bool],
) -> list[str]:
    """Fail every pending request that matches `where`. Returns the topics. One statement, which locks in id order.

    error: the text, or an expression for it. The caller must already have taken the next completion number of every
    affected sampler.
    """
    statement = (
        sa.update(Request)
        .where(in_id_order(Request, IS_PENDING, *where))
        .values(state=RequestState.FAILED, error=error, category=category, finished_at=now, completion=COMPLETION)
        .returning(col(Request.id))
    )
    return [f"done:{request_id}" for request_id in connection.execute(statement).scalars()]


def forget(connection: sa.Connection, model_id: str, *where: sa.ColumnElement[bool]) -> None:
    """Stop keeping the model's requests that match `where` (default: all) for replays, so payloads may be dropped."""
    replayed = (col(Request.model_id) == model_id, *where, col(Request.replays))
    connection.execute(sa.update(Request).where(in_id_order(Request, *replayed)).values(**LET_GO))
