"""Recovery: a model is restored from its last recovery snapshot by replaying the requests executed since, in order.

Requests execute in the order of seq_id, and each command of the pool belongs to one request. The rows therefore record
the complete history of a model, and sending a command requires no further record. A request that was sent but not
answered is still pending. It is executed again, because its effects were lost with its worker group. A pending request
can be a save that later requests have overtaken. A replay must reach that save, so no later snapshot counts before the
save is answered.

Payloads are kept exactly as long as a replay may need them. `replays` is set with the answer of a request that changed
its model. It is cleared when two committed snapshots contain the request, because the newer snapshot may be damaged. It
is also cleared when the model is unloaded, or when the session of a failed model ends.

An unnamed save is answered when its weights are published in the worker group, and stored afterwards. Until it is
stored, the save also has `replays` set: the replay copies the weights again at the save's seq_id. No later snapshot
counts before the weights are stored, unless no sampler uses them any longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapped
from sqlmodel import col

from tinkerflow.backend.journal.database import Aggregate, in_chunks, insert_if_absent
from tinkerflow.backend.journal.effects import LET_GO, forget
from tinkerflow.backend.journal.requests import Pending
from tinkerflow.backend.journal.tables import (
    IS_PENDING,
    TAKES_WORK,
    BaseModelRow,
    Checkpoint,
    Model,
    ModelState,
    Process,
    RecoverySnapshot,
    Request,
    RequestState,
    SamplerRow,
    SamplerState,
    ServiceSecret,
    Session,
    SessionState,
    Suspect,
)
from tinkerflow.backend.spec.history import Kind

_STORE = "store-id of "  # begins the names of rows with the marks of stores
SNAPSHOTS_KEPT = 2  # per model: the newest restores it, or the previous one if the newest cannot be read

IS_MODEL_SNAPSHOT = col(RecoverySnapshot.snapshot_id).is_(None)
_USED = sa.exists().where(col(SamplerRow.snapshot_id) == col(Request.id), col(SamplerRow.state) == SamplerState.LIVE)
IS_UNSTORED = sa.and_(col(Request.replays), col(Request.kind) == Kind.SAVE_FOR_SAMPLER, _USED)


@dataclass(frozen=True)
class Executed:
    """A request to replay.

    succeeded: whether the first execution succeeded; None if its result was dropped.
    answered_at: None for a save that later requests have overtaken and that has no answer yet.
    If a replayed save is already answered, its weights are not stored yet.
    """

    request: Pending
    succeeded: bool | None
    answered_at: datetime | None


@dataclass(frozen=True)
class SnapshotTaken:
    """A recovery snapshot was committed to the store under `path`. It contains the model's requests up to seq_id.

    snapshot_id: set if it contains only the weights of this published sampling snapshot.
    """

    path: str
    model_id: str
    seq_id: int
    step: int
    size_bytes: int
    snapshot_id: str | None = None

    def apply(self, connection: sa.Connection, now: datetime) -> Sequence[str]:
        snapshot_taken(connection, self, now)
        return ()


@dataclass(frozen=True, kw_only=True)
class SnapshotView(SnapshotTaken):
    """A committed recovery snapshot."""

    created_at: datetime


@dataclass(frozen=True)
class ServiceHealth:
    """The state of the service, for `tinkerflow doctor`.

    beats: the last heartbeat of each part (`engine`, `api`), except parts that were shut down cleanly.
    waits: why the requests of a base model or a model are not being executed at present.
    suspects: the number of pending requests that a worker group was executing when it ended.
    """

    beats: Mapping[str, datetime]
    waits: Mapping[str, str]
    suspects: int


class Recovery(Aggregate):
    """Snapshots, the requests to replay after them, suspects, and the health of the service."""

    def snapshot_taken(self, taken: SnapshotTaken) -> bool:
        """Record a snapshot whose commit is in the store. Returns False if it must not be used and should be deleted.

        FencedError if another engine has taken the lease.
        """
        with self._write(fenced=True) as connection:
            return snapshot_taken(connection, taken, self._now())

    def snapshots(self, model_id: str | None = None) -> list[SnapshotView]:
        """Snapshots of a model, or of all models, newest first."""
        where: list[sa.ColumnElement[bool]] = [IS_MODEL_SNAPSHOT]
        if model_id is not None:
            where.append(col(RecoverySnapshot.model_id) == model_id)
        newest = (col(RecoverySnapshot.model_id), col(RecoverySnapshot.seq_id).desc())
        return self._views(SnapshotView, sa.select(RecoverySnapshot).where(*where).order_by(*newest))

    def restorable(self, model_id: str) -> list[SnapshotView]:
        """The model's snapshots whose later requests can all still be replayed, newest first."""
        return self.snapshots(model_id)[:SNAPSHOTS_KEPT]

    def sampler_snapshot(self, snapshot_id: str) -> SnapshotView | None:
        """The stored weights of a sampling snapshot; None if they are not stored (see `is_unstored`)."""
        of_sampler = sa.select(RecoverySnapshot).where(col(RecoverySnapshot.snapshot_id) == snapshot_id)
        return next(iter(self._views(SnapshotView, of_sampler)), None)

    def unstored_models(self) -> list[str]:
        """Ids of models that accept work and have saves in `unstored`. One statement."""
        return self._column(of_unstored(col(Model.id)).distinct())

    def is_unstored(self, snapshot_id: str) -> bool:
        """Whether a save in `unstored`, of a model that accepts work, has published this snapshot."""
        return bool(self._column(of_unstored(col(Request.id)).where(col(Request.id) == snapshot_id)))

    def unstored(self, model_id: str) -> list[Pending]:
        """The model's unnamed saves that are answered, in use by samplers and not yet stored, in order."""
        of_model = sa.select(Request).where(col(Request.model_id) == model_id, IS_UNSTORED)
        with self._read() as connection:
            return [Pending.of(row) for row in connection.execute(of_model.order_by(col(Request.seq_id)))]

    def executed(self, model_id: str, after: int, limit: int) -> list[Executed]:
        """At most `limit` requests to replay after seq_id `after`, in order, including overtaken saves."""
        next_seq = sa.select(col(Model.next_seq)).where(col(Model.id) == model_id).scalar_subquery()
        overtaken = sa.and_(IS_PENDING, col(Request.seq_id) < next_seq)
        of_model = (col(Request.model_id) == model_id, col(Request.seq_id) > after, col(Request.replays) | overtaken)
        with self._read() as connection:
            rows = connection.execute(sa.select(Request).where(*of_model).order_by(col(Request.seq_id)).limit(limit))
            return [
                Executed(Pending.of(row), None if row.dropped_at else row.state == RequestState.DONE, row.finished_at)
                for row in rows
            ]

    def count_executed(self, model_id: str, after: int) -> int:
        """The number of requests to replay after seq_id `after`."""
        of_model = (col(Request.model_id) == model_id, col(Request.seq_id) > after, col(Request.replays))
        return self._column(sa.select(sa.func.count()).select_from(Request).where(*of_model))[0]

    def superfluous(self, limit: int = 100) -> list[str]:
        """Paths of at most `limit` snapshots that are no longer needed, the newest first (see upkeep.py).

        Not needed are all but the newest SNAPSHOTS_KEPT of each model, the snapshots of models that ended permanently,
        and sampling snapshots that no live sampler uses.
        """
        age = sa.func.row_number().over(
            partition_by=(col(RecoverySnapshot.model_id), IS_MODEL_SNAPSHOT),
            order_by=col(RecoverySnapshot.seq_id).desc(),
        )
        ranked = sa.select(RecoverySnapshot, age.label("age")).subquery()
        # A failed model can be revived (training_runs.py) while its session is active.
        in_use = sa.exists().where(col(Session.id) == col(Model.session_id), col(Session.state) == SessionState.ACTIVE)
        may_live = sa.or_(
            col(Model.state).in_(TAKES_WORK), sa.and_(col(Model.state) != ModelState.UNLOADED, in_use.correlate(Model))
        )
        live_model = sa.exists().where(col(Model.id) == ranked.c.model_id, may_live)
        # Read once. With EXISTS, SQLite reads all live samplers again for each snapshot.
        sampled = (col(SamplerRow.snapshot_id).is_not(None), col(SamplerRow.state) == SamplerState.LIVE)
        used = ranked.c.snapshot_id.in_(sa.select(col(SamplerRow.snapshot_id)).where(*sampled))
        of_model = ranked.c.snapshot_id.is_(None)
        needless = sa.or_(
            sa.and_(of_model, sa.or_(ranked.c.age > SNAPSHOTS_KEPT, sa.not_(live_model))),
            sa.and_(sa.not_(of_model), sa.not_(used)),
        )
        newest = (ranked.c.created_at.desc(), ranked.c.path)
        return self._column(sa.select(ranked.c.path).where(needless).order_by(*newest).limit(limit))

    def strays(self, found: Mapping[str, str], mark: str | None) -> dict[str, str]:
        """The unneeded snapshots among `found` in the store (model id by path) that no sweep deletes, with reasons.

        `superfluous` covers snapshots that have a row. A snapshot of a live model may soon get its row. An unknown
        model may live in another database, unless an engine has noted this store's `mark` here.
        """
        known, states = set[str](), dict[str, str]()
        noted = sa.exists().where(
            col(ServiceSecret.name).startswith(_STORE), col(ServiceSecret.value) == (mark or "").encode()
        )
        with self._read() as connection:
            is_ours = connection.execute(sa.select(noted)).scalar()
            for paths in in_chunks(found):
                rows = sa.select(col(RecoverySnapshot.path)).where(col(RecoverySnapshot.path).in_(paths))
                known |= set(connection.execute(rows).scalars())
            for models in in_chunks(set(found.values())):
                of_models = sa.select(col(Model.id), col(Model.state)).where(col(Model.id).in_(models))
                states |= {row.id: row.state for row in connection.execute(of_models)}
        return {
            path: f"model {model_id}, which is {states[model_id]}"
            if model_id in states
            else f"unknown model {model_id}"
            for path, model_id in found.items()
            if path not in known and states.get(model_id) not in TAKES_WORK and (is_ours or model_id in states)
        }

    def forget_snapshot(self, path: str) -> None:
        """Delete the row of a snapshot that was deleted from the store."""
        with self._write() as connection:
            connection.execute(sa.delete(RecoverySnapshot).where(col(RecoverySnapshot.path) == path))

    def suspects(self, request_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
        """The deaths and crashes that `suspect` recorded for each request; (0, 0) for others."""
        of_ids = sa.select(Suspect).where(col(Suspect.request_id).in_(request_ids))
        with self._read() as connection:
            known = {row.request_id: (row.deaths, row.crashes) for row in connection.execute(of_ids)}
        return {request_id: known.get(request_id, (0, 0)) for request_id in request_ids}

    def suspect(self, counts: Mapping[str, tuple[int, int]]) -> None:
        """Record how many worker groups ended, and how many of them crashed, while they executed each request.

        counts: totals instead of increments, so that a repeated call counts nothing twice.
        """
        with self._write() as connection:
            for request_id, (deaths, crashes) in counts.items():
                row = {"request_id": request_id, "deaths": deaths, "crashes": crashes}
                if not insert_if_absent(connection, Suspect, row):
                    connection.execute(sa.update(Suspect).where(col(Suspect.request_id) == request_id).values(**row))

    def note_store(self, url: str, mark: str) -> None:
        """Record the mark (`Store.mark`) of the store at `url`, which has the states that the rows name."""
        values = {"value": mark.encode(), "created_at": self._now()}
        with self._write() as connection:
            if not insert_if_absent(connection, ServiceSecret, {"name": _STORE + url, **values}):
                changed = sa.update(ServiceSecret).where(col(ServiceSecret.name) == _STORE + url)
                connection.execute(changed.values(**values))

    def store_mark(self, url: str) -> str | None:
        """The mark recorded for the store at `url`; None if there is none, or if no row names a state in a store."""
        noted = sa.select(col(ServiceSecret.value)).where(
            col(ServiceSecret.name) == _STORE + url,
            sa.or_(
                sa.select(col(RecoverySnapshot.path)).exists(),
                sa.select(col(Checkpoint.path)).where(col(Checkpoint.deleted_at).is_(None)).exists(),
            ),
        )
        return next((mark.decode() for mark in self._column(noted)), None)

    def health(self) -> ServiceHealth:
        """The state of the service, for people. Three statements."""
        engine_gone = sa.and_(col(Process.name) == "engine", col(Process.holder) == "")
        of_bases = sa.select(col(BaseModelRow.name), col(BaseModelRow.progress))
        of_models = sa.select(col(Model.id), col(Model.progress))
        waiting = sa.union_all(
            of_bases.where(col(BaseModelRow.progress).is_not(None)), of_models.where(col(Model.progress).is_not(None))
        )
        pending_suspects = (
            sa.select(sa.func.count())
            .select_from(Suspect)
            .join(Request, col(Request.id) == col(Suspect.request_id))
            .where(col(Request.state) == RequestState.PENDING)
        )
        with self._read() as connection:
            beats = connection.execute(sa.select(col(Process.name), col(Process.beat_at)).where(sa.not_(engine_gone)))
            return ServiceHealth(
                {row.name: row.beat_at for row in beats},
                {name: str(text) for name, text in connection.execute(waiting)},
                int(connection.execute(pending_suspects).scalar_one()),
            )


def of_unstored(*what: Mapped[Any]) -> sa.Select[Any]:
    """Columns of the saves in `Recovery.unstored`, joined with their models, for all models that accept work."""
    of_model = sa.select(*what).join(Model, col(Model.id) == col(Request.model_id)).select_from(Request)
    return of_model.where(IS_UNSTORED, col(Model.state).in_(TAKES_WORK))


# ------------------------------------------------------------------ taking snapshots
def snapshot_taken(connection: sa.Connection, taken: SnapshotTaken, now: datetime) -> bool:
    """Record a committed snapshot and release payloads that it makes superfluous. False if it must not be used.

    It must not be used if the model has ended, if an unnamed save in it is not stored, or if a request in it has no
    answer yet. Such a request would be executed twice, and an overtaken save would copy a later state. Repeating the
    call, because its first result was lost, changes nothing.
    """
    of_path = sa.select(col(RecoverySnapshot.path)).where(col(RecoverySnapshot.path) == taken.path)
    if connection.execute(of_path).first() is not None:
        return True
    if taken.snapshot_id is not None:
        return _published(connection, taken, now)
    model = connection.execute(
        sa.select(col(Model.next_seq), col(Model.state)).where(col(Model.id) == taken.model_id).with_for_update()
    ).one()
    if model.state not in TAKES_WORK or model.next_seq <= taken.seq_id:
        return False
    up_to = (col(Request.model_id) == taken.model_id, col(Request.seq_id) <= taken.seq_id)
    waiting, unstored = (sa.exists().where(*up_to, where) for where in (IS_PENDING, IS_UNSTORED))
    if connection.execute(sa.select(sa.or_(waiting, unstored))).scalar():
        return False
    if not insert_if_absent(connection, RecoverySnapshot, {**asdict(taken), "created_at": now}):
        return False
    # Requests that all kept snapshots contain are no longer replayed.
    newest = sa.select(col(RecoverySnapshot.seq_id)).where(
        col(RecoverySnapshot.model_id) == taken.model_id, IS_MODEL_SNAPSHOT
    )
    last_kept = newest.order_by(col(RecoverySnapshot.seq_id).desc()).offset(SNAPSHOTS_KEPT - 1).limit(1)
    forget(connection, taken.model_id, col(Request.seq_id) <= last_kept.scalar_subquery())
    return True


def _published(connection: sa.Connection, taken: SnapshotTaken, now: datetime) -> bool:
    """Record the snapshot of a sampler. It may outlive the model; `superfluous` finds unused snapshots."""
    # Inflight samplers of a model share one snapshot id: the previous snapshot becomes superfluous.
    held = col(RecoverySnapshot.snapshot_id) == taken.snapshot_id
    connection.execute(sa.update(RecoverySnapshot).where(held).values(snapshot_id=RecoverySnapshot.path))
    connection.execute(sa.update(Request).where(col(Request.id) == taken.snapshot_id).values(**LET_GO))
    return insert_if_absent(connection, RecoverySnapshot, {**asdict(taken), "created_at": now})
