"""Requests: submitted, ready to execute, answered, read. This file is the whole path of an operation in the journal.

Submitting: the unique constraints on (model or sampler, seq_id) decide which of two equal requests was first, and a
replay gets the id of the first one. A request that cannot be executed (its model ended, its session is over, its seq_id
was given up, its content is wrong) is stored already failed: the client would wait forever after a refused submit.

Executing: a model's requests run in the order of their sequence ids, from next_seq on. Sequence ids whose request
failed at once count as used. A missing id holds back all later ones (chunks of one call arrive as 2..n, then 1).
A request below next_seq is a save that later requests have overtaken.

Answering: the first answer of a request wins. The answer and its effects are stored in one transaction.

Every transaction locks rows in the same order: sessions, models, samplers, then requests, each by id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapped
from sqlmodel import col

from tinkerflow.backend.errors import Category, ConflictError, TinkerflowError, UserError
from tinkerflow.backend.ids import new_id
from tinkerflow.backend.journal import effects
from tinkerflow.backend.journal.database import Aggregate, in_chunks, insert_if_absent, is_owned, missing
from tinkerflow.backend.journal.effects import Effect, Used
from tinkerflow.backend.journal.limits import NO_LIMITS, Limits, check_sample, take_turn, training_failure
from tinkerflow.backend.journal.samplers import COMPLETION, NEXT_COMPLETION, SamplerView, answered
from tinkerflow.backend.journal.tables import (
    IS_PENDING,
    TAKES_WORK,
    Kind,
    Model,
    ModelState,
    PayloadType,
    Request,
    RequestState,
    SamplerRow,
    SamplerState,
    Session,
    SessionState,
    UsageBucket,
    model_ended,
    sampler_ended,
    session_over,
)

CANCELLED = "cancelled by the client"
Failure = tuple[str, Category] | None


# ------------------------------------------------------------------ what goes in and what comes out
@dataclass(frozen=True)
class NewRequest:
    """One operation. Exactly one of model_id and sampler_id is given; its session is the model's or sampler's.

    content_hash: equal for replays of the same operation, whatever else differs in the bytes.
    error: set when the request is already known to be wrong. The request is stored, its seq_id is used up, and it
    answers with this error: content is refused without an HTTP error, which would hang the client.
    tokens: of training data, counted while the request waits when there is a limit.
    stores: whether the request saves a checkpoint.
    """

    kind: Kind
    owner: str
    payload: bytes
    content_hash: str
    model_id: str | None = None
    sampler_id: str | None = None
    seq_id: int | None = None
    error: str | None = None
    category: Category = "user"
    tokens: int = 0
    stores: bool = False


@dataclass(frozen=True)
class Outcome:
    """The answer to one request: result bytes, or an error with its category. Pending.done / Pending.failed make them.

    model_id, sampler_id and seq_id are the request's own: they move the model's next_seq past the request, or have the
    sampler number it (results.py). effects happen in the same transaction, and only if this is the request's first
    answer. A failed creation (seq_id 0) ends its model by itself.
    replays: the request changed the model, so it is executed again when the model must be made again; or it has
    published weights that are not stored yet. That counts even when the request was answered before.
    started_at: when its first command was sent, None when none was.
    """

    request_id: str
    result: bytes | None = None
    result_type: PayloadType = "json"
    error: str | None = None
    category: Category | None = None
    model_id: str | None = None
    sampler_id: str | None = None
    seq_id: int | None = None
    effects: tuple[Effect, ...] = ()
    replays: bool = False
    started_at: datetime | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for an outcome that is neither a result nor an error, or both."""
        if (self.result is None) == (self.error is None):
            raise ValueError(f"outcome of {self.request_id}: exactly one of result and error must be given")
        if (self.error is None) != (self.category is None):
            raise ValueError(f"outcome of {self.request_id}: an error comes with its category, a result without")


@dataclass(frozen=True)
class Pending:
    """A request that waits for its answer. sampler is set for samples.

    answered: the request has its answer, and is executed again or has something left to do (recovery.py).
    """

    id: str
    kind: Kind
    owner: str
    session_id: str
    model_id: str | None
    sampler_id: str | None
    seq_id: int | None
    payload: bytes
    created_at: datetime
    sampler: SamplerView | None = None
    answered: bool = False

    @classmethod
    def of(cls, row: sa.Row[Any], sampler: SamplerView | None = None) -> Pending:
        """The request in a row of `request`."""
        return cls(
            id=row.id,
            kind=Kind(row.kind),
            owner=row.owner,
            session_id=row.session_id,
            model_id=row.model_id,
            sampler_id=row.sampler_id,
            seq_id=row.seq_id,
            payload=row.payload,
            created_at=row.created_at,
            sampler=sampler,
            answered=row.state != RequestState.PENDING,
        )

    def done(self, result: bytes, result_type: PayloadType, *effects: Effect) -> Outcome:
        """The outcome that answers this request with `result`."""
        return Outcome(
            self.id,
            result=result,
            result_type=result_type,
            model_id=self.model_id,
            sampler_id=self.sampler_id,
            seq_id=self.seq_id,
            effects=effects,
        )

    def failed(self, error: TinkerflowError | str, category: Category | None = None, *effects: Effect) -> Outcome:
        """The outcome that answers this request with `error`; a plain text is the server's fault by default."""
        text, own = (error.message, error.category) if isinstance(error, TinkerflowError) else (error, "server")
        return Outcome(
            self.id,
            error=text,
            category=category or own,
            model_id=self.model_id,
            sampler_id=self.sampler_id,
            seq_id=self.seq_id,
            effects=effects,
        )


@dataclass(frozen=True)
class Result:
    """A request's answer: `result` bytes of `result_type` when done, else `error` and `category`.

    size: of the result in bytes. Results over the size that the reader allowed have a size and no bytes.
    """

    request_id: str
    kind: Kind
    result: bytes | None
    result_type: PayloadType
    error: str | None
    category: Category | None
    size: int


# ------------------------------------------------------------------ statements
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
# transactions that hold the row together would each wait for the other.
_LOOK_AT_SAMPLER = sa.select(SamplerRow).where(is_owned(SamplerRow)).with_for_update(key_share=True)
_TAKE_NUMBER = sa.update(SamplerRow).where(col(SamplerRow.id) == sa.bindparam("of_sampler")).values(NEXT_COMPLETION)
_TAKE_NUMBER_AND_TELL = _TAKE_NUMBER.returning(col(SamplerRow.last_completion))
_READY = (
    sa.select(Request, col(Model.next_seq))
    .join(Model, col(Model.id) == col(Request.model_id))
    .where(col(Request.model_id) == sa.bindparam("model_id"), IS_PENDING)
    .order_by(col(Request.seq_id))
    .limit(sa.bindparam("at_most"))
)
_ANSWER = (
    sa.update(Request)
    .where(col(Request.id) == sa.bindparam("request_id"))
    .values(
        state=sa.bindparam("to_state"),
        result=sa.bindparam("to_result"),
        result_type=sa.bindparam("to_result_type"),
        error=sa.bindparam("to_error"),
        category=sa.bindparam("to_category"),
        started_at=sa.bindparam("to_started_at"),
        finished_at=sa.bindparam("now"),
        replays=sa.bindparam("to_replays"),
        completion=COMPLETION,
    )
)
_REPLAYS = sa.update(Request).where(col(Request.id).in_(sa.bindparam("ids", expanding=True))).values(replays=True)
_PASSED = sa.bindparam("passed_seq", type_=sa.BigInteger)
_ADVANCE = (
    sa.update(Model)
    .where(col(Model.id) == sa.bindparam("of_model"))
    .values(next_seq=sa.case((col(Model.next_seq) < _PASSED, _PASSED), else_=col(Model.next_seq)))
)
_LOCK_WAITING = (
    sa.select(col(Request.id), col(Request.sampler_id))
    .where(col(Request.id).in_(sa.bindparam("ids", expanding=True)), IS_PENDING)
    .order_by(col(Request.id))
    .with_for_update()
)
_ADD_USAGE = sa.text(
    "INSERT INTO usage_bucket (session_id, bucket_start, base_model, kind, quantity)"
    " VALUES (:session_id, :bucket_start, :base_model, :kind, :quantity)"
    " ON CONFLICT (session_id, bucket_start, base_model, kind)"
    " DO UPDATE SET quantity = usage_bucket.quantity + excluded.quantity"
).bindparams(sa.bindparam("bucket_start", type_=sa.inspect(UsageBucket).local_table.c.bucket_start.type))
# Without the payload: answers are read thousands of times a second, and a payload can have megabytes.
_SIZE = sa.func.length(col(Request.result))
_MOST = sa.bindparam("at_most", type_=sa.BigInteger)
_READ = sa.select(
    col(Request.id),
    col(Request.kind),
    col(Request.state),
    col(Request.result_type),
    col(Request.error),
    col(Request.category),
    col(Request.read_at),
    _SIZE.label("size"),
    sa.case((sa.or_(_MOST.is_(None), _SIZE <= _MOST), col(Request.result))).label("result"),
).where(is_owned(Request))
_MARK_READ = (
    sa.update(Request)
    .where(col(Request.id) == sa.bindparam("request_id"), col(Request.read_at).is_(None))
    .values(read_at=sa.bindparam("now"))
)
_FINISHED = sa.select(col(Request.id)).where(
    col(Request.id).in_(sa.bindparam("ids", expanding=True)), sa.not_(IS_PENDING)
)
_TO_CANCEL = sa.select(col(Request.kind), col(Request.state), col(Request.sampler_id), col(Request.seq_id)).where(
    is_owned(Request)
)


class Requests(Aggregate):
    """The path of one operation: submit, ready, finish, result."""

    def submit(self, request: NewRequest, limits: Limits = NO_LIMITS) -> str:
        """Store a request and return its id; a replay (same seq_id and content) returns the id of the first one.

        NotFoundError: unknown or foreign model or sampler. ConflictError: the seq_id holds other content. A model or
        session that is over raises no error: the request is stored already failed, and says why; so is one over the
        project's `limits`. TooManyError: a sample over them, which is not stored.
        """
        if (request.model_id is None) == (request.sampler_id is None) or request.seq_id is None:
            raise ValueError(f"{request.kind} request: needs a seq_id and exactly one of model_id and sampler_id")
        now = self._now()
        with self._write() as connection:
            if limits != NO_LIMITS:
                take_turn(connection, limits, request.owner, request.kind, request.tokens, stores=request.stores)
            if request.model_id is not None:
                request_id = _submit_to_model(connection, request.model_id, request, limits, now)
                topic = f"model:{request.model_id}"
            else:
                request_id, topic = _submit_to_sampler(connection, str(request.sampler_id), request, limits, now)
        self._publish(topic)
        return request_id

    def ready(self, model_id: str, limit: int = 64) -> list[Pending]:
        """A model's next requests in order of execution: the contiguous run from its next_seq on, then an unload.

        The unload comes when nothing else can run. One statement, and one more for each place where sequence ids were
        used up by requests that failed at once.
        """
        with self._read() as connection:
            rows = connection.execute(_READY, {"model_id": model_id, "at_most": limit}).all()
            run: list[Pending] = []
            cut = len(rows) == limit  # there may be more after this page
            for row in (row for row in rows if row.seq_id is not None):
                expected = max(row.next_seq, (run[-1].seq_id or 0) + 1 if run else 0)
                if row.seq_id > expected:
                    # What arrived since our page was read waits, and must not count as used up.
                    used = count_in_range(connection, model_id, expected, row.seq_id, sa.not_(IS_PENDING))
                    if used < row.seq_id - expected:
                        cut = False
                        break
                run.append(Pending.of(row))
        unloads = [Pending.of(row) for row in rows if row.kind == Kind.UNLOAD]
        return run if cut and run else run + unloads

    def finish(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Answer requests with all their effects in one transaction; the ids that this call answered.

        The first answer of a request wins: a later one changes nothing, and none of its effects happen. FencedError
        from an engine whose lease another one has taken, and then nothing happens at all.
        """
        with self._write(fenced=True) as connection:
            ids, topics = finish(connection, outcomes, self._now())
        self._publish(*topics)
        return ids

    def result(self, request_id: str, owner: str | None, *, at_most: int | None = None) -> Result | None:
        """The answer, None while it is pending. Re-readable until it expires; the first reading is noted.

        Of a result of more than `at_most` bytes only the size is given, and that does not count as a reading.
        NotFoundError: unknown or foreign request.
        """
        with self._read() as connection:
            parameters = {"row_id": request_id, "as_owner": owner, "at_most": at_most}
            row = connection.execute(_READ, parameters).one_or_none()
        if row is None:
            raise missing(Request, request_id)
        if row.state == RequestState.PENDING:
            return None
        size_only = row.size is not None and row.result is None
        if row.read_at is None and not size_only:
            with self._write() as connection:
                connection.execute(_MARK_READ, {"request_id": request_id, "now": self._now()})
        return Result(row.id, Kind(row.kind), row.result, row.result_type, row.error, row.category, row.size or 0)

    def finished(self, request_ids: Collection[str]) -> set[str]:
        """Which of these requests are answered, in one query per ten thousand ids."""
        with self._read() as connection:
            found: set[str] = set()
            for ids in in_chunks(request_ids):
                found |= set(connection.execute(_FINISHED, {"ids": ids}).scalars())
            return found

    def cancel(self, request_id: str, owner: str | None) -> bool:
        """Answer a sample that waits with a failure, and have it leave the decode batch; whether it still waited.

        UserError for any other kind: a model's operations run in order of their sequence ids, and later requests count
        on an accepted one, so it is always executed. NotFoundError: unknown or foreign request.
        """
        with self._write() as connection:
            row = connection.execute(_TO_CANCEL, {"row_id": request_id, "as_owner": owner}).one_or_none()
            if row is None:
                raise missing(Request, request_id)
            if row.kind != Kind.SAMPLE:
                raise UserError(
                    f"request {request_id} is a {row.kind}: only samples can be cancelled once they are accepted"
                )
            if row.state != RequestState.PENDING:
                return False
            given_up = Outcome(
                request_id, error=CANCELLED, category="user", sampler_id=row.sampler_id, seq_id=row.seq_id
            )
            ids, topics = finish(connection, [given_up], self._now())
        if ids:
            self._publish(*topics, f"cancel:{request_id}")
        return bool(ids)


# ------------------------------------------------------------------ submitting
def _submit_to_model(
    connection: sa.Connection, model_id: str, request: NewRequest, limits: Limits, now: datetime
) -> str:
    """Lock the model's row, note the time, and store the request as pending or failed."""
    parameters = {"row_id": model_id, "as_owner": request.owner, "now": now}
    model = connection.execute(_TOUCH_MODEL, parameters).one_or_none()
    if model is None:
        raise missing(Model, model_id)
    failure: Failure = None
    if model.state not in TAKES_WORK:
        failure = model_ended(model_id, ModelState(model.state), model.detail)
    elif model.session_state != SessionState.ACTIVE:
        failure = session_over(model.session_id, model.session_state, model.session_detail)
    elif request.seq_id is not None and request.seq_id < model.next_seq:
        text = f"seq_id {request.seq_id} of model {model_id} came too late: it was given up, {model.next_seq} is next"
        failure = text, UserError.category
    elif request.error is not None:
        failure = request.error, request.category
    elif limits != NO_LIMITS:
        failure = training_failure(connection, limits, request.owner, request.tokens, stores=request.stores)
    return store(connection, request, model.session_id, failure, now)


def _submit_to_sampler(
    connection: sa.Connection, sampler_id: str, request: NewRequest, limits: Limits, now: datetime
) -> tuple[str, str]:
    """Store a sample; its id, and the topic to publish."""
    sampler = connection.execute(_LOOK_AT_SAMPLER, {"row_id": sampler_id, "as_owner": request.owner}).one_or_none()
    if sampler is None:
        raise missing(SamplerRow, sampler_id)
    failure: Failure = None
    if sampler.state != SamplerState.LIVE:
        failure = sampler_ended(sampler_id, sampler.detail)
    elif request.error is not None:
        failure = request.error, request.category
    elif limits != NO_LIMITS:
        check_sample(connection, limits, request.owner)
    if failure is None:
        return store(connection, request, sampler.session_id, None, now), "sample"
    number = connection.execute(_TAKE_NUMBER_AND_TELL, {"of_sampler": sampler_id}).scalar_one()
    return store(connection, request, sampler.session_id, failure, now, number), answered(sampler_id, request.seq_id)


def store(
    connection: sa.Connection,
    request: NewRequest,
    session_id: str,
    failure: Failure,
    now: datetime,
    completion: int | None = None,
) -> str:
    """Store a request as pending, or as failed with `failure`; its id, or the id of the equal request before it.

    connection: of a transaction that has locked the model or looked at the sampler. session_id: of the model or
    sampler. now: when the request came. completion: the number that its sampler gave a failed sample.
    ConflictError: the seq_id holds another request.
    """
    request_id = new_id("req")
    error, category = failure or (None, None)
    row = {
        "id": request_id,
        "kind": request.kind,
        "owner": request.owner,
        "session_id": session_id,
        "model_id": request.model_id,
        "sampler_id": request.sampler_id,
        "seq_id": request.seq_id,
        "content_hash": request.content_hash,
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
    }
    return request_id if insert_if_absent(connection, Request, row) else _replayed(connection, request)


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


def count_in_range(
    connection: sa.Connection, model_id: str, first: int, end: int, *where: sa.ColumnElement[bool]
) -> int:
    """How many requests of the model have a seq_id in [first, end) and are `where`."""
    in_range = (col(Request.model_id) == model_id, col(Request.seq_id) >= first, col(Request.seq_id) < end)
    return connection.execute(sa.select(sa.func.count()).select_from(Request).where(*in_range, *where)).scalar_one()


# ------------------------------------------------------------------ answering
def finish(connection: sa.Connection, outcomes: Sequence[Outcome], now: datetime) -> tuple[list[str], list[str]]:
    """Answer requests; the ids answered by this call, and the topics to publish.

    Three statements, one more for each sampler, and those of the effects.
    """
    first = {outcome.request_id: outcome for outcome in reversed(outcomes)}
    _advance(connection, outcomes)
    samplers = sorted({outcome.sampler_id for outcome in outcomes if outcome.sampler_id is not None})
    if samplers:  # one UPDATE each, in order of id; see results.py
        connection.execute(_TAKE_NUMBER, [{"of_sampler": sampler_id} for sampler_id in samplers])
    waiting = {row.id: row.sampler_id for row in connection.execute(_LOCK_WAITING, {"ids": list(first)})}
    winners = [outcome for request_id, outcome in reversed(first.items()) if request_id in waiting]
    beaten = [outcome.request_id for outcome in first.values() if outcome.replays and outcome.request_id not in waiting]
    if beaten:
        connection.execute(_REPLAYS, {"ids": beaten})
    for outcome in winners:
        if outcome.sampler_id != waiting[outcome.request_id]:
            # It would get a number that clients have passed already, and they would never hear of it.
            raise ValueError(
                f"outcome of {outcome.request_id}: sampler_id is {outcome.sampler_id!r}: not the request's"
            )
    if not winners:
        return [], []
    connection.execute(
        _ANSWER,
        [
            {
                "request_id": outcome.request_id,
                "to_state": RequestState.DONE if outcome.error is None else RequestState.FAILED,
                "to_result": outcome.result,
                "to_result_type": outcome.result_type,
                "to_error": outcome.error,
                "to_category": outcome.category,
                "to_started_at": outcome.started_at,
                "to_replays": outcome.replays,
                "now": now,
            }
            for outcome in winners
        ],
    )
    ids = [outcome.request_id for outcome in winners]
    topics = [f"done:{request_id}" for request_id in ids]
    topics += {answered(one.sampler_id, one.seq_id): None for one in winners if one.sampler_id is not None}
    used: list[Used] = []
    for outcome in winners:
        for effect in outcome.effects:
            if isinstance(effect, Used):
                used.append(effect)
            else:
                topics += effects.apply(connection, effect, now)
        if outcome.error is not None and outcome.model_id is not None and outcome.seq_id == 0:
            topics += effects.end_models(connection, [outcome.model_id], ModelState.FAILED, outcome.error, now)
    _add_usage(connection, used, now)
    return ids, topics


def _advance(connection: sa.Connection, outcomes: Iterable[Outcome]) -> None:
    """Move next_seq of every model past what was executed. Also locks the models, before any request."""
    after: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.model_id is not None:
            passed = 0 if outcome.seq_id is None else outcome.seq_id + 1
            after[outcome.model_id] = max(passed, after.get(outcome.model_id, 0))
    if after:
        rows = [{"of_model": model_id, "passed_seq": passed} for model_id, passed in sorted(after.items())]
        connection.execute(_ADVANCE, rows)


def _add_usage(connection: sa.Connection, used: Sequence[Used], now: datetime) -> None:
    """Add to the current hour's buckets (usage.py): one upsert for each bucket that is touched."""
    sums: Counter[tuple[str, str, str]] = Counter()
    for effect in used:
        sums[effect.session_id, effect.base_model, effect.kind] += effect.quantity
    rows = [
        {"session_id": session, "bucket_start": hour_of(now), "base_model": base, "kind": kind, "quantity": quantity}
        for (session, base, kind), quantity in sorted(sums.items())  # sorted, so that writers lock in one order
        if quantity
    ]
    if rows:
        connection.execute(_ADD_USAGE, rows)


def hour_of(moment: datetime) -> datetime:
    """The beginning of its hour, in UTC."""
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
