"""Quotas on the pending work and the kept data of a project, and their errors.

A quota that frees up by itself raises TooManyError (429), and the client sends the same request again later. Other
quotas raise UserError, or fail a request that was accepted. Every error names the setting.

A transaction counts before it adds a row, so simultaneous requests cannot exceed a quota. SQLite has one writer. On
Postgres such a transaction first takes an advisory lock named after the project, and holds it until its commit. No
transaction that holds another lock ever waits for this lock.

Pending work is counted in one statement over an index that contains only the counted rows: requests over
ix_request_pending_of_owner, live models over ix_model_owner_state, stored bytes over ix_checkpoint_stored_by_owner and
ix_asset_owner_size_bytes. Kept data can be millions of rows, so one row of `project_total` stores their count.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.errors import Category, TooManyError, UserError
from tinkerflow.backend.journal.tables import (
    IS_PENDING,
    TAKES_WORK,
    AssetRow,
    Checkpoint,
    FeedbackRow,
    Model,
    ProjectTotal,
    Request,
)
from tinkerflow.backend.spec.history import Kind

Failure = tuple[str, Category] | None  # the reason why a request is stored as failed, or None
ROW_BYTES = 256  # bytes that a row counts in addition to its texts
_SMALL_REQUEST = 4096  # bytes. Most requests are this small, and are not checked against max_queued_bytes
_TRAINING = (Kind.FORWARD, Kind.FORWARD_BACKWARD)


@dataclass(frozen=True)
class Limits:
    """The limits of a project; 0 is no limit. The setting of each is `max_<name>`.

    Pending: sampling_requests, unanswered samples. queued_tokens: tokens of forward and forward_backward requests.
    queued_bytes: bytes of the bodies of all requests. live_models: models that are being created or live.

    Stored: stored_bytes, the bytes of checkpoints and uploaded images. Once the limit is reached, nothing is saved. A
    checkpoint that is being saved has no size yet and does not count.

    Kept in the database: sessions, training_runs, samplers, custom_losses, images, feedback and metrics, in rows.
    kept_bytes: the bytes of their names, tags, metadata, definitions and texts. feedback_per_day: rated answers in 24
    hours.
    """

    sampling_requests: int = 0
    queued_tokens: int = 0
    queued_bytes: int = 0
    live_models: int = 0
    stored_bytes: int = 0
    sessions: int = 0
    training_runs: int = 0
    samplers: int = 0
    custom_losses: int = 0
    images: int = 0
    feedback: int = 0
    metrics: int = 0
    kept_bytes: int = 0
    feedback_per_day: int = 0


NO_LIMITS = Limits()
KEPT = (
    "sessions",
    "training_runs",
    "samplers",
    "custom_losses",
    "images",
    "feedback",
    "metrics",
)  # columns of project_total
_TOTALS = (*KEPT, "kept_bytes")


_REMEDIES = {  # actions that clients can take themselves
    "max_sampling_requests": "wait for answers",
    "max_queued_tokens": "wait for answers",
    "max_queued_bytes": "wait for answers",
    "max_live_models": 'end sessions that are done (`service.close("success").result()`) or unload their models (`POST '
    "/api/v1/unload_model`); a program that ended without this counts until its session times out "
    "(TINKERFLOW_SESSION_TIMEOUT)",
    "max_stored_bytes": "delete some",
    "max_images": "delete some",
    "max_feedback_per_day": "wait",
}


def rule_of(limit: str) -> str:
    """The end of an error message about a field of Limits: its setting, and the possible remedies."""
    setting = f"max_{limit}"
    own = f"{_REMEDIES[setting]}, or " if setting in _REMEDIES else ""
    return f"({setting}); {own}ask the operator (`tinkerflow limit set PROJECT {setting}=N`)"


def refused(text: str) -> tuple[str, Category]:
    """The failure of an invalid request with the reason `text`."""
    return text, UserError.category


# ------------------------------------------------------------------ one transaction of a project at a time
_LOCK = sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:owner, 0))")


def lock_project(connection: sa.Connection, owner: str) -> None:
    """Wait for the project's other transactions that check quotas. Call this before locking any row."""
    if connection.dialect.name == "postgresql":
        connection.execute(_LOCK, {"owner": owner})


# ------------------------------------------------------------------ pending work
_OWNER = sa.bindparam("owner", type_=sa.String)
_IS_WAITING = (col(Request.owner) == _OWNER, IS_PENDING)
_SAMPLES = (
    sa.select(sa.literal(1))
    .where(*_IS_WAITING, col(Request.kind) == sa.literal_column(f"'{Kind.SAMPLE}'"))
    .limit(sa.bindparam("at_most"))
    .subquery()
)
_COUNT_SAMPLES = sa.select(sa.func.count()).select_from(_SAMPLES)
_SUM_TOKENS = sa.select(sa.func.coalesce(sa.func.sum(col(Request.waiting_tokens)), 0)).where(
    *_IS_WAITING, col(Request.kind).in_(_TRAINING)
)
_SUM_BYTES = sa.select(sa.func.coalesce(sa.func.sum(col(Request.waiting_bytes)), 0)).where(*_IS_WAITING)
_COUNT_MODELS = sa.select(sa.func.count()).where(col(Model.owner) == _OWNER, col(Model.state).in_(TAKES_WORK))


def check_sample(connection: sa.Connection, limits: Limits, owner: str, size: int) -> None:
    """TooManyError if another sample of `size` bytes would exceed the project's limits."""
    most = limits.sampling_requests
    if most and _count(connection, _COUNT_SAMPLES, owner, at_most=most) >= most:
        rule = rule_of("sampling_requests")
        raise TooManyError(f"this project has {most} waiting sampling requests, its limit {rule}")
    if (failure := _bytes_failure(connection, limits, owner, size)) is not None:
        raise TooManyError(failure)


def training_failure(
    connection: sa.Connection, limits: Limits, owner: str, *, tokens: int, size: int, stores: bool
) -> Failure:
    """The reason why the project's limits refuse an operation, or None. No statement if no limit applies.

    tokens: number of tokens of training data. size: bytes of the body. stores: whether it saves a checkpoint.
    """
    if tokens and limits.queued_tokens:
        waiting = _count(connection, _SUM_TOKENS, owner)
        if waiting + tokens > limits.queued_tokens:
            return refused(
                f"the request has {tokens} tokens, and this project has {waiting} waiting: "
                f"together they must be at most {limits.queued_tokens} {rule_of('queued_tokens')}"
            )
    if (failure := _bytes_failure(connection, limits, owner, size)) is not None:
        return refused(failure)
    return storage_failure(connection, owner, limits) if stores else None


def model_failure(connection: sa.Connection, owner: str, limits: Limits) -> Failure:
    """The reason why the project may not have another live model, or None."""
    if not limits.live_models:
        return None
    live = _count(connection, _COUNT_MODELS, owner)
    if live < limits.live_models:
        return None
    return refused(
        f"this project would have {live + 1} models: must be at most {limits.live_models} {rule_of('live_models')}"
    )


def _bytes_failure(connection: sa.Connection, limits: Limits, owner: str, size: int) -> str | None:
    if not limits.queued_bytes or size <= _SMALL_REQUEST:
        return None
    if (waiting := _count(connection, _SUM_BYTES, owner)) + size <= limits.queued_bytes:
        return None
    return (
        f"the request has {size} bytes, and this project's waiting requests have {waiting}: "
        f"together they must be at most {limits.queued_bytes} {rule_of('queued_bytes')}"
    )


# ------------------------------------------------------------------ stored bytes
_COUNT_STORED = sa.select(
    sa.select(sa.func.coalesce(sa.func.sum(col(Checkpoint.size_bytes)), 0))
    .where(col(Checkpoint.owner) == _OWNER, col(Checkpoint.deleted_at).is_(None))
    .scalar_subquery()
    + sa.select(sa.func.coalesce(sa.func.sum(col(AssetRow.size_bytes)), 0))
    .where(col(AssetRow.owner) == _OWNER)
    .scalar_subquery()
)


def stored_bytes(connection: sa.Connection, owner: str) -> int:
    """The bytes of the project's checkpoints and uploaded images."""
    return _count(connection, _COUNT_STORED, owner)


def storage_failure(connection: sa.Connection, owner: str, limits: Limits) -> Failure:
    """The reason why the project may not store another checkpoint, or None."""
    if not limits.stored_bytes or (stored := stored_bytes(connection, owner)) < limits.stored_bytes:
        return None
    return refused(
        f"this project's checkpoints and images have {stored} bytes: must be below {limits.stored_bytes} to save more "
        f"{rule_of('stored_bytes')}"
    )


def check_storage(connection: sa.Connection, limits: Limits, owner: str, what: str, size: int, reserved: int) -> None:
    """UserError if `size` more bytes would exceed the limit.

    what: the error's first words, which name the addition. reserved: bytes that open uploads may still add.
    """
    stored = stored_bytes(connection, owner)
    if limits.stored_bytes and stored + reserved + size > limits.stored_bytes:
        uploads = f", and its other uploads up to {reserved}" if reserved else ""
        raise UserError(
            f"{what} {size} bytes, this project's checkpoints and images {stored}{uploads}: together they must be at "
            f"most {limits.stored_bytes} {rule_of('stored_bytes')}"
        )


# ------------------------------------------------------------------ kept rows
_ADD = {
    kept: sa.text(
        f"INSERT INTO project_total (owner, {kept}, kept_bytes) VALUES (:owner, :rows, :bytes)"
        f" ON CONFLICT (owner) DO UPDATE SET {kept} = project_total.{kept} + :rows,"
        " kept_bytes = project_total.kept_bytes + :bytes"
        f" RETURNING {kept} AS number, kept_bytes"
    ).columns(number=sa.BigInteger, kept_bytes=sa.BigInteger)
    for kept in KEPT
}


_MOVE = sa.text(
    f"INSERT INTO project_total (owner, {', '.join(_TOTALS)})"
    f" SELECT :project, {', '.join(_TOTALS)} FROM project_total WHERE owner = :owner"
    " ON CONFLICT (owner) DO UPDATE SET " + ", ".join(f"{n} = project_total.{n} + excluded.{n}" for n in _TOTALS)
)


def move_totals(connection: sa.Connection, owner: str, project: str) -> None:
    """Add the totals of `owner` to those of `project`, which may already have restored or imported rows."""
    connection.execute(_MOVE, {"owner": owner, "project": project})
    connection.execute(sa.delete(ProjectTotal).where(col(ProjectTotal.owner) == owner))


def text_bytes(*texts: str | None) -> int:
    """The total bytes of the texts in UTF-8."""
    return sum(len(text.encode()) for text in texts if text)


def count_kept(
    connection: sa.Connection, owner: str, kept: str, texts: int, limits: Limits = NO_LIMITS, *, rows: int = 1
) -> None:
    """Count new rows of a project, in the transaction that inserts them.

    connection: that transaction. owner: the project. kept: a name in KEPT. texts: the bytes of their texts. limits: the
    project's limits. UserError: the rows exceed the limit of rows or bytes. The caller must then roll the transaction
    back.
    """
    size = texts + rows * ROW_BYTES
    total = connection.execute(_ADD[kept], {"owner": owner, "rows": rows, "bytes": size}).one()
    for name, number, adds in ((kept, total.number, rows), ("kept_bytes", total.kept_bytes, size)):
        if (most := getattr(limits, name)) and number > most:
            raise UserError(
                f"this project keeps {number - adds} {name.replace('_', ' ')}, and this adds {adds}: together they "
                f"must be at most {most} {rule_of(name)}"
            )


def uncount_kept(connection: sa.Connection, owner: str, kept: str, rows: int, texts: int) -> None:
    """Subtract deleted rows from a project's totals. texts: the bytes of their texts."""
    connection.execute(_ADD[kept], {"owner": owner, "rows": -rows, "bytes": -texts - rows * ROW_BYTES})


def kept_failure(connection: sa.Connection, owner: str, limits: Limits, *kept: str) -> Failure:
    """The reason why the project may not keep one more row of each kind in `kept`, or None. Counts no row."""
    limited = [name for name in (*kept, "kept_bytes") if getattr(limits, name)]
    if not limited:
        return None
    total = connection.execute(sa.select(ProjectTotal).where(col(ProjectTotal.owner) == owner)).one_or_none()
    for name in limited:
        if total is not None and (number := getattr(total, name)) >= (most := getattr(limits, name)):
            would = f"would keep at least {number + 1} {name.replace('_', ' ')}"
            return refused(f"this project {would}: must be at most {most} {rule_of(name)}")
    return None


def check_kept(connection: sa.Connection, owner: str, limits: Limits, *kept: str) -> None:
    """UserError if the project may not keep one more row of each kind in `kept`."""
    if (failure := kept_failure(connection, owner, limits, *kept)) is not None:
        raise UserError(failure[0])


# ------------------------------------------------------------------ for people
_RATED = sa.select(col(FeedbackRow.id)).where(
    col(FeedbackRow.owner) == _OWNER, col(FeedbackRow.at) > sa.bindparam("day")
)
_RATED_TODAY = sa.select(sa.func.count()).select_from(_RATED.limit(sa.bindparam("at_most")).subquery())


def use_of(connection: sa.Connection, owner: str, limits: Limits, now: datetime) -> dict[str, int]:
    """The project's usage of each of its limits, by field name of Limits. At most seven statements."""
    applying = {name: most for name, most in asdict(limits).items() if most}
    pending = {"queued_tokens": _SUM_TOKENS, "queued_bytes": _SUM_BYTES, "live_models": _COUNT_MODELS}
    counted = {**pending, "stored_bytes": _COUNT_STORED, "sampling_requests": _COUNT_SAMPLES}
    bounds = {"at_most": 0, "day": now - timedelta(days=1)}
    total = connection.execute(sa.select(ProjectTotal).where(col(ProjectTotal.owner) == owner)).one_or_none()
    used = {}
    for name, most in applying.items():
        if name in counted or name == "feedback_per_day":
            statement = counted.get(name, _RATED_TODAY)
            used[name] = _count(connection, statement, owner, **(bounds | {"at_most": most}))
        else:
            used[name] = 0 if total is None else int(getattr(total, name))
    return used


def _count(connection: sa.Connection, statement: sa.Select[tuple[int]], owner: str, **more: object) -> int:
    return int(connection.execute(statement, {"owner": owner, **more}).scalar_one())
