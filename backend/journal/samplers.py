"""Sampling sessions that a client opens itself, and which snapshots are still in use."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.errors import ConflictError, UserError
from tinkerflow.backend.journal import effects
from tinkerflow.backend.journal.kinds import SamplerState, SessionState
from tinkerflow.backend.journal.records import NewSampler
from tinkerflow.backend.journal.statements import missing, owned_by
from tinkerflow.backend.journal.submitting import session_over
from tinkerflow.backend.journal.tables import Sampler, Session


def open_sampler(connection: sa.Connection, sampler: NewSampler, now: datetime) -> str:
    """Make a sampler in an active session; repeating it changes nothing, the id with other content is a conflict."""
    locked = sa.select(Session).where(col(Session.id) == sampler.session_id, *owned_by(Session, sampler.owner))
    session = connection.execute(locked.with_for_update(read=True)).one_or_none()
    if session is None:
        raise missing(Session, sampler.session_id)
    if session.state != SessionState.ACTIVE:
        raise UserError(session_over(session.id, session.state, session.detail)[0])
    if not effects.open_sampler(connection, sampler, now):
        stored = connection.execute(sa.select(Sampler).where(col(Sampler.id) == sampler.id)).one()
        if (stored.base_model, stored.model_path) != (sampler.base_model, sampler.model_path):
            raise ConflictError(
                f"sampler {sampler.id} exists already for {stored.model_path or stored.base_model}, "
                f"not for {sampler.model_path or sampler.base_model}"
            )
    return sampler.id


def unused_snapshots(connection: sa.Connection, snapshot_ids: Collection[str]) -> set[str]:
    """Those of the snapshots that no live sampler uses."""
    live = (col(Sampler.snapshot_id).in_(snapshot_ids), col(Sampler.state) == SamplerState.LIVE)
    used = connection.execute(sa.select(col(Sampler.snapshot_id)).where(*live)).scalars()
    return set(snapshot_ids) - set(used)
