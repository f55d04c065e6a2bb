"""Models (training runs): creation, pauses, revival, ends, and lists with their newest checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.ids import CheckpointKind
from tinkerflow.backend.journal.checkpoints import CheckpointView, Page, exists
from tinkerflow.backend.journal.database import (
    MOST_OF_SESSION,
    Aggregate,
    as_view,
    fetch_page,
    get_owned,
    insert_if_absent,
    owned_by,
)
from tinkerflow.backend.journal.effects import end_models, forget
from tinkerflow.backend.journal.quotas import NO_LIMITS, Failure, Limits, count_kept, model_failure, text_bytes
from tinkerflow.backend.journal.requests import NewRequest, lock_quotas, store
from tinkerflow.backend.journal.run_events import put_event
from tinkerflow.backend.journal.sessions import PROJECT
from tinkerflow.backend.journal.tables import (
    IS_PENDING,
    TAKES_WORK,
    Checkpoint,
    Model,
    ModelState,
    RecoverySnapshot,
    Request,
    Session,
    SessionState,
    TrainingStep,
    session_over,
)
from tinkerflow.backend.spec.checkpoint import CheckpointPath
from tinkerflow.backend.spec.commands import Optimizer
from tinkerflow.backend.spec.history import Kind
from tinkerflow.backend.spec.run_metadata import OUTCOME, REASON, Outcome

_IS_UNLOAD = sa.and_(col(Request.kind) == Kind.UNLOAD, IS_PENDING)
_GIVEN_NAMES = (
    metadata[key].as_string()
    for metadata in (col(Model.user_metadata), col(Session.user_metadata))
    for key in ("name", "recipe_name")  # the SDK cookbook sets `recipe_name`
)
WITH_SESSION = sa.join(Model, Session, col(Session.id) == col(Model.session_id))
# The client's name of a run, from WITH_SESSION: in the metadata of the run or of its session, or the session's name.
RUN_NAME: sa.ColumnElement[str] = sa.func.coalesce(
    *(sa.func.nullif(sa.func.trim(name), "") for name in (*_GIVEN_NAMES, col(Session.display_name))), ""
)
_REVIVABLE = (ModelState.LOST, ModelState.FAILED)  # their snapshots and requests are kept until their session ends


@dataclass(frozen=True)
class NewModel:
    """A new training run. Its id is `{session_id}:train:{n}` (tinkerflow.backend.core.ids.model_id).

    history: whether its requests are kept in the store. origin: the path of the checkpoint that it begins with.
    """

    id: str
    session_id: str
    owner: str
    base_model: str
    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    expert_rank: int | None = None
    optimizer: Optimizer = "adamw"
    seed: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    history: bool = False
    origin: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelView(NewModel):
    """A model (training run). detail: the reason of its state. step: optimizer steps. next_seq: the next to execute.

    paused: why a person paused it, or None. archived: whether a person has hidden it from the table of runs. flow_run:
    the id of the flow run that shows it in Prefect, or None.
    """

    state: ModelState
    detail: str | None
    paused: str | None
    archived: bool
    flow_run: str | None
    next_seq: int
    step: int
    created_at: datetime
    last_request_at: datetime

    @property
    def is_lora(self) -> bool:
        """Whether it trains an adapter instead of all parameters. Models that were never created count as adapters."""
        return self.rank > 0 or self.state is ModelState.FAILED


@dataclass(frozen=True)
class RunView:
    """A training run with the newest checkpoint of each kind."""

    model: ModelView
    last_checkpoint: CheckpointView | None
    last_sampler_checkpoint: CheckpointView | None


class Runs(Aggregate):
    """Models (training runs)."""

    def create(self, model: NewModel, request: NewRequest, limits: Limits = NO_LIMITS) -> str:
        """Store a model in state `creating` and the request (seq_id 0) that creates it. For replays see
        Requests.submit.

        If the request has an error, the session has ended, or the project exceeds its `limits`, both are stored as
        failed. NotFoundError: unknown or foreign session. ConflictError: another request created the model. UserError:
        the project has reached its limit of training runs.
        """
        if request.model_id != model.id or request.seq_id != 0:
            raise ValueError(f"model {model.id}: its creation must name it with seq_id 0, not {request.seq_id!r}")
        now = self._now()
        with self._write() as connection:
            lock_quotas(connection, limits, request)
            # Locked, so that a concurrent end of the session either includes this model or comes before it.
            session = get_owned(connection, Session, model.session_id, model.owner, lock="share")
            failure: Failure = None if request.error is None else (request.error, UserError.category)
            if session.state != SessionState.ACTIVE:
                failure = session_over(session.id, session.state, session.detail)
            failure = failure or model_failure(connection, model.owner, limits)
            state, detail = (ModelState.CREATING, None) if failure is None else (ModelState.FAILED, failure[0])
            insert_model(connection, model, state, detail, now, limits=limits)
            archives = model.history and failure is None
            request_id = store(connection, request, model.session_id, failure, now, archives=archives)
        self._publish(f"model:{model.id}")
        return request_id

    def get(self, model_id: str, owner: str | None) -> ModelView:
        """A model. NotFoundError: unknown or foreign model."""
        with self._read() as connection:
            return as_view(ModelView, get_owned(connection, Model, model_id, owner))

    def label(self, model_id: str) -> str:
        """The name of a run; "" if the client gave none."""
        named = sa.select(RUN_NAME).select_from(WITH_SESSION)
        return next(iter(self._column(named.where(col(Model.id) == model_id))), "")

    def of_session(self, session_id: str) -> list[str]:
        """Ids of at most MOST_OF_SESSION of the session's models, in any state, oldest first."""
        oldest = (col(Model.created_at), col(Model.id))
        of_session = sa.select(col(Model.id)).where(col(Model.session_id) == session_id, *owned_by(Model, None))
        statement = of_session.order_by(*oldest).limit(MOST_OF_SESSION)
        return self._column(statement)

    def abandoned(self) -> list[str]:
        """Ids of models that accept work although their session has ended, and that no pending request unloads."""
        unloading = sa.exists().where(col(Request.model_id) == col(Model.id), _IS_UNLOAD)
        statement = (
            sa.select(col(Model.id))
            .join(Session, col(Session.id) == col(Model.session_id))
            .where(col(Model.state).in_(TAKES_WORK), col(Session.state) != SessionState.ACTIVE, sa.not_(unloading))
            .order_by(col(Model.id))
        )
        return self._column(statement)

    def run(self, run_id: str, owner: str | None) -> RunView:
        """A training run (with the id of its model) and its newest checkpoints. NotFoundError: unknown or foreign."""
        with self._read() as connection:
            return _with_checkpoints(connection, [get_owned(connection, Model, run_id, owner)], self._now())[0]

    def runs(
        self,
        owner: str | None,
        *,
        limit: int,
        offset: int,
        project_id: str | None = None,
    ) -> Page[RunView]:
        """Training runs, newest first, except those that `nothing_made` finds. Three statements.

        owner: the runs' owner; None: any. limit: the most runs on a page; fewer if metadata is long. offset: the number
        of newer runs to skip. project_id: only runs in this project's sessions.
        """
        mine = (*owned_by(Model, owner), sa.not_(nothing_made(self._now())))
        if project_id is not None:
            in_project = sa.select(col(Session.id)).where(PROJECT.in_([project_id]), *owned_by(Session, owner))
            mine = (*mine, col(Model.session_id).in_(in_project))
        newest = (col(Model.created_at).desc(), col(Model.id))
        with self._read() as connection:
            total = connection.execute(sa.select(sa.func.count()).select_from(Model).where(*mine)).scalar_one()
            selected = sa.select(Model).where(*mine).order_by(*newest)
            rows, cut = fetch_page(connection, selected.limit(limit).offset(offset))
            return Page(tuple(_with_checkpoints(connection, rows, self._now())), total, cut)

    def request_unload(self, model_id: str, reason: str, owner: str | None = None) -> str | None:
        """Store a request that unloads a model after its executable requests. Returns the request's id.

        The id of an already pending unload is returned again. None if the model has ended. owner: the model's owner;
        None: any. NotFoundError: unknown or foreign model.
        """
        with self._write() as connection:
            model = get_owned(connection, Model, model_id, owner, lock="change")
            request_id = None
            if model.state in TAKES_WORK:
                waiting = sa.select(col(Request.id)).where(col(Request.model_id) == model_id, _IS_UNLOAD)
                unload = NewRequest(Kind.UNLOAD, model.owner, reason.encode(), content_hash="", model_id=model_id)
                request_id = connection.execute(waiting).scalar() or store(
                    connection, unload, model.session_id, None, self._now()
                )
        self._publish(f"model:{model_id}")
        return request_id

    def end(self, model_id: str, state: ModelState, detail: str) -> None:
        """End a model that still accepts work. Its pending requests fail with `detail`."""
        with self._write() as connection:
            topics = end_models(connection, [model_id], state, detail, self._now())
        self._publish(*topics)

    def pause(self, model_id: str, why: str | None) -> None:
        """Pause the model's requests, for a reason that is shown to its clients. None: resume the model."""
        with self._write() as connection:
            is_model = col(Model.id) == model_id
            if connection.execute(sa.select(col(Model.paused)).where(is_model)).scalar() != why:
                connection.execute(sa.update(Model).where(is_model).values(paused=why))
                put_event(connection, model_id, self._now(), "resumed" if why is None else f"paused: {why}")

    def revive(self, model_id: str) -> None:
        """Make a failed or lost model live again. Its next request restores it from snapshots and a replay.

        UserError: the model was unloaded or never created, or its session has ended. A model that accepts work is left
        unchanged.
        """
        with self._write() as connection:
            model = get_owned(connection, Model, model_id, None)
            if model.state in TAKES_WORK:
                return
            if model.state not in _REVIVABLE:
                raise UserError(f"model {model_id} was unloaded ({model.detail}): nothing to continue from")
            session = get_owned(connection, Session, model.session_id, None)
            if session.state != SessionState.ACTIVE:
                raise UserError(f"session {session.id} of model {model_id} is {session.state}: no client could use it")
            snapshot = sa.exists().where(
                col(RecoverySnapshot.model_id) == model_id, col(RecoverySnapshot.snapshot_id).is_(None)
            )
            replayed = sa.exists().where(col(Request.model_id) == model_id, col(Request.replays))
            if not connection.execute(sa.select(sa.or_(snapshot, replayed))).scalar():
                raise UserError(f"model {model_id} was never created ({model.detail}): nothing to continue from")
            back = {"state": ModelState.LIVE, "detail": None, "paused": None}
            connection.execute(sa.update(Model).where(col(Model.id) == model_id).values(**back))
            put_event(connection, model_id, self._now(), f"resumed; before that, it was {model.state}: {model.detail}")

    def forget_ended(self) -> None:
        """Stop keeping requests for failed and lost models whose session has ended, because they cannot be revived."""
        over = (
            sa.select(col(Model.id))
            .join(Session, col(Session.id) == col(Model.session_id))
            .where(col(Model.state).in_(_REVIVABLE), col(Session.state) != SessionState.ACTIVE)
        )
        replayed = (col(Request.replays) == sa.true(), col(Request.model_id).in_(over))
        held = sa.select(col(Request.model_id)).where(*replayed).distinct()
        with self._write() as connection:
            for model_id in connection.execute(held).scalars().all():
                forget(connection, str(model_id))

    def note_progress(self, model_id: str, text: str | None) -> None:
        """Set the reason why a model's requests wait, or clear it (None)."""
        with self._write(lasting=False) as connection:
            connection.execute(sa.update(Model).where(col(Model.id) == model_id).values(progress=text))

    def note_flow_run(self, model_id: str, flow_run: str) -> None:
        """Set the id of the flow run that shows a model in Prefect."""
        with self._write() as connection:
            connection.execute(sa.update(Model).where(col(Model.id) == model_id).values(flow_run=flow_run))

    def note_outcome(self, model_id: str, owner: str, outcome: Outcome, reason: str) -> None:
        """Record in a run's metadata and events how its program ended, and why. The last outcome counts.

        NotFoundError: unknown or foreign run.
        """
        with self._write() as connection:
            metadata = get_owned(connection, Model, model_id, owner, lock="change").user_metadata
            noted = {**metadata, OUTCOME: outcome, REASON: reason}
            if noted == metadata:
                return
            connection.execute(sa.update(Model).where(col(Model.id) == model_id).values(user_metadata=noted))
            level = logging.ERROR if outcome == "failed" else logging.INFO
            put_event(connection, model_id, self._now(), f"{outcome}: {reason}" if reason else outcome, level)


def nothing_made(now: datetime) -> sa.ColumnElement[bool]:
    """The filter for runs that ended without a step, a checkpoint or a recorded outcome."""
    kept = sa.exists().where(col(Checkpoint.run_id) == col(Model.id), exists(now)).correlate(Model)
    trained = (
        sa.exists().where(col(TrainingStep.model_id) == col(Model.id), col(TrainingStep.seq_id) >= 0).correlate(Model)
    )
    ended = col(Model.state).in_((ModelState.UNLOADED, ModelState.FAILED))
    began = sa.or_(col(Model.step) == 0, col(Model.origin).is_not(None))  # a loaded state brings its number of steps
    return sa.and_(
        ended, began, col(Model.user_metadata)[OUTCOME].as_string().is_(None), sa.not_(trained), sa.not_(kept)
    )


def insert_model(
    connection: sa.Connection,
    model: NewModel,
    state: ModelState,
    detail: str | None,
    now: datetime,
    step: int = 0,
    limits: Limits = NO_LIMITS,
) -> None:
    """Insert the row of a model unless its id exists.

    connection: the caller's transaction. state, detail, step: initial values. now: the time of creation. limits: its
    project's limits. UserError: a limit is reached.
    """
    row = {
        **asdict(model),
        "user_metadata": dict(model.user_metadata),
        "origin_run": None if model.origin is None else CheckpointPath.parse(model.origin).run_id,
        "state": state,
        "detail": detail,
        "next_seq": 0,
        "step": step,
        "created_at": now,
        "last_request_at": now,
    }
    if insert_if_absent(connection, Model, row):
        texts = kept_texts(model.base_model, model.user_metadata)
        count_kept(connection, model.owner, "training_runs", texts, limits)


def kept_texts(base_model: str, metadata: Mapping[str, str]) -> int:
    """The bytes that the texts of a new run count for its project. `note_outcome` adds texts that do not count."""
    return text_bytes(base_model, *metadata, *metadata.values())


def _with_checkpoints(connection: sa.Connection, models: Sequence[sa.Row[Any]], now: datetime) -> list[RunView]:
    ids = [row.id for row in models]
    ranked = (
        sa.select(
            col(Checkpoint.path),
            sa.func.row_number()
            .over(
                partition_by=(col(Checkpoint.run_id), col(Checkpoint.kind)),
                order_by=(col(Checkpoint.created_at).desc(), col(Checkpoint.path)),
            )
            .label("age"),
        )
        .where(col(Checkpoint.run_id).in_(ids), exists(now))
        .subquery()
    )
    newest = sa.select(Checkpoint).join(ranked, ranked.c.path == col(Checkpoint.path)).where(ranked.c.age == 1)
    latest = {(row.run_id, row.kind): as_view(CheckpointView, row) for row in connection.execute(newest)}
    return [
        RunView(
            as_view(ModelView, row),
            latest.get((row.id, CheckpointKind.WEIGHTS)),
            latest.get((row.id, CheckpointKind.SAMPLER_WEIGHTS)),
        )
        for row in models
    ]
