"""What a model is made of: its last recovery snapshot, and the executed requests since, which are replayed in order.

The order of seq_id is the order of execution, and no two requests ever share a command of the pool: so the rows are
the whole record of how a model came to be, and nothing more is written before a command is sent. A request that was
sent and not answered is still pending; it is executed again, because what it did ended with its worker group. That may
be a save which others have overtaken: a replay passes its place, so no snapshot past it counts before its answer.

Payloads stay exactly as long as a replay may need them: `replays` is set with the answer of a request that changed its
model, and taken back when two snapshots that hold it are committed (the newer one may turn out to be damaged), when the
model is unloaded, or when the session of a model that failed is over (holding.py).

An unnamed save is answered when its weights are published in the worker group, and stored after that. Until then it
`replays` too: that passes its place, where the weights are copied again. No snapshot past it counts before they are
stored, unless no sampler uses them any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.orm import Mapped
from sqlmodel import col

from tinkerflow.backend.journal.kinds import TAKES_WORK, Kind, ModelState, RequestState, SamplerState, SessionState
from tinkerflow.backend.journal.records import SnapshotTaken
from tinkerflow.backend.journal.recovery_tables import RecoverySnapshot, Suspect
from tinkerflow.backend.journal.statements import IS_PENDING, in_chunks, insert_if_absent
from tinkerflow.backend.journal.tables import BaseModelRow, Model, Request, Sampler, Session
from tinkerflow.backend.journal.views import Executed, Pending, SnapshotView, pending_view, snapshot_view

KEPT = 2  # snapshots of a model: the newest one restores it, or if that cannot be read the one before

_IS_MODEL = col(RecoverySnapshot.snapshot_id).is_(None)
_USED = sa.exists().where(col(Sampler.snapshot_id) == col(Request.id), col(Sampler.state) == SamplerState.LIVE)
_UNSTORED = sa.and_(col(Request.replays), col(Request.kind) == Kind.SAVE_FOR_SAMPLER, _USED)
_LET_GO = {
    "replays": False,
    "payload": sa.case((col(Request.dropped_at).is_not(None), b""), else_=col(Request.payload)),
}


def snapshot_taken(connection: sa.Connection, taken: SnapshotTaken, now: datetime) -> bool:
    """Record a committed snapshot, and let go of what it makes superfluous; False when it must not be used.

    That is when a request that is in it is not answered yet (it would be executed twice, or a save that others have
    overtaken would find another state) or an unnamed save in it not stored, or when the model has ended.
    """
    if taken.snapshot_id is not None:
        return _published(connection, taken, now)
    model = connection.execute(
        sa.select(col(Model.next_seq), col(Model.state)).where(col(Model.id) == taken.model_id).with_for_update()
    ).one()
    if model.state not in TAKES_WORK or model.next_seq <= taken.seq_id:
        return False
    up_to = (col(Request.model_id) == taken.model_id, col(Request.seq_id) <= taken.seq_id)
    waiting, unstored = (sa.exists().where(*up_to, where) for where in (IS_PENDING, _UNSTORED))
    if connection.execute(sa.select(sa.or_(waiting, unstored))).scalar():
        return False
    if not insert_if_absent(connection, RecoverySnapshot, {**asdict(taken), "created_at": now}):
        return False
    _let_go(connection, taken.model_id)
    return True


def _published(connection: sa.Connection, taken: SnapshotTaken, now: datetime) -> bool:
    """The same of what a sampler samples, which may outlive the model. `superfluous` finds what nobody uses."""
    # Inflight samplers of a model share one: what it held before goes.
    held = col(RecoverySnapshot.snapshot_id) == taken.snapshot_id
    connection.execute(sa.update(RecoverySnapshot).where(held).values(snapshot_id=RecoverySnapshot.path))
    connection.execute(sa.update(Request).where(col(Request.id) == taken.snapshot_id).values(**_LET_GO))
    return insert_if_absent(connection, RecoverySnapshot, {**asdict(taken), "created_at": now})


def unstored_models(connection: sa.Connection) -> list[str]:
    """Ids of models with answered saves whose weights are in no store, and which samplers use."""
    found = _coming(col(Model.id)).distinct()
    return [str(model_id) for model_id in connection.execute(found).scalars()]


def is_unstored(connection: sa.Connection, snapshot_id: str) -> bool:
    """Whether such a save of such a model has published this snapshot."""
    found = _coming(col(Request.id)).where(col(Request.id) == snapshot_id)
    return connection.execute(found).first() is not None


def _coming(what: Mapped[str]) -> sa.Select[tuple[str]]:
    of_model = sa.select(what).join(Model, col(Model.id) == col(Request.model_id)).select_from(Request)
    return of_model.where(_UNSTORED, col(Model.state).in_(TAKES_WORK))


def unstored(connection: sa.Connection, model_id: str) -> list[Pending]:
    """Those saves of one model, in order."""
    of_model = sa.select(Request).where(col(Request.model_id) == model_id, _UNSTORED).order_by(col(Request.seq_id))
    return [pending_view(row) for row in connection.execute(of_model)]


def _let_go(connection: sa.Connection, model_id: str) -> None:
    """Of the requests that all KEPT snapshots hold."""
    newest = sa.select(col(RecoverySnapshot.seq_id)).where(col(RecoverySnapshot.model_id) == model_id, _IS_MODEL)
    oldest_kept = newest.order_by(col(RecoverySnapshot.seq_id).desc()).offset(KEPT - 1).limit(1).scalar_subquery()
    of_model = (col(Request.model_id) == model_id, col(Request.seq_id) <= oldest_kept)
    connection.execute(sa.update(Request).where(*of_model, col(Request.replays)).values(**_LET_GO))


def forget(connection: sa.Connection, model_id: str) -> None:
    """The model has ended: nothing of it is replayed any more."""
    connection.execute(
        sa.update(Request).where(col(Request.model_id) == model_id, col(Request.replays)).values(**_LET_GO)
    )


def snapshots(connection: sa.Connection, model_id: str | None) -> list[SnapshotView]:
    """Snapshots of one model or of all, newest first."""
    where = [_IS_MODEL] if model_id is None else [_IS_MODEL, col(RecoverySnapshot.model_id) == model_id]
    newest = (col(RecoverySnapshot.model_id), col(RecoverySnapshot.seq_id).desc())
    rows = connection.execute(sa.select(RecoverySnapshot).where(*where).order_by(*newest))
    return [snapshot_view(row) for row in rows]


def sampler_snapshot(connection: sa.Connection, snapshot_id: str) -> SnapshotView | None:
    """What the store holds of one sampling snapshot, None when that is nothing (yet: see `is_unstored`)."""
    of_sampler = sa.select(RecoverySnapshot).where(col(RecoverySnapshot.snapshot_id) == snapshot_id)
    row = connection.execute(of_sampler).one_or_none()
    return None if row is None else snapshot_view(row)


def executed(connection: sa.Connection, model_id: str, after: int, limit: int) -> list[Executed]:
    """Requests to replay with a seq_id above `after`, in order, at most `limit`, and saves that these overtook."""
    next_seq = sa.select(col(Model.next_seq)).where(col(Model.id) == model_id).scalar_subquery()
    overtaken = sa.and_(IS_PENDING, col(Request.seq_id) < next_seq)
    of_model = (col(Request.model_id) == model_id, col(Request.seq_id) > after, col(Request.replays) | overtaken)
    rows = connection.execute(sa.select(Request).where(*of_model).order_by(col(Request.seq_id)).limit(limit))
    return [
        Executed(pending_view(row), None if row.dropped_at else row.state == RequestState.DONE, row.finished_at)
        for row in rows
    ]


def count_executed(connection: sa.Connection, model_id: str, after: int) -> int:
    """How many there are."""
    of_model = (col(Request.model_id) == model_id, col(Request.seq_id) > after, col(Request.replays))
    return connection.execute(sa.select(sa.func.count()).select_from(Request).where(*of_model)).scalar_one()


def superfluous(connection: sa.Connection, limit: int) -> list[str]:
    """Paths of snapshots that nothing needs: all but the newest KEPT of a model, those of models that ended for good,
    and those of sampling snapshots that no live sampler uses.
    """
    age = sa.func.row_number().over(
        partition_by=(col(RecoverySnapshot.model_id), _IS_MODEL), order_by=col(RecoverySnapshot.seq_id).desc()
    )
    ranked = sa.select(RecoverySnapshot, age.label("age")).subquery()
    # One that failed can be revived (holding.py) while its session goes on.
    in_use = sa.exists().where(col(Session.id) == col(Model.session_id), col(Session.state) == SessionState.ACTIVE)
    may_live = sa.or_(
        col(Model.state).in_(TAKES_WORK), sa.and_(col(Model.state) != ModelState.UNLOADED, in_use.correlate(Model))
    )
    live_model = sa.exists().where(col(Model.id) == ranked.c.model_id, may_live)
    used = sa.exists().where(col(Sampler.snapshot_id) == ranked.c.snapshot_id, col(Sampler.state) == SamplerState.LIVE)
    of_model = ranked.c.snapshot_id.is_(None)
    needless = sa.or_(
        sa.and_(of_model, sa.or_(ranked.c.age > KEPT, sa.not_(live_model))), sa.and_(sa.not_(of_model), sa.not_(used))
    )
    return list(connection.execute(sa.select(ranked.c.path).where(needless).limit(limit)).scalars())


def strays(connection: sa.Connection, found: Mapping[str, str]) -> dict[str, str]:
    """Of snapshots in the store (the path of each, and its model): which nobody needs or sweeps away, and why.

    Those that have a row are looked after by `superfluous`, and one of a live model may be about to get its row.
    """
    known, states = set[str](), dict[str, str]()
    for paths in in_chunks(found):
        rows = sa.select(col(RecoverySnapshot.path)).where(col(RecoverySnapshot.path).in_(paths))
        known |= set(connection.execute(rows).scalars())
    for models in in_chunks(set(found.values())):
        for row in connection.execute(sa.select(col(Model.id), col(Model.state)).where(col(Model.id).in_(models))):
            states[row.id] = row.state
    return {
        path: f"model {model_id}, which is {states[model_id]}" if model_id in states else f"unknown model {model_id}"
        for path, model_id in found.items()
        if path not in known and states.get(model_id) not in TAKES_WORK
    }


def forget_snapshot(connection: sa.Connection, path: str) -> None:
    """The store does not hold it any more."""
    connection.execute(sa.delete(RecoverySnapshot).where(col(RecoverySnapshot.path) == path))


# ------------------------------------------------------------------ what people and clients are told
def note_progress(connection: sa.Connection, model_id: str, text: str | None) -> None:
    """What the model's requests wait for; None: they do not."""
    connection.execute(sa.update(Model).where(col(Model.id) == model_id).values(progress=text))


def note_group(connection: sa.Connection, base_model: str, text: str | None) -> None:
    """What all requests for a base model wait for; None: they do not."""
    connection.execute(sa.update(BaseModelRow).where(col(BaseModelRow.name) == base_model).values(progress=text))


def waits_for(connection: sa.Connection, request_id: str) -> str | None:
    """Why a pending request is not executed at present, when that has a reason. One statement."""
    base = sa.func.coalesce(col(Model.base_model), col(Sampler.base_model))
    row = connection.execute(
        sa.select(sa.func.coalesce(col(Model.held), col(Model.progress), col(BaseModelRow.progress)))
        .select_from(Request)
        .outerjoin(Model, col(Model.id) == col(Request.model_id))
        .outerjoin(Sampler, col(Sampler.id) == col(Request.sampler_id))
        .outerjoin(BaseModelRow, col(BaseModelRow.name) == base)
        .where(col(Request.id) == request_id)
    )
    found: str | None = row.scalar()
    return found


# ------------------------------------------------------------------ who was there when a group ended
def suspect(connection: sa.Connection, request_ids: Sequence[str], crashed: bool) -> dict[str, tuple[int, int]]:
    """Note that a group ended while it executed these; of each: how many did so, and how many of those crashed."""
    found: dict[str, tuple[int, int]] = {}
    for request_id in request_ids:
        insert_if_absent(connection, Suspect, {"request_id": request_id, "deaths": 0, "crashes": 0})
        row = connection.execute(
            sa.update(Suspect)
            .where(col(Suspect.request_id) == request_id)
            .values(deaths=Suspect.deaths + 1, crashes=Suspect.crashes + int(crashed))
            .returning(col(Suspect.deaths), col(Suspect.crashes))
        ).one()
        found[request_id] = (row.deaths, row.crashes)
    return found
