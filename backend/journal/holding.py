"""What people ask of a training run while it goes: hold it, go on, and take it up again after it failed."""

from __future__ import annotations

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.errors import UserError
from tinkerflow.backend.journal import history
from tinkerflow.backend.journal.kinds import TAKES_WORK, ModelState, SessionState
from tinkerflow.backend.journal.statements import get_owned
from tinkerflow.backend.journal.tables import Model, Request, Session

# What made them is kept until their session is over.
KEPT = (ModelState.LOST, ModelState.FAILED)


def hold(connection: sa.Connection, model_id: str, why: str | None) -> None:
    """Let nothing of the model be executed, for the reason that its clients are told; None: let it go on."""
    connection.execute(sa.update(Model).where(col(Model.id) == model_id).values(held=why))


def revive(connection: sa.Connection, model_id: str) -> None:
    """Make a model that failed or was lost live again: it is restored from what the journal has of it.

    UserError when it was unloaded, never made, or its session is over. Does nothing to a model that takes work.
    """
    model = get_owned(connection, Model, model_id, None)
    if model.state in TAKES_WORK:
        return
    if model.state not in KEPT:
        raise UserError(f"model {model_id} was unloaded ({model.detail}): there is nothing to go on with")
    session = get_owned(connection, Session, model.session_id, None)
    if session.state != SessionState.ACTIVE:
        raise UserError(f"session {session.id} of model {model_id} is {session.state}: nobody could use it")
    if not history.snapshots(connection, model_id) and not history.count_executed(connection, model_id, -1):
        raise UserError(f"model {model_id} was never made ({model.detail}): there is nothing to go on with")
    back = {"state": ModelState.LIVE, "detail": None, "held": None}
    connection.execute(sa.update(Model).where(col(Model.id) == model_id).values(**back))


def let_go(connection: sa.Connection) -> None:
    """Forget what made the models that failed or were lost in sessions that are over: nobody can revive them."""
    over = (
        sa.select(col(Model.id))
        .join(Session, col(Session.id) == col(Model.session_id))
        .where(col(Model.state).in_(KEPT), col(Session.state) != SessionState.ACTIVE)
    )
    replays = (col(Request.replays) == sa.true(), col(Request.model_id).in_(over))
    held = sa.select(col(Request.model_id)).where(*replays).distinct()
    for model_id in connection.execute(held).scalars().all():
        history.forget(connection, str(model_id))
