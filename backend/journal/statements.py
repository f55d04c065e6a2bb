"""The few statements that several modules share: owner filter, insert-if-absent, failing what waits, lists in chunks.

Statements on the way of every request are module constants with bound parameters, here and in the other modules:
building one costs more than executing it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Row
from sqlmodel import col

from tinkerflow.backend.errors import Category, NotFoundError, StateLostError, UserError
from tinkerflow.backend.journal.kinds import ModelState, RequestState, SamplerState
from tinkerflow.backend.journal.tables import AuditEvent, Checkpoint, Model, Request, Sampler, Session, Table

# A literal, not a parameter: only so does SQLite see that the partial indexes apply.
IS_PENDING = col(Request.state) == sa.literal_column(f"'{RequestState.PENDING}'")

# The number of the transaction that we are in (completions.py); NULL for training requests.
COMPLETION = sa.select(col(Sampler.last_completion)).where(col(Sampler.id) == col(Request.sampler_id)).scalar_subquery()
CLONE_BLOCK = 1_000_000_000  # a clone's sequence ids are its number times this, and up (PROTOCOL.md 3.1)

T = TypeVar("T")
_AT_ONCE = 10_000  # SQLite takes 32,766 parameters

Owned = type[Session] | type[Model] | type[Sampler] | type[Request]


def in_chunks(items: Collection[T]) -> Iterator[list[T]]:
    """The items, ten thousand at a time: what a statement takes as parameters."""
    listed = list(items)
    return (listed[start : start + _AT_ONCE] for start in range(0, len(listed), _AT_ONCE))


def get_owned(connection: sa.Connection, table: Owned, row_id: str, owner: str | None) -> Row[Any]:
    """The row `row_id`. Missing and foreign rows are the same NotFoundError; owner None (the service) sees all.

    The only place where the journal decides who may see a session, model, sampler or request.
    """
    found = connection.execute(_select_owned(table), {"row_id": row_id, "as_owner": owner}).one_or_none()
    if found is None:
        raise missing(table, row_id)
    return found


def is_owned(table: Owned) -> sa.ColumnElement[bool]:
    """The filter behind get_owned, for prepared statements: parameters `row_id` and `as_owner`."""
    owner = sa.bindparam("as_owner", type_=sa.String)
    return sa.and_(col(table.id) == sa.bindparam("row_id"), sa.or_(owner.is_(None), col(table.owner) == owner))


def owned_by(
    table: Owned | type[Checkpoint] | type[AuditEvent], owner: str | None
) -> tuple[sa.ColumnElement[bool], ...]:
    """The same for lists: the rows of one owner, or all."""
    return () if owner is None else (col(table.owner) == owner,)


def missing(table: type[Table], row_id: str) -> NotFoundError:
    """The one error for rows that do not exist and rows of others."""
    return NotFoundError(f"{table.__tablename__} {row_id!r} does not exist")


def insert_if_absent(connection: sa.Connection, table: type[Table], values: Mapping[str, object]) -> bool:
    """Insert a row unless one of the table's unique constraints has it already; whether it was inserted.

    Waits for a concurrent insert of the same key, so that a False is followed by a visible row.
    """
    return connection.execute(_insert(table, tuple(values)), dict(values)).first() is not None


@cache
def _select_owned(table: Owned) -> sa.Select[Any]:
    return sa.select(table).where(is_owned(table))


@cache
def _insert(table: type[Table], names: tuple[str, ...]) -> sa.TextualSelect:
    # Text, because SQLAlchemy 2.0 compiles its own ON CONFLICT anew every time: a millisecond on every submit.
    columns = Table.metadata.tables[str(table.__tablename__)].c
    sql = f"INSERT INTO {table.__tablename__} ({', '.join(names)}) VALUES (:{', :'.join(names)})"
    typed = [sa.bindparam(name, type_=columns[name].type) for name in names]
    return (
        sa.text(f"{sql} ON CONFLICT DO NOTHING RETURNING 1 AS inserted").bindparams(*typed).columns(inserted=sa.Integer)
    )


def locked_ids(connection: sa.Connection, table: Owned, *where: sa.ColumnElement[bool]) -> list[str]:
    """The ids of the rows `where`, locked in one fixed order (SQLite holds its one write lock anyway)."""
    column = col(table.id)
    return list(connection.execute(sa.select(column).where(*where).order_by(column).with_for_update()).scalars())


def fail_pending(
    connection: sa.Connection, now: datetime, error: str, category: Category, *where: sa.ColumnElement[bool]
) -> list[str]:
    """Fail every request that waits and is `where`; their ids. One statement, which locks them in order of id.

    The caller has taken the next number of every sampler whose requests may be among them (completions.py).
    """
    waiting = sa.select(col(Request.id)).where(IS_PENDING, *where).order_by(col(Request.id)).with_for_update()
    statement = (
        sa.update(Request)
        .where(col(Request.id).in_(waiting))
        .values(state=RequestState.FAILED, error=error, category=category, finished_at=now, completion=COMPLETION)
        .returning(col(Request.id))
    )
    return list(connection.execute(statement).scalars())


def model_ended(model_id: str, state: ModelState, detail: str | None) -> tuple[str, Category]:
    """What a request for a model that has ended is answered: text and category."""
    if state is ModelState.LOST:
        advice = "create it again from its last checkpoint"
        return f"model {model_id} was lost: {detail}; {advice}", StateLostError.category
    word = "was unloaded" if state is ModelState.UNLOADED else "was never created"
    return f"model {model_id} {word}: {detail}", UserError.category


def sampler_ended(sampler_id: str, state: SamplerState, detail: str | None) -> tuple[str, Category]:
    """What a request for a sampler that has ended is answered: text and category."""
    if state is SamplerState.LOST:
        advice = "save the weights for sampling again"
        return f"sampler {sampler_id} was lost: {detail}; {advice}", StateLostError.category
    return f"sampler {sampler_id} is closed: {detail}", UserError.category


def done(request_ids: Sequence[str]) -> list[str]:
    """The bell's topics for requests that were answered."""
    return [f"done:{request_id}" for request_id in request_ids]


def answered(sampler_id: str, seq_id: int | None = None) -> str:
    """The bell's topic for answers of a sampler: `answered:<clone>:<sampler>`, for all its clones without seq_id."""
    return f"answered:{'' if seq_id is None else seq_id // CLONE_BLOCK}:{sampler_id}"
