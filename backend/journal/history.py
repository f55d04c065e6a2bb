"""Histories: the requests of chosen runs are archived in the store, in segments, before their payloads are dropped.

`Request.archives` is set when a request of such a run is submitted. The flag keeps the payload and the result in the
journal until `record_segment` notes the segment that contains them. Segments are consecutive. If an engine is killed,
only its last segment may have an object without a row.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import aliased
from sqlmodel import Field, col

from tinkerflow.backend.journal.database import NAME_BYTES, Aggregate, Table, Text, get_owned, in_id_order
from tinkerflow.backend.journal.tables import IS_PENDING, TAKES_WORK, Model, Request, RequestState, TrainingStep
from tinkerflow.backend.spec.history import Kind, PastRequest, Segment, digest

MOST_REQUESTS = 1024  # in a segment
MOST_BYTES = 2**24  # of payloads in a segment; a larger request is a segment by itself
_NO_BOUND = sa.literal(2**62, sa.BigInteger)
_DUE_REQUESTS, _DUE_BYTES, _DUE_SECONDS = 256, 2**22, 300.0


class HistorySegment(Table, table=True):
    """A stored segment of a run's history: the requests with `first` <= seq_id <= `last` (spec.history.Segment)."""

    __tablename__ = "history_segment"

    model_id: str = Field(primary_key=True, foreign_key="model.id", sa_type=Text())
    first: int = Field(primary_key=True, sa_type=sa.BigInteger)
    last: int = Field(sa_type=sa.BigInteger)
    name: str = Field(sa_type=Text(NAME_BYTES))
    size_bytes: int = Field(sa_type=sa.BigInteger)


@dataclass(frozen=True)
class HistoryRules:
    """Histories of runs that ended `days` ago are deleted, and a project's oldest histories if it exceeds `max_bytes`.

    0: no limit.
    """

    days: float
    max_bytes: int


_CHANGES = (Kind.CREATE_MODEL, Kind.LOAD_MODEL, Kind.LOAD_WEIGHTS, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP)
_ARCHIVES = col(Request.archives)
_WAITING = (
    sa.select(
        col(Request.model_id),
        sa.func.count(),
        sa.func.sum(col(Request.waiting_bytes)),
        sa.func.min(col(Request.finished_at)),
    )
    .where(_ARCHIVES, sa.not_(IS_PENDING))
    .group_by(col(Request.model_id))
)


class Histories(Aggregate):
    """The histories of training runs: the requests to archive next, and the segments in the store."""

    def due(self) -> list[str]:
        """Ids of models with old answered requests, with enough of them for a segment, or that accept no more work."""
        old = self._ago(_DUE_SECONDS)
        with self._read() as connection:
            waiting = connection.execute(_WAITING).all()
            ids = [row[0] for row in waiting]
            live = sa.select(col(Model.id)).where(col(Model.id).in_(ids), col(Model.state).in_(TAKES_WORK))
            alive = set(connection.execute(live).scalars())
        return [
            model_id
            for model_id, count, size, oldest in waiting
            if count >= _DUE_REQUESTS or size >= _DUE_BYTES or oldest <= old or model_id not in alive
        ]

    def unarchived(self, model_id: str, *, after: int = -1, most_bytes: int = MOST_BYTES) -> list[PastRequest]:
        """The next requests to archive, in order: answered requests that precede every unanswered one.

        after: only requests with a higher seq_id. most_bytes: the limit of their payloads, unless the first payload
        alone exceeds it.
        """
        of_model = (col(Request.model_id) == model_id, col(Request.seq_id) > after)
        # Requests beyond next_seq were refused. While the model lives, requests with earlier numbers may still arrive.
        bound = sa.case((col(Model.state).in_(TAKES_WORK), col(Model.next_seq)), else_=_NO_BOUND)
        next_seq = sa.select(bound).where(col(Model.id) == model_id).scalar_subquery()
        pending = sa.select(sa.func.min(col(Request.seq_id))).where(*of_model, IS_PENDING).scalar_subquery()
        before = sa.func.coalesce(pending, _NO_BOUND)
        listed = (
            sa.select(col(Request.id), col(Request.waiting_bytes))
            .where(*of_model, _ARCHIVES, col(Request.seq_id) < next_seq, col(Request.seq_id) < before)
            .order_by(col(Request.seq_id))
            .limit(MOST_REQUESTS)
        )
        with self._read() as connection:
            chosen: list[str] = []
            size = 0
            for row in connection.execute(listed):
                size += row.waiting_bytes
                if chosen and size > most_bytes:
                    break
                chosen.append(row.id)
            rows = sa.select(Request).where(col(Request.id).in_(chosen)).order_by(col(Request.seq_id))
            return [_past(row) for row in connection.execute(rows)]

    def record_segment(self, model_id: str, segment: Segment) -> bool:
        """Record a segment that is in the store, so the journal may drop its payloads and results.

        Returns False if the history was deleted meanwhile; the caller must then remove the segment. FencedError if
        another engine has taken the lease.
        """
        with self._write(fenced=True) as connection:
            by_id = sa.select(col(Model.history)).where(col(Model.id) == model_id).with_for_update()
            if not connection.execute(by_id).scalar_one():
                return False
            connection.execute(sa.insert(HistorySegment), {"model_id": model_id, **asdict(segment)})
            within = (col(Request.seq_id) >= segment.first, col(Request.seq_id) <= segment.last)
            _release(connection, model_id, *within)
        return True

    def segments(self, model_id: str, owner: str | None = None) -> list[Segment]:
        """A run's segments in the store, in order. NotFoundError: unknown or foreign run."""
        with self._read() as connection:
            get_owned(connection, Model, model_id, owner)
            of_model = sa.select(HistorySegment).where(col(HistorySegment.model_id) == model_id)
            rows = connection.execute(of_model.order_by(col(HistorySegment.first))).all()
        return [Segment(row.name, row.first, row.last, row.size_bytes) for row in rows]

    def exists(self, model_id: str) -> bool:
        """Whether a run has a history. NotFoundError: unknown run."""
        with self._read() as connection:
            return has_history(connection, get_owned(connection, Model, model_id, None))

    def steps(self, model_id: str, first: int = 0, last: int = 2**62) -> dict[int, int]:
        """The optimizer step that each optim_step made, by seq_id, in order. first, last: the range of seq_ids."""
        of_model = (col(TrainingStep.model_id) == model_id, col(TrainingStep.seq_id).between(first, last))
        steps = sa.select(col(TrainingStep.seq_id), col(TrainingStep.step)).where(*of_model)
        with self._read() as connection:
            return {row.seq_id: row.step for row in connection.execute(steps.order_by(col(TrainingStep.seq_id)))}

    def clean_saves(self, model_id: str, last: int, limit: int = 20) -> dict[str, int]:
        """The named saves of training states, in requests up to `last`: their seq_ids by request id.

        Newest first. Saves made while gradients were accumulated are left out, because a checkpoint contains no
        gradients.
        """
        before = aliased(Request)
        previous = (
            sa.select(col(before.kind))
            .where(
                col(before.model_id) == model_id,
                col(before.seq_id) < col(Request.seq_id),
                col(before.kind).in_(_CHANGES),
            )
            .order_by(col(before.seq_id).desc())
            .limit(1)
            .correlate(Request)
            .scalar_subquery()
        )
        of_model = (col(Request.model_id) == model_id, col(Request.seq_id) > last, col(Request.kind).in_(_CHANGES))
        end = sa.select(sa.func.min(col(Request.seq_id))).where(*of_model)
        saves = (
            sa.select(col(Request.id), col(Request.seq_id))
            .where(
                col(Request.model_id) == model_id,
                col(Request.seq_id) < sa.func.coalesce(end.scalar_subquery(), _NO_BOUND),
                col(Request.kind) == Kind.SAVE_WEIGHTS,
                previous != Kind.FORWARD_BACKWARD,
            )
            .order_by(col(Request.seq_id).desc())
            .limit(limit)
        )
        with self._read() as connection:
            return {row.id: row.seq_id for row in connection.execute(saves)}

    def to_delete(self, rules: HistoryRules, limit: int = 20) -> list[str]:
        """Ids of the newest `limit` runs with a history that the rules delete, oldest first; see upkeep.py.

        A project over its limit loses the histories of ended runs first, then those of live runs. Ended histories (by
        `end`, or because the run was deleted) are listed until they are forgotten.
        """
        size = sa.func.sum(col(HistorySegment.size_bytes))
        of_run = [col(Model.id), col(Model.owner), col(Model.state), col(Model.last_request_at), col(Model.history)]
        of_runs = (
            sa.select(*of_run, size.label("size"))
            .join(HistorySegment, col(HistorySegment.model_id) == col(Model.id))
            .group_by(*of_run)
            .order_by(col(Model.state).in_(TAKES_WORK), col(Model.last_request_at), col(Model.id))
        )
        with self._read() as connection:
            runs = connection.execute(of_runs).all()
        stored: dict[str, int] = {}
        for run in runs:
            stored[run.owner] = stored.get(run.owner, 0) + int(run.size)
        before, chosen = self._ago(rules.days * 86400), list[str]()
        for run in runs:
            late = rules.days and run.last_request_at < before and run.state not in TAKES_WORK
            if late or not run.history or (rules.max_bytes and stored[run.owner] > rules.max_bytes):
                stored[run.owner] -= int(run.size)
                chosen.append(run.id)
        return chosen[-limit:]

    def end(self, model_id: str) -> None:
        """Keep no more history of a run. Its segments stay listed until `forget`, so a kill leaves no stray object."""
        with self._write() as connection:
            connection.execute(sa.update(Model).where(col(Model.id) == model_id).values(history=False))
            _release(connection, model_id)

    def forget(self, model_id: str) -> None:
        """Delete the rows of a run's segments, after their objects were removed."""
        with self._write() as connection:
            connection.execute(sa.delete(HistorySegment).where(col(HistorySegment.model_id) == model_id))


def has_history(connection: sa.Connection, run: sa.Row[Any]) -> bool:
    """Whether a run's requests are kept, or its ended history is still in the store. run: the run's row."""
    stored = sa.exists().where(col(HistorySegment.model_id) == run.id)
    return bool(run.history or connection.execute(sa.select(stored)).scalar())


def _release(connection: sa.Connection, model_id: str, *where: sa.ColumnElement[bool]) -> None:
    waiting = (col(Request.model_id) == model_id, _ARCHIVES, *where)
    connection.execute(sa.update(Request).where(in_id_order(Request, *waiting)).values(archives=False))


def _past(row: sa.Row[tuple[Request]]) -> PastRequest:
    done = row.state == RequestState.DONE
    result_hash = digest(row.result) if done and row.result is not None else ""
    return PastRequest(
        row.seq_id, row.kind, row.id, bytes(row.payload), None if done else str(row.error), result_hash, row.finished_at
    )
