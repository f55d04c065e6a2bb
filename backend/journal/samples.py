"""Recent samples of a project or of a training run, for the console."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.ids import inflight_id
from tinkerflow.backend.journal.database import Aggregate, as_view, get_owned, missing, owned_by
from tinkerflow.backend.journal.requests import CANCELLED
from tinkerflow.backend.journal.results import DROPPED, EXPIRED, FIRST_SHOWN, STORED_SIZE
from tinkerflow.backend.journal.tables import Model, Request, RequestState, SamplerRow
from tinkerflow.backend.spec.history import Kind

SAMPLERS = 20  # number of the newest samplers whose samples are listed
# Dropping an answer changes its request to failed, although the sample succeeded.
_ANSWERED = sa.and_(
    col(Request.dropped_at).is_not(None),
    sa.or_(col(Request.error).startswith(DROPPED), col(Request.error).startswith(EXPIRED)),
)
_COLUMNS = (
    col(Request.id),
    col(Request.owner),
    col(Request.sampler_id),
    sa.case(
        (_ANSWERED, RequestState.DONE), (col(Request.error) == CANCELLED, "cancelled"), else_=col(Request.state)
    ).label("state"),
    sa.case((_ANSWERED, None), else_=col(Request.error)).label("error"),
    col(Request.created_at),
    col(Request.finished_at),
    STORED_SIZE.label("size"),
)
_OF = (col(SamplerRow.base_model), col(SamplerRow.model_path), col(SamplerRow.snapshot_id))
_BYTES = (col(Request.payload), col(Request.result), col(Request.result_type))
_SAMPLES = sa.select(*_COLUMNS, *_OF).join(SamplerRow, col(SamplerRow.id) == col(Request.sampler_id))


@dataclass(frozen=True)
class SampleView:
    """A sample request and its weights: those of model_path, or else of snapshot_id, or else of base_model.

    state: `cancelled` if the client cancelled it, else the request's state; `done` even if the bytes of the answer were
    dropped. size: bytes of the request and its answer. Only `Samples.whole` reads these bytes.
    """

    id: str
    owner: str
    sampler_id: str
    base_model: str
    model_path: str | None
    snapshot_id: str | None
    state: str
    error: str | None
    created_at: datetime
    finished_at: datetime | None
    size: int


@dataclass(frozen=True)
class WholeSample(SampleView):
    """A sample request with its bytes in wire format, which are empty after they were dropped."""

    payload: bytes
    result: bytes | None
    result_type: str


@dataclass(frozen=True)
class AnswersGiven:
    """How many sample requests a checkpoint has answered, and the times of the first and last answers."""

    number: int
    first: datetime | None
    last: datetime | None


def is_unnamed_save(run_id: str) -> sa.ColumnElement[bool]:
    """The filter for samplers of a run's unnamed saves."""
    of_saves = (col(Request.model_id) == run_id, col(Request.kind) == Kind.SAVE_FOR_SAMPLER)
    snapshot = col(SamplerRow.snapshot_id)
    return sa.or_(snapshot.in_(sa.select(col(Request.id)).where(*of_saves)), snapshot == inflight_id(run_id))


def is_named_save(run_id: str) -> sa.ColumnElement[bool]:
    """The filter for samplers of a run's checkpoints."""
    return col(SamplerRow.model_path).startswith(f"tinker://{run_id}/", autoescape=True)


class Samples(Aggregate):
    """Sample requests, newest first."""

    def recent(
        self, owner: str | None, *, run_id: str | None = None, limit: int = 20, texts_first: bool = True
    ) -> list[SampleView]:
        """The newest samples of the newest samplers; with run_id, of samplers of that run's weights.

        texts_first: samples with bytes come before samples whose bytes were dropped. One statement per sampler, and one
        or two more. NotFoundError: unknown or foreign run.
        """
        newest = (col(SamplerRow.created_at).desc(), col(SamplerRow.id))
        with self._read() as connection:
            which = [*owned_by(SamplerRow, owner)]
            if run_id is not None:
                # An unnamed save creates a sampler in the run's own session; a named save may be sampled anywhere.
                session = get_owned(connection, Model, run_id, owner).session_id
                unnamed = sa.and_(col(SamplerRow.session_id) == session, is_unnamed_save(run_id))
                which.append(sa.or_(unnamed, is_named_save(run_id)))
            ids = sa.select(col(SamplerRow.id)).where(*which).order_by(*newest).limit(SAMPLERS)
            found: list[SampleView] = []
            for sampler_id in connection.execute(ids).scalars().all():
                of, seq = col(Request.sampler_id) == sampler_id, col(Request.seq_id)
                last = sa.select(seq).where(of).order_by(seq.desc()).limit(limit).subquery()
                looked_at = sa.union(sa.select(last), sa.select(seq).where(of, seq < FIRST_SHOWN))
                some = connection.execute(_SAMPLES.where(of, seq.in_(looked_at)))
                found += [as_view(SampleView, row) for row in some]
        newest_first = sorted(found, key=lambda one: (one.created_at, one.id), reverse=True)
        return sorted(newest_first, key=lambda one: texts_first and one.size == 0)[:limit]

    def answers_of(self, path: str, owner: str | None) -> AnswersGiven:
        """The requests of this owner that the checkpoint at `path` has answered. One statement."""
        at = col(Request.finished_at)
        samplers = sa.select(col(SamplerRow.id)).where(col(SamplerRow.model_path) == path, *owned_by(SamplerRow, owner))
        answered = sa.select(sa.func.count(), sa.func.min(at), sa.func.max(at)).where(
            col(Request.sampler_id).in_(samplers),  # a join lets SQLite read all requests
            sa.or_(col(Request.state) == RequestState.DONE, _ANSWERED),
            *owned_by(Request, owner),
        )
        with self._read() as connection:
            return AnswersGiven(*connection.execute(answered).one())

    def get(self, request_id: str, owner: str | None) -> SampleView:
        """One sample request. NotFoundError: unknown, foreign, or not a sample."""
        return as_view(SampleView, self._row(_SAMPLES, request_id, owner))

    def whole(self, request_id: str, owner: str | None) -> WholeSample:
        """One sample request with its bytes. Errors as in `get`."""
        return as_view(WholeSample, self._row(_SAMPLES.add_columns(*_BYTES), request_id, owner))

    def _row(self, samples: sa.Select[Any], request_id: str, owner: str | None) -> sa.Row[Any]:
        with self._read() as connection:
            row = connection.execute(
                samples.where(col(Request.id) == request_id, *owned_by(Request, owner))
            ).one_or_none()
        if row is None:
            raise missing(Request, request_id)
        return row
