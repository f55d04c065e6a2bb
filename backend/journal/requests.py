"""Requests on their way to the engine: submitted, counted against quotas, ready to execute. results.py answers them.

Submitting: the unique constraints on (model or sampler, seq_id) decide which of two equal requests was first, and a
replay gets the id of the first one. A request that cannot be executed (its model ended, its session is over, its seq_id
was given up, its content is wrong) is stored already failed: the client would wait forever after a refused submit.

Executing: a model's requests run in the order of their sequence ids, from next_seq on. Sequence ids whose request
failed at once count as used. A missing id holds back all later ones (chunks of one call arrive as 2..n, then 1).
A request below next_seq is a save that later requests have overtaken.

Every transaction locks rows in the same order: sessions, models, samplers, then requests, each by id.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapped
from sqlmodel import col

from tinkerflow.backend.core import tracing
from tinkerflow.backend.core.errors import Category, ConflictError, TinkerflowError, UserError
from tinkerflow.backend.core.ids import new_id
from tinkerflow.backend.journal.database import Aggregate, as_view, insert_if_absent, is_owned, missing
from tinkerflow.backend.journal.quotas import (
    NO_LIMITS,
    Failure,
    Limits,
    check_sample,
    kept_failure,
    lock_project,
    refused,
    training_failure,
)
from tinkerflow.backend.journal.results import TAKE_NUMBER, Effect, Outcome, finish
from tinkerflow.backend.journal.samplers import SamplerView
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
    model_ended,
    sampler_ended,
    session_over,
)
from tinkerflow.backend.journal.topics import answered

CANCELLED = "cancelled by the client"
MOST_ALONG = 2**16  # bytes of a payload that come with its sample; a larger one is read when there is room for it
FAILED_PAYLOAD = 2**16  # bytes of a payload that is kept although its request failed when it was submitted


# ------------------------------------------------------------------ what goes in and what comes out
@dataclass(frozen=True)
class NewRequest:
    """One operation. Exactly one of model_id and sampler_id is given; its session is the model's or sampler's.

    content_hash: equal for replays of the same operation, whatever else differs in the bytes.
    error: set when the request is already known to be wrong. The request is stored, its seq_id is used up, and it
    answers with this error: content is refused without an HTTP error, which would hang the client.
    tokens: of training data, counted while the request waits when there is a limit.
    stores: whether the request saves a checkpoint. interactive: somebody waits for this sample (`pending_samples`).
    """

    kind: Kind
    owner: str
    payload: bytes
    content_hash: str
    model_id: str | None = None
    sampler_id: str | None = None
    seq_id: int | None = None
    error: str | None = None
    tokens: int = 0
    stores: bool = False
    interactive: bool = False


@dataclass(frozen=True)
class Pending:
    """A request that waits for its answer. sampler is set for samples.

    left: bytes of a payload that stays in the journal until `Requests.payload` reads it; `payload` is empty then.
    answered: the request has its answer, and is executed again or has something left to do (recovery.py). trace: the
    context of the span in which it was submitted.
    """

    id: str
    kind: Kind
    owner: str
    session_id: str
    model_id: str | None
    sampler_id: str | None
    seq_id: int | None
    payload: bytes
    sampler: SamplerView | None = None
    left: int = 0
    answered: bool = False
    trace: str | None = None

    @classmethod
    def of(cls, row: sa.Row[Any], sampler: SamplerView | None = None, left: int = 0) -> Pending:
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
            sampler=sampler,
            left=left,
            answered=row.state != RequestState.PENDING,
            trace=row.trace,
        )

    def done(self, result: bytes, result_type: PayloadType, *effects: Effect) -> Outcome:
        """The outcome that answers this request with `result`."""
        return self._outcome(effects, result=result, result_type=result_type)

    def failed(self, error: TinkerflowError | str, category: Category | None = None, *effects: Effect) -> Outcome:
        """The outcome that answers this request with `error`; a plain text is the server's fault by default."""
        text, own = (error.message, error.category) if isinstance(error, TinkerflowError) else (error, "server")
        return self._outcome(effects, error=text, category=category or own)

    def _outcome(self, effects: tuple[Effect, ...], **answer: Any) -> Outcome:
        answer |= {"model_id": self.model_id, "sampler_id": self.sampler_id, "seq_id": self.seq_id}
        return Outcome(self.id, effects=effects, **answer)


# ------------------------------------------------------------------ statements
def _of_session(column: Mapped[Any]) -> sa.ScalarSelect[Any]:
    return sa.select(column).where(col(Session.id) == col(Model.session_id)).scalar_subquery()


def of_base(table: type[Model] | type[SamplerRow]) -> sa.ColumnElement[bool]:
    base = sa.bindparam("of_base", type_=sa.String)
    return sa.or_(base.is_(None), col(table.base_model) == base)


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
_TAKE_NUMBER_AND_TELL = TAKE_NUMBER.returning(col(SamplerRow.last_completion))
_READY = (
    sa.select(Request, col(Model.next_seq))
    .join(Model, col(Model.id) == col(Request.model_id))
    .where(col(Request.model_id) == sa.bindparam("model_id"), IS_PENDING)
    .order_by(col(Request.seq_id))
    .limit(sa.bindparam("at_most"))
)
_SIZE = sa.func.length(col(Request.payload))
_PENDING_SAMPLES = (
    sa.select(
        *(column for column in sa.inspect(Request).local_table.columns if column.name not in ("payload", "result")),
        sa.case((_SIZE > MOST_ALONG, _SIZE), else_=0).label("left"),
        sa.case((_SIZE <= MOST_ALONG, col(Request.payload)), else_=b"").label("payload"),
        *(column.label(f"its_{column.name}") for column in sa.inspect(SamplerRow).local_table.columns),
    )
    .join(SamplerRow, col(SamplerRow.id) == col(Request.sampler_id))
    .where(
        IS_PENDING,
        col(Request.sampler_id).is_not(None),
        of_base(SamplerRow),
        col(Request.id).not_in(sa.bindparam("exclude", expanding=True)),
        sa.or_(sa.bindparam("of_owner", type_=sa.String).is_(None), col(Request.owner) == sa.bindparam("of_owner")),
    )
    .order_by(col(Request.created_at), col(Request.seq_id), col(Request.id))
    .limit(sa.bindparam("at_most"))
)
_PENDING_INTERACTIVE = _PENDING_SAMPLES.where(col(Request.interactive))
_PAYLOAD = sa.select(col(Request.payload)).where(col(Request.id) == sa.bindparam("row_id"), IS_PENDING)
_TO_CANCEL = sa.select(col(Request.kind), col(Request.state), col(Request.sampler_id), col(Request.seq_id)).where(
    is_owned(Request)
)


class Requests(Aggregate):
    """The way in: what is submitted, and what the engine can execute next."""

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
            lock_quotas(connection, limits, request)
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

    def pending_samples(
        self,
        limit: int,
        *,
        base_model: str | None = None,
        exclude: Collection[str] = (),
        owner: str | None = None,
        odd_interactive: bool = True,
    ) -> list[Pending]:
        """Samples that wait, oldest first, at most `limit`, each with its sampler, and without a long payload.

        Half of `limit` is for interactive samples, and they come first. So whoever waits for one does not wait for a
        batch that was sent before, and the batch goes on. base_model, owner: of the samples; None: any. exclude: ids of
        requests that were taken up already. odd_interactive: whether the odd place of such a limit is for them, too.
        """
        most = (limit + odd_interactive) // 2
        values = {"of_base": base_model, "exclude": list(exclude), "of_owner": owner}
        with self._read() as connection:
            oldest = list(connection.execute(_PENDING_SAMPLES, {**values, "at_most": limit}))
            first = [row for row in oldest if row.interactive][:most]
            if len(oldest) == limit and len(first) < most:  # there may be more of them behind
                first = list(connection.execute(_PENDING_INTERACTIVE, {**values, "at_most": most}))
        taken = {row.id for row in first}
        rows = [*first, *(row for row in oldest if row.id not in taken)][:limit]
        return [Pending.of(row, as_view(SamplerView, row, prefix="its_"), row.left) for row in rows]

    def payload(self, request_id: str) -> bytes | None:
        """What a request that waits was submitted with; None when it has its answer."""
        with self._read() as connection:
            return connection.execute(_PAYLOAD, {"row_id": request_id}).scalar_one_or_none()

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
        failure = refused(
            f"seq_id {request.seq_id} of model {model_id} came too late: it was given up, {model.next_seq} is next"
        )
    elif request.error is not None:
        failure = refused(request.error)
    else:
        failure = training_failure(
            connection,
            limits,
            request.owner,
            tokens=request.tokens,
            size=len(request.payload),
            stores=request.stores,
        )
        if failure is None and request.kind == Kind.SAVE_FOR_SAMPLER and not request.stores:
            failure = kept_failure(connection, request.owner, limits, "samplers")
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
        failure = refused(request.error)
    else:
        check_sample(connection, limits, request.owner, len(request.payload))
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
    payload = request.payload if failure is None or len(request.payload) <= FAILED_PAYLOAD else b""
    row = {
        "id": request_id,
        "kind": request.kind,
        "owner": request.owner,
        "session_id": session_id,
        "model_id": request.model_id,
        "sampler_id": request.sampler_id,
        "seq_id": request.seq_id,
        "content_hash": request.content_hash,
        "payload": payload,
        "state": RequestState.PENDING if failure is None else RequestState.FAILED,
        "result_type": "json",
        "error": error,
        "category": category,
        "created_at": now,
        "finished_at": None if failure is None else now,
        "replays": False,
        "completion": completion,
        "waiting_tokens": request.tokens,
        "waiting_bytes": len(payload),
        "trace": tracing.current.get(),
        "interactive": request.interactive,
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


def lock_quotas(connection: sa.Connection, limits: Limits, request: NewRequest) -> None:
    """Wait for the project's other transactions that count what this request adds; before any row is locked.

    queued_bytes are counted without this wait: requests that come at the same moment may exceed them a little.
    """
    limited = (
        (request.kind == Kind.SAMPLE and limits.sampling_requests)
        or (request.tokens and limits.queued_tokens)
        or (request.stores and limits.stored_bytes)
        or (request.kind in (Kind.CREATE_MODEL, Kind.LOAD_MODEL) and limits.live_models)
    )
    if limited:
        lock_project(connection, request.owner)


def count_in_range(
    connection: sa.Connection, model_id: str, first: int, end: int, *where: sa.ColumnElement[bool]
) -> int:
    """How many requests of the model have a seq_id in [first, end) and are `where`."""
    in_range = (col(Request.model_id) == model_id, col(Request.seq_id) >= first, col(Request.seq_id) < end)
    return connection.execute(sa.select(sa.func.count()).select_from(Request).where(*in_range, *where)).scalar_one()
