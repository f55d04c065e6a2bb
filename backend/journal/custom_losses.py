"""Losses that clients traced and sent. Each belongs to its session, and its number there judges replays."""

from __future__ import annotations

from datetime import datetime

import orjson
import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.errors import ConflictError, NotFoundError, UserError
from tinkerflow.backend.ids import custom_loss_id, new_id
from tinkerflow.backend.journal.kinds import Kind, RequestState, SessionState
from tinkerflow.backend.journal.records import NewCustomLoss
from tinkerflow.backend.journal.statements import insert_if_absent, missing, owned_by
from tinkerflow.backend.journal.submitting import session_over
from tinkerflow.backend.journal.tables import CustomLoss, Request, Session


def submit(connection: sa.Connection, loss: NewCustomLoss, now: datetime) -> str:
    """Store a loss with the answered request that asked for it; the request's id, of a replay the first one's.

    NotFoundError: unknown or foreign session. ConflictError: the number holds other content. A loss with an error, or
    in a session that is over, is stored as a failed request: a refusal would hang the client.
    """
    locked = sa.select(Session).where(col(Session.id) == loss.session_id, *owned_by(Session, loss.owner))
    session = connection.execute(locked.with_for_update(read=True)).one_or_none()
    if session is None:
        raise missing(Session, loss.session_id)
    error = loss.error
    if session.state != SessionState.ACTIVE:
        error, _ = session_over(session.id, session.state, session.detail)
    loss_id, request_id = custom_loss_id(loss.session_id, loss.seq_id), new_id("req")
    row = {
        "id": loss_id,
        "session_id": loss.session_id,
        "owner": loss.owner,
        "seq_id": loss.seq_id,
        "request_id": request_id,
        "name": loss.name,
        "definition": loss.definition if error is None else None,
        "created_at": now,
    }
    if not insert_if_absent(connection, CustomLoss, row):
        return _replayed(connection, loss_id, loss)
    answer = {
        "state": RequestState.DONE if error is None else RequestState.FAILED,
        "result": orjson.dumps({"type": "create_custom_loss", "loss_id": loss_id}) if error is None else None,
        "error": error,
        "category": None if error is None else UserError.category,
    }
    connection.execute(
        sa.insert(Request).values(
            id=request_id,
            kind=Kind.CREATE_CUSTOM_LOSS,
            owner=loss.owner,
            session_id=loss.session_id,
            content_hash=loss.content_hash,
            payload_type="json",
            payload=loss.payload,
            result_type="json",
            waiting_tokens=0,
            created_at=now,
            finished_at=now,
            **answer,
        )
    )
    return request_id


def definition(connection: sa.Connection, loss_id: str, session_id: str) -> str:
    """The definition of a loss of this session; NotFoundError for unknown ones and those of other sessions alike."""
    of_session = (col(CustomLoss.id) == loss_id, col(CustomLoss.session_id) == session_id)
    found = connection.execute(sa.select(col(CustomLoss.definition)).where(*of_session)).scalar()
    if found is None:
        raise NotFoundError(f"loss_fn_config['loss_id'] {loss_id!r}: this session has no custom loss of that id")
    return found


def _replayed(connection: sa.Connection, loss_id: str, loss: NewCustomLoss) -> str:
    stored = connection.execute(
        sa.select(col(Request.id), col(Request.content_hash))
        .join(CustomLoss, col(CustomLoss.request_id) == col(Request.id))
        .where(col(CustomLoss.id) == loss_id)
    ).one()
    if stored.content_hash != loss.content_hash:
        raise ConflictError(
            f"custom_loss_seq_id {loss.seq_id} of session {loss.session_id} was used before for another loss; "
            "a repeated request must have the same content"
        )
    return str(stored.id)
