"""How much one project may have at a time. The transaction that adds to it counts first, so nothing gets past a limit.

SQLite has one writer. On Postgres a transaction that adds to something limited first takes an advisory lock named after
the project, and holds it until its commit: two such transactions never count at the same time. No transaction that
holds another lock ever waits for this lock. Each count is one statement over an index that holds only the rows that
count, and it is made only where a limit is set:

- sampling requests, queued tokens: ix_request_pending_of_owner (what the project has waiting)
- live models: ix_model_owner_state
- stored bytes: ix_checkpoint_stored_by_owner
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.errors import Category, TooManyError, UserError
from tinkerflow.backend.journal.tables import IS_PENDING, TAKES_WORK, Checkpoint, Kind, Model, Request


@dataclass(frozen=True)
class Limits:
    """The most that a project may have; 0 is no limit.

    sampling_requests: samples that wait for their answer.
    queued_tokens: tokens of forward and forward_backward requests that wait.
    live_models: models that are being created or live.
    stored_bytes: bytes of checkpoints; once they are reached, nothing more is saved. A checkpoint that is being saved
    at that moment has no size yet and does not count.
    """

    sampling_requests: int = 0
    queued_tokens: int = 0
    live_models: int = 0
    stored_bytes: int = 0


NO_LIMITS = Limits()

_TURN = sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:owner, 0))")
_OWNER = sa.bindparam("owner", type_=sa.String)
_SAMPLES = (
    sa.select(sa.literal(1))
    .where(col(Request.owner) == _OWNER, IS_PENDING, col(Request.kind) == sa.literal_column(f"'{Kind.SAMPLE}'"))
    .limit(sa.bindparam("at_most"))
    .subquery()
)
_COUNT_SAMPLES = sa.select(sa.func.count()).select_from(_SAMPLES)
_COUNT_TOKENS = sa.select(sa.func.coalesce(sa.func.sum(col(Request.waiting_tokens)), 0)).where(
    col(Request.owner) == _OWNER, IS_PENDING, col(Request.kind).in_((Kind.FORWARD, Kind.FORWARD_BACKWARD))
)
_COUNT_MODELS = sa.select(sa.func.count()).where(col(Model.owner) == _OWNER, col(Model.state).in_(TAKES_WORK))
_COUNT_BYTES = sa.select(sa.func.coalesce(sa.func.sum(col(Checkpoint.size_bytes)), 0)).where(
    col(Checkpoint.owner) == _OWNER, col(Checkpoint.deleted_at).is_(None)
)


def take_turn(connection: sa.Connection, limits: Limits, owner: str, kind: Kind, tokens: int, *, stores: bool) -> None:
    """Wait for the project's other transactions that add to what is limited; before any row is locked.

    connection: of the transaction. limits: of the project; 0 everywhere takes no lock. owner: the project.
    kind, tokens, stores: of the request that would add to it, as in NewRequest.
    """
    creates = kind in (Kind.CREATE_MODEL, Kind.LOAD_MODEL)
    limited = (
        (kind == Kind.SAMPLE and limits.sampling_requests)
        or (tokens and limits.queued_tokens)
        or (stores and limits.stored_bytes)
        or (creates and limits.live_models)
    )
    if limited and connection.dialect.name == "postgresql":
        connection.execute(_TURN, {"owner": owner})


def check_sample(connection: sa.Connection, limits: Limits, owner: str) -> None:
    """TooManyError when the project has as many samples waiting as it may: the client sends this one again later."""
    most = limits.sampling_requests
    if most and _ask(connection, _COUNT_SAMPLES, owner, at_most=most) >= most:
        raise TooManyError(
            f"this project has {most} sampling requests waiting, as many as it may (max_sampling_requests)"
        )


def training_failure(
    connection: sa.Connection, limits: Limits, owner: str, tokens: int, *, stores: bool
) -> tuple[str, Category] | None:
    """Why the project may not have this operation now, or None: text and category.

    connection: of the transaction that stores the operation; no statement when it adds nothing limited. limits, owner:
    the project and what it may have. tokens, stores: of the operation, as in NewRequest.
    """
    if tokens and limits.queued_tokens:
        waiting = _ask(connection, _COUNT_TOKENS, owner)
        if waiting + tokens > limits.queued_tokens:
            return _over(
                f"the request has {tokens} tokens, and this project has {waiting} waiting: "
                f"together they must be at most {limits.queued_tokens} (max_queued_tokens)"
            )
    return storage_failure(connection, owner, limits) if stores else None


def storage_failure(connection: sa.Connection, owner: str, limits: Limits) -> tuple[str, Category] | None:
    """Why the project may not store another checkpoint now, or None."""
    if not limits.stored_bytes or (stored := _ask(connection, _COUNT_BYTES, owner)) < limits.stored_bytes:
        return None
    return _over(
        f"this project's checkpoints have {stored} bytes: nothing is saved from {limits.stored_bytes} on "
        "(max_stored_bytes); delete some"
    )


def model_failure(connection: sa.Connection, owner: str, limits: Limits) -> tuple[str, Category] | None:
    """Why the project may not have another model now, or None."""
    if not limits.live_models:
        return None
    live = _ask(connection, _COUNT_MODELS, owner)
    if live < limits.live_models:
        return None
    return _over(
        f"this project has {live} models: must be at most {limits.live_models} (max_live_models); "
        "close the sessions of those that are done"
    )


def _ask(connection: sa.Connection, statement: sa.Select[tuple[int]], owner: str, **more: int) -> int:
    return int(connection.execute(statement, {"owner": owner, **more}).scalar_one())


def _over(text: str) -> tuple[str, Category]:
    return text, UserError.category
