"""Taking requests in. The unique constraints on (model | sampler, seq_id) judge who was first; replays get that id.

What cannot be executed (a model that ended, a session that is over, a seq_id given up as a gap, content that the API
found wrong) is stored all the same, already failed: a refused submit would hang the client (PROTOCOL.md 3.5).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapped
from sqlmodel import col

from tinkerflow.backend.errors import Category, ConflictError, UserError
from tinkerflow.backend.ids import new_id
from tinkerflow.backend.journal import completions
from tinkerflow.backend.journal.kinds import TAKES_WORK, Kind, ModelState, RequestState, SamplerState, SessionState
from tinkerflow.backend.journal.limits import (
    NO_LIMITS,
    Limits,
    check_sample,
    model_failure,
    take_turn,
    training_failure,
)
from tinkerflow.backend.journal.records import NewModel, NewRequest
from tinkerflow.backend.journal.statements import (
    IS_PENDING,
    answered,
    insert_if_absent,
    is_owned,
    missing,
    model_ended,
    owned_by,
    sampler_ended,
)
from tinkerflow.backend.journal.tables import Model, Request, Sampler, Session

Failure = tuple[str, Category] | None


def submit(
    connection: sa.Connection, request: NewRequest, now: datetime, limits: Limits = NO_LIMITS
) -> tuple[str, list[str]]:
    """Store one request; its id, or that of the equal request stored before it, and the bell's topics.

    Raises NotFoundError for an unknown or foreign model or sampler, ConflictError when the seq_id holds other content.
    """
    _check_address(request)
    take_turn(connection, request, limits)
    if request.model_id is not None:
        session_id, failure = _touch_model(connection, request.model_id, request, now)
        failure = failure or training_failure(connection, request, limits)
        return _store(connection, request, session_id, failure, now), [f"model:{request.model_id}"]
    sampler_id = str(request.sampler_id)
    session_id, failure = _look_at_sampler(connection, sampler_id, request)
    if failure is None:
        check_sample(connection, request, limits)
    number = None if failure is None else completions.take_number(connection, sampler_id)
    request_id = _store(connection, request, session_id, failure, now, number)
    return request_id, ["sample"] if failure is None else [answered(sampler_id, request.seq_id)]


def submit_new_model(
    connection: sa.Connection, model: NewModel, request: NewRequest, now: datetime, limits: Limits = NO_LIMITS
) -> str:
    """Store a model in state `creating` together with the request that creates it (seq_id 0)."""
    if request.model_id != model.id or request.seq_id != 0:
        raise ValueError(f"model {model.id}: its creation must name it with seq_id 0, not {request.seq_id!r}")
    take_turn(connection, request, limits)
    # Locked, so that a session which ends meanwhile either sees this model or is seen by it.
    locked = sa.select(Session).where(col(Session.id) == model.session_id, *owned_by(Session, model.owner))
    session = connection.execute(locked.with_for_update(read=True)).one_or_none()
    if session is None:
        raise missing(Session, model.session_id)
    failure: Failure = (request.error, request.category) if request.error is not None else None
    if session.state != SessionState.ACTIVE:
        failure = session_over(session.id, session.state, session.detail)
    failure = failure or model_failure(connection, model.owner, limits)
    insert_if_absent(
        connection,
        Model,
        {
            "id": model.id,
            "session_id": model.session_id,
            "owner": model.owner,
            "base_model": model.base_model,
            "rank": model.rank,
            "train_attn": model.train_attn,
            "train_mlp": model.train_mlp,
            "train_unembed": model.train_unembed,
            "optimizer": model.optimizer,
            "seed": model.seed,
            "user_metadata": dict(model.user_metadata),
            "state": ModelState.CREATING if failure is None else ModelState.FAILED,
            "detail": None if failure is None else failure[0],
            "next_seq": 0,
            "step": 0,
            "created_at": now,
            "last_request_at": now,
        },
    )
    return _store(connection, request, model.session_id, failure, now)


def request_unload(connection: sa.Connection, model_id: str, reason: str, now: datetime) -> str | None:
    """Store the service's own request to unload a model, or find the one that waits; None when it has ended already."""
    found = connection.execute(sa.select(Model).where(col(Model.id) == model_id).with_for_update()).one_or_none()
    if found is None:
        raise missing(Model, model_id)
    if found.state not in TAKES_WORK:
        return None
    of_model = (col(Request.model_id) == model_id, col(Request.kind) == Kind.UNLOAD, IS_PENDING)
    waiting = connection.execute(sa.select(col(Request.id)).where(*of_model)).scalar()
    if waiting is not None:
        return waiting
    request = NewRequest(
        Kind.UNLOAD, found.owner, reason.encode(), "json", content_hash="", model_id=model_id, seq_id=None
    )
    return _store(connection, request, found.session_id, None, now)


def session_over(session_id: str, state: str, detail: str | None) -> tuple[str, Category]:
    """What a request in a session that is over is answered."""
    return f"session {session_id} is {state}" + (f": {detail}" if detail else ""), UserError.category


def _of_session(column: Mapped[Any]) -> sa.ScalarSelect[Any]:
    return sa.select(column).where(col(Session.id) == col(Model.session_id)).scalar_subquery()


_TOUCH_MODEL = (
    sa.update(Model)
    .where(is_owned(Model))
    .values(last_request_at=sa.bindparam("now"))
    .returning(
        col(Model.session_id),
        col(Model.state),
        col(Model.detail),
        col(Model.next_seq),
        _of_session(col(Session.state)).label("session_state"),
        _of_session(col(Session.detail)).label("session_detail"),
    )
)
# The sampler's row stays as it is until we commit. Not FOR SHARE: a request that fails at once takes a number, and two
# that hold the row together would each wait for the other.
_LOOK_AT_SAMPLER = sa.select(Sampler).where(is_owned(Sampler)).with_for_update(key_share=True)


def _touch_model(connection: sa.Connection, model_id: str, request: NewRequest, now: datetime) -> tuple[str, Failure]:
    """Lock the model's row, note the time, and say whether it takes the request: one statement."""
    parameters = {"row_id": model_id, "as_owner": request.owner, "now": now}
    touched = connection.execute(_TOUCH_MODEL, parameters).one_or_none()
    if touched is None:
        raise missing(Model, model_id)
    if touched.state not in TAKES_WORK:
        return touched.session_id, model_ended(model_id, ModelState(touched.state), touched.detail)
    if touched.session_state != SessionState.ACTIVE:
        return touched.session_id, session_over(touched.session_id, touched.session_state, touched.session_detail)
    if request.seq_id is not None and request.seq_id < touched.next_seq:
        text = f"seq_id {request.seq_id} of model {model_id} came too late: it was given up, {touched.next_seq} is next"
        return touched.session_id, (text, UserError.category)
    return touched.session_id, (request.error, request.category) if request.error is not None else None


def _look_at_sampler(connection: sa.Connection, sampler_id: str, request: NewRequest) -> tuple[str, Failure]:
    """Whether the sampler takes the request: one statement."""
    parameters = {"row_id": sampler_id, "as_owner": request.owner}
    found = connection.execute(_LOOK_AT_SAMPLER, parameters).one_or_none()
    if found is None:
        raise missing(Sampler, sampler_id)
    if found.state != SamplerState.LIVE:
        return found.session_id, sampler_ended(sampler_id, SamplerState(found.state), found.detail)
    return found.session_id, (request.error, request.category) if request.error is not None else None


def _store(
    connection: sa.Connection,
    request: NewRequest,
    session_id: str,
    failure: Failure,
    now: datetime,
    completion: int | None = None,
) -> str:
    request_id = new_id("req")
    error, category = failure or (None, None)
    inserted = insert_if_absent(
        connection,
        Request,
        {
            "id": request_id,
            "kind": request.kind,
            "owner": request.owner,
            "session_id": session_id,
            "model_id": request.model_id,
            "sampler_id": request.sampler_id,
            "seq_id": request.seq_id,
            "content_hash": request.content_hash,
            "payload_type": request.payload_type,
            "payload": request.payload,
            "state": RequestState.PENDING if failure is None else RequestState.FAILED,
            "result_type": "json",
            "error": error,
            "category": category,
            "created_at": now,
            "finished_at": None if failure is None else now,
            "replays": False,
            "completion": completion,
            "waiting_tokens": request.tokens,
        },
    )
    return request_id if inserted else _replayed(connection, request)


def _replayed(connection: sa.Connection, request: NewRequest) -> str:
    """The id of the request that has our seq_id, if it is the same request."""
    if request.model_id is not None:
        noun, address, where = "model", request.model_id, col(Request.model_id) == request.model_id
    else:
        noun, address, where = "sampler", str(request.sampler_id), col(Request.sampler_id) == request.sampler_id
    stored = connection.execute(
        sa.select(col(Request.id), col(Request.kind), col(Request.content_hash)).where(
            where, col(Request.seq_id) == request.seq_id
        )
    ).one()
    if (stored.kind, stored.content_hash) != (request.kind, request.content_hash):
        raise ConflictError(
            f"seq_id {request.seq_id} of {noun} {address} was used before for another request ({stored.kind}); "
            "a repeated request must have the same content"
        )
    return str(stored.id)


def _check_address(request: NewRequest) -> None:
    if (request.model_id is None) == (request.sampler_id is None) or request.seq_id is None:
        raise ValueError(f"{request.kind} request: needs a seq_id and exactly one of model_id and sampler_id")
