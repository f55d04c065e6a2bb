"""Results: how requests are answered, how answers are read, and the order of a sampler's answers.

The first answer of a request wins. The answer and its effects are stored in one transaction.

A client may follow a whole sampler with one cursor (retrieve_futures). Every transaction that answers requests of a
sampler takes the sampler's next number and stores it with these requests. An UPDATE of the sampler's row takes the
number and holds the row's lock until the commit, so a number becomes visible only after all smaller numbers. A
reader that has seen number n has missed nothing at or below n. Ids from a Postgres sequence would not guarantee this,
because they can become visible out of order. A transaction that rolls back returns its number. Numbers without requests
are harmless; they come from outcomes that were too late. The cursor is one of these numbers, so all API processes agree
on it, even after a restart.

Results stay readable until they expire or are acknowledged. Then their bytes are dropped, and reading the id returns an
error with the reason. An acknowledgement keeps a few of a sampler's first samples, which the console shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, groupby
from typing import Any, Protocol

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.errors import Category
from tinkerflow.backend.journal.checkpoints import CheckpointSaved
from tinkerflow.backend.journal.database import (
    Aggregate,
    get_owned,
    in_chunks,
    in_id_order,
    insert_if_absent,
    is_owned,
    missing,
)
from tinkerflow.backend.journal.effects import end_models
from tinkerflow.backend.journal.leases import answering_since
from tinkerflow.backend.journal.samplers import COMPLETION, NEXT_COMPLETION
from tinkerflow.backend.journal.tables import (
    IS_PENDING,
    UNMADE,
    Checkpoint,
    Model,
    ModelState,
    PayloadType,
    Request,
    RequestState,
    SamplerRow,
    TrainingStep,
    UsageBucket,
    UsageKind,
)
from tinkerflow.backend.journal.topics import CLONE_BLOCK, answered
from tinkerflow.backend.spec.drift import DRIFT_FIGURES
from tinkerflow.backend.spec.history import Kind

PAGE = 1000
_DROPPED_BYTES = 2**23
_BACK_SECONDS = 600.0  # within this time, clients notice that the API is back
DROPPED, EXPIRED = "the result was dropped", "the result expired"  # errors of results without bytes begin with these
FIRST_SHOWN, LARGEST_SHOWN = 4, 2**18  # how many samples an acknowledgement keeps; the most bytes of each
_ACKNOWLEDGED = f"{DROPPED}: its client acknowledged it"
_SIZE = sa.func.length(col(Request.result))
STORED_SIZE = sa.func.length(col(Request.payload)) + sa.func.coalesce(_SIZE, 0)  # bytes of the request and its answer
_SIZED = (col(Request.id), STORED_SIZE)
_AFTER = (
    sa.select(col(Request.id), col(Request.completion), col(Request.state), _SIZE.label("size"))
    .where(
        col(Request.sampler_id) == sa.bindparam("of_sampler"),
        col(Request.completion) > sa.bindparam("after"),
        col(Request.completion) <= sa.bindparam("up_to"),
        col(Request.seq_id) >= sa.bindparam("first_seq"),
        col(Request.seq_id) < sa.bindparam("end_seq"),
    )
    .order_by(col(Request.completion), col(Request.id))
    .limit(sa.bindparam("at_most"))
)
_LAST = sa.select(col(SamplerRow.id), col(SamplerRow.last_completion)).where(
    col(SamplerRow.id).in_(sa.bindparam("ids", expanding=True))
)
_NO_LIMIT = 2**62
TAKE_NUMBER = sa.update(SamplerRow).where(col(SamplerRow.id) == sa.bindparam("of_sampler")).values(NEXT_COMPLETION)
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
_OF_IDS = in_id_order(Request, col(Request.id).in_(sa.bindparam("ids", expanding=True)))
_REPLAYS = sa.update(Request).where(_OF_IDS).values(replays=True)
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
_LOCK_CHECKPOINTS = (
    sa.select(col(Checkpoint.path))
    .where(col(Checkpoint.path).in_(sa.bindparam("paths", expanding=True)))
    .order_by(col(Checkpoint.path))
    .with_for_update()
)
_ADD_USAGE = sa.text(
    "INSERT INTO usage_bucket (session_id, bucket_start, base_model, kind, quantity)"
    " VALUES (:session_id, :bucket_start, :base_model, :kind, :quantity)"
    " ON CONFLICT (session_id, bucket_start, base_model, kind)"
    " DO UPDATE SET quantity = usage_bucket.quantity + excluded.quantity"
).bindparams(sa.bindparam("bucket_start", type_=sa.inspect(UsageBucket).local_table.c.bucket_start.type))
_SUMS = ("tokens", "weight", "loss", *(one.column for one in DRIFT_FIGURES))
_ADD_LOSS = sa.text(
    f"INSERT INTO training_step (model_id, seq_id, step, at, {', '.join(_SUMS)})"
    f" VALUES (:model_id, :seq_id, :step, :at, {', '.join(f':{name}' for name in _SUMS)})"
    " ON CONFLICT (model_id, seq_id) DO UPDATE SET "
    + ", ".join(f"{name} = training_step.{name} + excluded.{name}" for name in _SUMS)
).bindparams(sa.bindparam("at", type_=sa.inspect(TrainingStep).local_table.c.at.type))
_MADE = ("seq_id", "step", "at", "grad_norm", "learning_rate")
_MAKE_STEP = (
    sa.update(TrainingStep)
    .where(col(TrainingStep.model_id) == sa.bindparam("of_model"), col(TrainingStep.seq_id) == UNMADE)
    .values({name: sa.bindparam(name) for name in _MADE})
)
# Payloads are left out: answers are read thousands of times a second, and a payload can take megabytes.
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


# ------------------------------------------------------------------ effects of most answers
@dataclass(frozen=True)
class Used:
    """Tokens (or checkpoints) that a session used on a base model. They are counted in the hour of the answer."""

    session_id: str
    base_model: str
    kind: UsageKind
    quantity: int


@dataclass(frozen=True)
class LossMeasured:
    """The figures of one forward_backward.

    tokens: the number of tokens. weight: the sum of their weights. loss: the sum over the tokens. Both are 0 if a
    weight is negative, because then their quotient is no mean. The columns of `DRIFT_FIGURES` are means over the
    tokens; None if not measured.
    """

    model_id: str
    tokens: int
    weight: float
    loss: float
    kl: float | None = None
    agreement: float | None = None
    first_agreement: float | None = None
    supported: float | None = None

    def apply(self, connection: sa.Connection, now: datetime) -> Sequence[str]:
        """Add the figures to the step that is still accumulating gradients."""
        figures: dict[str, float | None] = {"tokens": self.tokens, "weight": self.weight, "loss": _finite(self.loss)}
        for figure in DRIFT_FIGURES:
            mean = getattr(self, figure.column)
            figures[figure.column] = None if mean is None else _finite(mean * self.tokens)
        connection.execute(_ADD_LOSS, {"model_id": self.model_id, "seq_id": UNMADE, "step": 0, "at": now, **figures})
        return ()


@dataclass(frozen=True)
class StepMeasured:
    """The optim_step with this seq_id used the gradients of every LossMeasured since the previous optim_step.

    learning_rate: None if the optimizer has none.
    """

    model_id: str
    seq_id: int
    step: int
    grad_norm: float
    learning_rate: float | None

    def apply(self, connection: sa.Connection, now: datetime) -> Sequence[str]:
        """Create the row of the step from its losses. A step without losses also gets a row."""
        figures = {"grad_norm": _finite(self.grad_norm), "learning_rate": self.learning_rate}
        made = {"seq_id": self.seq_id, "step": self.step, "at": now, **figures}
        if not connection.execute(_MAKE_STEP, {"of_model": self.model_id, **made}).rowcount:
            insert_if_absent(connection, TrainingStep, {"model_id": self.model_id, "tokens": 0, "weight": 0.0, **made})
        return ()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ------------------------------------------------------------------ outcomes and results
class RowEffect(Protocol):
    """A change that an operation made to a model, sampler or checkpoint. It is stored together with the answer."""

    def apply(self, connection: sa.Connection, now: datetime) -> Sequence[str]:
        """Change the rows in the caller's transaction. Returns the topics to publish after its commit."""


Effect = RowEffect | Used


@dataclass(frozen=True)
class Outcome:
    """The answer to one request: result bytes, or an error with its category. See Pending.done and Pending.failed.

    model_id, sampler_id and seq_id identify the request. With them, the model's next_seq moves past the request, or the
    request gets the sampler's next number. effects: applied in the same transaction, and only if this is the first
    answer of the request. A failed creation (seq_id 0) ends its model without an effect.
    replays: the request changed the model, so a restore executes it again; or it published weights that are not stored
    yet. This flag counts even if the request was already answered.
    started_at: when the first command of the request was sent; None if none was sent.
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
        """ValueError: the outcome has neither a result nor an error, or both."""
        if (self.result is None) == (self.error is None):
            raise ValueError(f"outcome of {self.request_id}: exactly one of result and error must be given")
        if (self.error is None) != (self.category is None):
            raise ValueError(f"outcome of {self.request_id}: an error comes with its category, a result without")


@dataclass(frozen=True)
class Result:
    """A request's answer: `result` bytes of `result_type` if it succeeded, else `error` and `category`.

    size: the result's size in bytes. If it exceeds the reader's limit, the bytes are left out. again: whether an
    earlier call has read the result.
    """

    request_id: str
    kind: Kind
    result: bytes | None
    result_type: PayloadType
    error: str | None
    category: Category | None
    size: int
    again: bool


@dataclass(frozen=True)
class Completion:
    """One answered request of a sampler. size: the bytes of its result; 0 if it failed or was dropped."""

    request_id: str
    done: bool
    size: int


@dataclass(frozen=True)
class Completions:
    """Requests that were answered after a cursor, oldest first, and the next cursor."""

    rows: tuple[Completion, ...]
    cursor: int


class Results(Aggregate):
    """Stores, returns, acknowledges and expires the answers of requests."""

    def finish(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Answer requests with all their effects in one transaction. Returns the ids that this call answered.

        The first answer of a request wins: a later answer and its effects change nothing. FencedError if another engine
        has taken the lease. Then nothing is stored.
        """
        with self._write(fenced=True) as connection:
            ids, topics = finish(connection, outcomes, self._now())
        self._publish(*topics)
        return ids

    def get(self, request_id: str, owner: str | None, *, at_most: int | None = None) -> Result | None:
        """The answer; None while the request is pending. An answer can be read again until it expires.

        For a result over `at_most` bytes, only the size is returned, and the result does not count as read.
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
            with self._write(lasting=False) as connection:
                connection.execute(_MARK_READ, {"request_id": request_id, "now": self._now()})
        again = row.read_at is not None
        return Result(row.id, row.kind, row.result, row.result_type, row.error, row.category, row.size or 0, again)

    def finished(self, request_ids: Collection[str]) -> set[str]:
        """Which of these requests are answered, in one query per ten thousand ids."""
        with self._read() as connection:
            found: set[str] = set()
            for ids in in_chunks(request_ids):
                found |= set(connection.execute(_FINISHED, {"ids": ids}).scalars())
            return found

    def completions(
        self, sampler_id: str, owner: str | None, *, clone: int, after: int, page: int = PAGE
    ) -> Completions:
        """The requests of one clone that were answered after the cursor `after`, oldest first, about `page` per call.

        One statement if nothing was answered since, otherwise two; three if one transaction answered more than `page`.
        A cursor beyond the sampler's last number restarts at 0, because the sampler never returned such a cursor.
        NotFoundError: unknown or foreign sampler.
        """
        with self._read() as connection:
            last = get_owned(connection, SamplerRow, sampler_id, owner).last_completion
            if after == last:
                return Completions((), last)
            bounds = {
                "of_sampler": sampler_id,
                "first_seq": clone * CLONE_BLOCK,
                "end_seq": (clone + 1) * CLONE_BLOCK,
                "after": after if after < last else 0,
                # Later answers belong to the next call, because the cursor must not pass unreturned requests.
                "up_to": last,
            }
            rows = connection.execute(_AFTER, {**bounds, "at_most": page + 1}).all()
            if len(rows) > page:
                # Requests of one number are returned together: drop the number that the page cuts, or return it alone.
                last = rows[-1].completion
                rows = [row for row in rows if row.completion < last]
                if rows:
                    last = rows[-1].completion
                else:
                    alone = {**bounds, "after": last - 1, "up_to": last, "at_most": _NO_LIMIT}
                    rows = list(connection.execute(_AFTER, alone).all())
        return Completions(
            tuple(Completion(row.id, row.state == RequestState.DONE, row.size or 0) for row in rows), last
        )

    def last_completions(self, sampler_ids: Collection[str]) -> dict[str, int]:
        """The number of each sampler's last answer, for comparison with a cursor. One statement per ten thousand."""
        with self._read() as connection:
            rows = (row for ids in in_chunks(sampler_ids) for row in connection.execute(_LAST, {"ids": ids}))
            return {row.id: row.last_completion for row in rows}

    def acknowledge(self, sampler_id: str, owner: str | None, request_ids: Collection[str], *, clone: int) -> int:
        """Drop the bytes of results that the client has read and acknowledges. Returns the number of dropped results.

        The first FIRST_SHOWN samples of a sampler, if small, are kept until they expire, because the console shows
        them. Results that were never read are kept, and ids of other clones are ignored. No other clone knows the id of
        a sample, so no other reader can need the bytes. NotFoundError: unknown or foreign sampler.
        """
        acknowledged = (
            col(Request.sampler_id) == sampler_id,
            col(Request.seq_id) >= clone * CLONE_BLOCK,
            col(Request.seq_id) < (clone + 1) * CLONE_BLOCK,
            col(Request.read_at).is_not(None),
            col(Request.dropped_at).is_(None),
            sa.or_(col(Request.seq_id) >= FIRST_SHOWN, STORED_SIZE > LARGEST_SHOWN),
        )
        with self._read() as connection:
            get_owned(connection, SamplerRow, sampler_id, owner)
            of_ids = (
                sa.select(*_SIZED).where(col(Request.id).in_(ids), *acknowledged) for ids in in_chunks(request_ids)
            )
            rows = [row for chosen in of_ids for row in connection.execute(chosen)]
        return self._drop(rows, acknowledged, dropped_values(_ACKNOWLEDGED, payload=b"", dropped_at=self._now()))

    def expire(self, ttl: float, limit: int = 500) -> int:
        """Drop the payload and result of at most `limit` old requests. Returns their number.

        A request is old if it was last read (or answered, if never read) over `ttl` seconds ago. Reading it afterwards
        returns an error with the reason. The payload of a request that may be replayed is kept. After the API was away,
        nothing expires for a while, because clients could not read their results.
        """
        before, now = self._ago(ttl), self._now()
        last_use = sa.func.coalesce(col(Request.read_at), col(Request.finished_at))
        still = (col(Request.dropped_at).is_(None), last_use < before)
        is_old = (*still, col(Request.finished_at) < before, sa.not_(col(Request.archives)))
        old = sa.select(*_SIZED).where(*is_old).order_by(col(Request.finished_at)).limit(limit)
        with self._read() as connection:
            since = answering_since(connection, now)
            if since is not None and since > self._ago(min(ttl, _BACK_SECONDS)):
                return 0
            rows = connection.execute(old).all()
        text = f"{EXPIRED}: it was kept until " + before.isoformat(timespec="seconds") + " and has been dropped"
        payload = sa.case((col(Request.replays), col(Request.payload)), else_=b"")
        values = dropped_values(text, payload=payload, dropped_at=now)
        return self._drop(rows, still, values)

    def _drop(
        self, rows: Sequence[sa.Row[Any]], still: Sequence[sa.ColumnElement[bool]], values: Mapping[str, Any]
    ) -> int:
        """Set `values` in the rows that meet the conditions `still`. Returns their number. rows: of _SIZED.

        A transaction drops only about _DROPPED_BYTES, because SQLite reads every dropped page while others wait.
        """
        ends = accumulate(size for _, size in rows)
        dropped = 0
        for _, part in groupby(zip(ends, rows, strict=True), key=lambda one: one[0] // _DROPPED_BYTES):
            ids = [row.id for _, row in part]
            for some in in_chunks(ids):
                chosen = in_id_order(Request, col(Request.id).in_(some), *still)
                with self._write() as connection:
                    dropped += connection.execute(sa.update(Request).where(chosen).values(**values)).rowcount
        return dropped


def dropped_values(text: str, **more: Any) -> dict[str, Any]:
    """The column values that drop a request's result. A request in state done fails with the error `text`."""
    was_done = col(Request.state) == RequestState.DONE
    return {
        "result": None,
        "state": RequestState.FAILED,
        "error": sa.case((was_done, text), else_=col(Request.error)),
        "category": sa.case((was_done, "user"), else_=col(Request.category)),
        **more,
    }


# ------------------------------------------------------------------ answering
def finish(connection: sa.Connection, outcomes: Sequence[Outcome], now: datetime) -> tuple[list[str], list[str]]:
    """Answer requests. Returns the ids that this call answered, and the topics to publish.

    Three statements, one more per sampler, and the statements of the effects.
    """
    first = {outcome.request_id: outcome for outcome in reversed(outcomes)}
    _advance(connection, outcomes)
    samplers = sorted({outcome.sampler_id for outcome in outcomes if outcome.sampler_id is not None})
    if samplers:  # one UPDATE each, in id order; see the module's docstring
        connection.execute(TAKE_NUMBER, [{"of_sampler": sampler_id} for sampler_id in samplers])
    waiting = {row.id: row.sampler_id for row in connection.execute(_LOCK_WAITING, {"ids": list(first)})}
    winners = [outcome for request_id, outcome in reversed(first.items()) if request_id in waiting]
    beaten = [outcome.request_id for outcome in first.values() if outcome.replays and outcome.request_id not in waiting]
    if beaten:
        connection.execute(_REPLAYS, {"ids": beaten})
    for outcome in winners:
        if outcome.sampler_id != waiting[outcome.request_id]:
            # Clients may already have passed this number, and would never see the answer.
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
    saved = [effect.path for one in winners for effect in one.effects if isinstance(effect, CheckpointSaved)]
    if len(saved) > 1:  # in the order of their paths, like deletions
        connection.execute(_LOCK_CHECKPOINTS, {"paths": saved})
    used: list[Used] = []
    for outcome in winners:
        for effect in outcome.effects:
            if isinstance(effect, Used):
                used.append(effect)
            else:
                topics += effect.apply(connection, now)
        if outcome.error is not None and outcome.model_id is not None and outcome.seq_id == 0:
            topics += end_models(connection, [outcome.model_id], ModelState.FAILED, outcome.error, now)
    _add_usage(connection, used, now)
    return ids, topics


def _advance(connection: sa.Connection, outcomes: Iterable[Outcome]) -> None:
    """Move next_seq of every model past its executed requests. Locks the models before any request."""
    after: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.model_id is not None:
            passed = 0 if outcome.seq_id is None else outcome.seq_id + 1
            after[outcome.model_id] = max(passed, after.get(outcome.model_id, 0))
    if after:
        rows = [{"of_model": model_id, "passed_seq": passed} for model_id, passed in sorted(after.items())]
        connection.execute(_ADVANCE, rows)


def _add_usage(connection: sa.Connection, used: Sequence[Used], now: datetime) -> None:
    """Add to the buckets of the current hour (usage.py), with one upsert per bucket."""
    sums: Counter[tuple[str, str, str]] = Counter()
    for effect in used:
        sums[effect.session_id, effect.base_model, effect.kind] += effect.quantity
    rows = [
        {"session_id": session, "bucket_start": hour_of(now), "base_model": base, "kind": kind, "quantity": quantity}
        for (session, base, kind), quantity in sorted(sums.items())  # sorted: all writers lock in the same order
        if quantity
    ]
    if rows:
        connection.execute(_ADD_USAGE, rows)


def hour_of(moment: datetime) -> datetime:
    """The beginning of the hour of `moment`, in UTC."""
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
