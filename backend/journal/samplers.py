"""Samplers: sampling sessions that clients open themselves, and the numbers of their answers.

Every transaction that answers requests of a sampler takes the sampler's next number and stores it with the requests
(`completion`). results.py explains their purpose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.errors import ConflictError, UserError
from tinkerflow.backend.journal.database import (
    MOST_OF_SESSION,
    Aggregate,
    as_view,
    get_owned,
    insert_if_absent,
    is_owned,
    missing,
)
from tinkerflow.backend.journal.quotas import NO_LIMITS, Limits, count_kept, text_bytes
from tinkerflow.backend.journal.tables import Request, SamplerRow, SamplerState, Session, SessionState, session_over

NEXT_COMPLETION = {"last_completion": col(SamplerRow.last_completion) + 1}
# The number of the current transaction; NULL for training requests.
COMPLETION = (
    sa.select(col(SamplerRow.last_completion)).where(col(SamplerRow.id) == col(Request.sampler_id)).scalar_subquery()
)
_JOIN = (
    sa.update(SamplerRow)
    .where(is_owned(SamplerRow))
    .values(clones=col(SamplerRow.clones) + 1)
    .returning(col(SamplerRow.clones))
)


@dataclass(frozen=True)
class NewSampler:
    """A sampling session. Its id is `{session_id}:sample:{n}` (tinkerflow.backend.core.ids.sampler_id).

    model_path: its checkpoint, which can be loaded again. snapshot_id: its snapshot in the worker group. If both are
    None, it samples from the base model.
    """

    id: str
    session_id: str
    owner: str
    base_model: str
    model_path: str | None = None
    snapshot_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class SamplerView(NewSampler):
    """A sampling session."""

    state: SamplerState
    detail: str | None
    created_at: datetime


@dataclass(frozen=True)
class SamplerOpened:
    """An unnamed save_weights_for_sampler created a sampler."""

    sampler: NewSampler

    def apply(self, connection: sa.Connection, now: datetime) -> Sequence[str]:
        """Insert the sampler's row. ConflictError: the id was used for other weights.

        The row belongs to the session's project, even if the first key was created during the save.
        """
        of_session = sa.select(col(Session.owner)).where(col(Session.id) == self.sampler.session_id)
        owner = connection.execute(of_session).scalar() or self.sampler.owner
        if not insert_sampler(connection, replace(self.sampler, owner=owner), now):
            _check_same(connection, self.sampler)
        return ()


@dataclass(frozen=True)
class SamplerLoaded:
    """The worker group loaded the sampler's checkpoint as this snapshot; None if it dropped the snapshot."""

    sampler_id: str
    snapshot_id: str | None

    def apply(self, connection: sa.Connection, now: datetime) -> Sequence[str]:
        loaded = sa.update(SamplerRow).where(col(SamplerRow.id) == self.sampler_id)
        connection.execute(loaded.values(snapshot_id=self.snapshot_id))
        return ()


class Samplers(Aggregate):
    """Sampling sessions."""

    def open(self, sampler: NewSampler, limits: Limits = NO_LIMITS) -> str:
        """Create a sampler and return its id. Repeating the call changes nothing.

        NotFoundError: unknown or foreign session. UserError: the session has ended. ConflictError: the id was used for
        other content.
        """
        with self._write() as connection:
            session = get_owned(connection, Session, sampler.session_id, sampler.owner, lock="share")
            if session.state != SessionState.ACTIVE:
                raise UserError(session_over(session.id, session.state, session.detail)[0])
            if not insert_sampler(connection, sampler, self._now(), limits):
                _check_same(connection, sampler)
        return sampler.id

    def check_free(self, sampler: NewSampler) -> None:
        """ConflictError: the sampler's id was used for other weights."""
        with self._read() as connection:
            _check_same(connection, sampler)

    def get(self, sampler_id: str, owner: str | None) -> SamplerView:
        """A sampler. NotFoundError: unknown or foreign sampler."""
        with self._read() as connection:
            return as_view(SamplerView, get_owned(connection, SamplerRow, sampler_id, owner))

    def of_session(self, session_id: str, limit: int = MOST_OF_SESSION) -> list[SamplerView]:
        """At most `limit` of the session's samplers, in any state."""
        statement = sa.select(SamplerRow).where(col(SamplerRow.session_id) == session_id).order_by(col(SamplerRow.id))
        return self._views(SamplerView, statement.limit(limit))

    def unused_snapshots(self, snapshot_ids: Collection[str]) -> set[str]:
        """The snapshots among `snapshot_ids` that no live sampler uses, and that can therefore be dropped."""
        live = (col(SamplerRow.snapshot_id).in_(snapshot_ids), col(SamplerRow.state) == SamplerState.LIVE)
        used = self._column(sa.select(col(SamplerRow.snapshot_id)).where(*live))
        return set(snapshot_ids).difference(used)

    def join(self, sampler_id: str, owner: str | None) -> int:
        """Assign a new number, starting at 1, to a copy of the sampler's client. One statement.

        NotFoundError: unknown or foreign sampler.
        """
        with self._write() as connection:
            clone = connection.execute(_JOIN, {"row_id": sampler_id, "as_owner": owner}).scalar()
        if clone is None:
            raise missing(SamplerRow, sampler_id)
        return int(clone)


def insert_sampler(connection: sa.Connection, sampler: NewSampler, now: datetime, limits: Limits = NO_LIMITS) -> bool:
    """Insert the sampler's row unless its id exists. Returns whether it was inserted. UserError: over a limit."""
    values = {**asdict(sampler), "state": SamplerState.LIVE, "created_at": now, "last_completion": 0, "clones": 0}
    made = insert_if_absent(connection, SamplerRow, values)
    if made:
        count_kept(connection, sampler.owner, "samplers", text_bytes(sampler.base_model, sampler.model_path), limits)
    return made


def _check_same(connection: sa.Connection, sampler: NewSampler) -> None:
    """ConflictError: the sampler's row exists and has other weights."""
    stored = connection.execute(sa.select(SamplerRow).where(col(SamplerRow.id) == sampler.id)).one_or_none()
    if stored is None or _weights(stored) == _weights(sampler):
        return
    (old_base, old), (base, new) = _weights(stored), _weights(sampler)
    raise ConflictError(
        f"sampler {sampler.id} exists already for {old or old_base}, not for {new or base}: "
        "sampling_session_seq_id must be a number that the session has not used before"
    )


def _weights(sampler: NewSampler | sa.Row[Any]) -> tuple[str, str | None]:
    """A sampler's base model, and its checkpoint or published snapshot. The snapshot of a checkpoint may change."""
    return sampler.base_model, sampler.model_path or sampler.snapshot_id
