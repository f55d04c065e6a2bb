"""Requests on their way to the engine: submitted, counted against quotas, ready to execute. results.py answers them.

Submitting: the unique constraints on (model or sampler, seq_id) decide which of two equal requests was first. A replay
gets the id of the first request. A request that cannot be executed is stored as failed, because a client would wait
forever after a refused submit. Possible reasons are an ended model or session, a skipped seq_id, and invalid content.

Executing: a model's requests run in the order of their sequence ids, starting at next_seq. Sequence ids of requests
that were stored as failed count as used. A missing id blocks all later ids (chunks of one call arrive as 2..n, then 1).
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
from tinkerflow.backend.spec.history import Kind

CANCELLED = "cancelled by the client"
MOST_ALONG = 2**16  # bytes of a payload that is loaded with its sample; larger payloads are loaded later
FAILED_PAYLOAD = 2**16  # the largest payload stored for a request that failed on submission


# ------------------------------------------------------------------ new and pending requests
@dataclass(frozen=True)
class NewRequest:
    """One operation. Exactly one of model_id and sampler_id is given, and determines the session.

    content_hash: equal for replays of the same operation, even if their bytes differ.
    error: set if the request is invalid. The request is stored, its seq_id counts as used, and its answer is this
    error. An HTTP error would hang the client.
    tokens: tokens of training data, counted while the request waits if there is a limit.
    stores: whether the request saves a checkpoint. interactive: a person waits for this sample (`pending_samples`).
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
    """A request that waits for its answer. sampler: set for samples.

    left: bytes of the payload that `Requests.payload` still has to load; `payload` is empty until then.
    answered: the request already has its answer, and is replayed or has work left (recovery.py). trace: the context of
    the span in which it was submitted.
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
        """Convert a row of the table `request`."""
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
        """The outcome that answers the request with `result`."""
        return self._outcome(effects, result=result, result_type=result_type)

    def failed(self, error: TinkerflowError | str, category: Category | None = None, *effects: Effect) -> Outcome:
        """The outcome that answers the request with `error`. The category of a plain text is "server" by default."""
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
        col(Model.history),
        _of_session(col(Session.state)).label("session_state"),
        _of_session(col(Session.detail)).label("session_detail"),
    )
)
# The sampler's row cannot change before the commit. FOR SHARE would deadlock: a request that is stored as failed takes
# a number, and two transactions that share the row's lock would wait for each other.
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
_SAMPLES = sa.select(
    *(column for column in sa.inspect(Request).local_table.columns if column.name not in ("payload", "result")),
    sa.case((_SIZE > MOST_ALONG, _SIZE), else_=0).label("left"),
    sa.case((_SIZE <= MOST_ALONG, col(Request.payload)), else_=b"").label("payload"),
    *(column.label(f"its_{column.name}") for column in sa.inspect(SamplerRow).local_table.columns),
).join(SamplerRow, col(SamplerRow.id) == col(Request.sampler_id))
_OLDEST = (col(Request.created_at), col(Request.seq_id), col(Request.id))
_PENDING_SAMPLES = (
    _SAMPLES.where(
        IS_PENDING,
        col(Request.sampler_id).is_not(None),
        of_base(SamplerRow),
        col(Request.id).not_in(sa.bindparam("exclude", expanding=True)),
    )
    .order_by(*_OLDEST)
    .limit(sa.bindparam("at_most"))
)
_PENDING_INTERACTIVE = _PENDING_SAMPLES.where(col(Request.interactive))


def _of_owner(pending: sa.Select[Any]) -> sa.Select[Any]:
    """The statement for one owner. It reads only this owner's samples, and sorts them without their payloads."""
    of_owner = pending.where(col(Request.owner) == sa.bindparam("of_owner"))
    ids = of_owner.with_only_columns(col(Request.id), maintain_column_froms=True).correlate(None)
    return _SAMPLES.where(col(Request.id).in_(ids)).order_by(*_OLDEST)


_OF_ANY = (_PENDING_SAMPLES, _PENDING_INTERACTIVE)
_OF_OWNER = (_of_owner(_PENDING_SAMPLES), _of_owner(_PENDING_INTERACTIVE))
_PAYLOAD = sa.select(col(Request.payload)).where(col(Request.id) == sa.bindparam("row_id"), IS_PENDING)
_TO_CANCEL = sa.select(col(Request.kind), col(Request.state), col(Request.sampler_id), col(Request.seq_id)).where(
    is_owned(Request)
)


class Requests(Aggregate):
    """Submits and cancels requests, and lists the requests that the engine can execute next."""

    def submit(self, request: NewRequest, limits: Limits = NO_LIMITS) -> str:
        """Store a request and return its id. A replay (same seq_id and content) returns the id of the first request.

        NotFoundError: unknown or foreign model or sampler. ConflictError: the seq_id was used for other content. If the
        model or session has ended, or the request exceeds the project's `limits`, the request is stored as failed with
        the reason. TooManyError: a sample exceeds the limits, and is not stored.
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
        """A model's next requests in order of execution: contiguous sequence ids from its next_seq, then an unload.

        The unload is returned when no other request can run. One statement, and another for each gap of sequence ids
        whose requests were stored as failed.
        """
        with self._read() as connection:
            rows = connection.execute(_READY, {"model_id": model_id, "at_most": limit}).all()
            run: list[Pending] = []
            cut = len(rows) == limit  # there may be more requests after this page
            for row in (row for row in rows if row.seq_id is not None):
                expected = max(row.next_seq, (run[-1].seq_id or 0) + 1 if run else 0)
                if row.seq_id > expected:
                    # Requests that arrived after the page was read are pending, and must not count as used.
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
        """At most `limit` pending samples, oldest first, each with its sampler. Long payloads are left out.

        Half of `limit` is reserved for interactive samples, which come first. An interactive sample therefore does
        not wait for an earlier batch, and the batch still progresses. base_model, owner: the samples'; None: any.
        exclude: ids of requests to leave out. odd_interactive: whether the middle place of an odd limit is interactive.
        """
        most = (limit + odd_interactive) // 2
        pending, interactive = _OF_ANY if owner is None else _OF_OWNER
        values = {"of_base": base_model, "exclude": list(exclude), "of_owner": owner}
        with self._read() as connection:
            oldest = list(connection.execute(pending, {**values, "at_most": limit}))
            first = [row for row in oldest if row.interactive][:most]
            if len(oldest) == limit and len(first) < most:  # there may be more interactive samples beyond the limit
                first = list(connection.execute(interactive, {**values, "at_most": most}))
        taken = {row.id for row in first}
        rows = [*first, *(row for row in oldest if row.id not in taken)][:limit]
        return [Pending.of(row, as_view(SamplerView, row, prefix="its_"), row.left) for row in rows]

    def payload(self, request_id: str) -> bytes | None:
        """The payload of a pending request; None if the request was answered."""
        with self._read() as connection:
            return connection.execute(_PAYLOAD, {"row_id": request_id}).scalar_one_or_none()

    def cancel(self, request_id: str, owner: str | None) -> bool:
        """Fail a pending sample and remove it from the decode batch. Returns whether it was still pending.

        UserError: the request is not a sample. Later requests of a model rely on its accepted operations, so these
        operations are always executed. NotFoundError: unknown or foreign request.
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
    """Lock the model's row, record the time of the request, and store it as pending or failed."""
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
            f"seq_id {request.seq_id} of model {model_id} arrived too late: it was skipped; next is {model.next_seq}"
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
    return store(connection, request, model.session_id, failure, now, archives=model.history)


def _submit_to_sampler(
    connection: sa.Connection, sampler_id: str, request: NewRequest, limits: Limits, now: datetime
) -> tuple[str, str]:
    """Store a sample. Returns its id, and the topic to publish."""
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
    *,
    archives: bool = False,
) -> str:
    """Store a request as pending, or as failed with `failure`. Returns its id, or the id of an earlier equal request.

    connection: a transaction that has locked the model or selected the sampler. session_id: the session of the model or
    sampler. now: the time of the request. completion: the sampler's number for a failed sample. archives: whether the
    request belongs to the history of its run.
    ConflictError: the seq_id belongs to another request.
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
        "archives": archives,
    }
    return request_id if insert_if_absent(connection, Request, row) else _replayed(connection, request)


def _replayed(connection: sa.Connection, request: NewRequest) -> str:
    """The id of the stored request with this seq_id. ConflictError: its content differs."""
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
    """Wait for the project's other transactions with the same quotas. Call this before locking any row.

    queued_bytes are counted without this wait, so simultaneous requests may slightly exceed that limit.
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
    """The number of the model's requests with a seq_id in [first, end) that match `where`."""
    in_range = (col(Request.model_id) == model_id, col(Request.seq_id) >= first, col(Request.seq_id) < end)
    return connection.execute(sa.select(sa.func.count()).select_from(Request).where(*in_range, *where)).scalar_one()
