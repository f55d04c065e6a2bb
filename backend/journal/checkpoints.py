"""Saved checkpoints: reading, listing, publishing, expiry, deletion, and sharing by tokens.

Deletion first marks the row: from then on the checkpoint cannot be read. The engine's sweep removes the files
afterwards, even after a crash in between (upkeep.py). imports.py inserts checkpoints that no save created.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.clock import add_seconds
from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.core.ids import CheckpointKind, about_id, base_model_name, new_id
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.database import (
    Aggregate,
    as_view,
    columns,
    fetch_page,
    get_owned,
    in_id_order,
    insert_if_absent,
    missing,
    owned_by,
)
from tinkerflow.backend.journal.history import has_history
from tinkerflow.backend.journal.quotas import Limits, kept_failure, storage_failure
from tinkerflow.backend.journal.tables import UNMADE, Checkpoint, Model, Session, TrainingStep, WeightsShare
from tinkerflow.backend.spec.checkpoint import CheckpointPath, Saved
from tinkerflow.backend.spec.commands import LoraSpec, Optimizer

SHARE_PREFIX = "tfw-"
T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint was committed to the store under `path` (tinker://...). Another save to the path replaces its row.

    run_id: the saved model. size_bytes: the sum over its files. expires_at: timezone-aware; None: never. attempt: the
    store's name for these bytes, "" if unknown; another save to the path changes it. created_at: the time of the
    commit; None: now.
    """

    path: str
    run_id: str
    kind: CheckpointKind
    name: str
    owner: str
    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    step: int
    size_bytes: int
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    expires_at: datetime | None = None
    optimizer: Optimizer = "adamw"
    attempt: str = ""
    created_at: datetime | None = None
    expert_rank: int | None = None

    @classmethod
    def of(cls, saved: Saved) -> CheckpointSaved:
        """The row for a commit of the store."""
        return CheckpointSaved(
            path=saved.path,
            run_id=saved.run_id,
            kind=CheckpointKind(saved.kind),
            name=saved.name,
            owner=saved.meta.owner,
            base_model=base_model_name(saved.meta.base_model),
            **asdict(saved.spec),
            step=saved.step,
            size_bytes=saved.size_bytes,
            user_metadata=saved.meta.user_metadata,
            expires_at=saved.meta.expires_at,
            optimizer=saved.optimizer,
            attempt=saved.attempt,
            created_at=saved.created_at,
        )

    def apply(self, connection: sa.Connection, now: datetime) -> Sequence[str]:
        """Write the row and an entry in the audit log.

        The row belongs to the run's project, even if the first key was created during the save and took over the run.
        The row of an earlier save may be dated in the future, because the clock was set back. The new row then gets a
        later date, so that retention does not mistake it for an old row.
        """
        of_kind = (col(Checkpoint.run_id) == self.run_id, col(Checkpoint.kind) == self.kind)
        last = connection.execute(sa.select(sa.func.max(col(Checkpoint.created_at))).where(*of_kind)).scalar()
        owner, saved_by = _owner_and_key(connection, self)
        row = replace(self, owner=owner)
        if last and last > now:
            row = replace(row, created_at=last + timedelta(microseconds=1))
        put_checkpoint(connection, row, now)
        details = {"kind": self.kind, "step": self.step, "size_bytes": self.size_bytes}
        event = audit.AuditedEvent.CHECKPOINT_SAVED
        audit.write_checkpoint_event(connection, now, event, row, actor=saved_by, details=details)
        return ()


@dataclass(frozen=True, kw_only=True)
class CheckpointView(CheckpointSaved):
    """A saved checkpoint that has not been deleted."""

    created_at: datetime
    public: bool

    @property
    def only_in_history(self) -> bool:
        """Whether the state is not yet in the store: the run's history can produce it."""
        return not self.attempt and CheckpointPath.parse(self.path).step is not None

    @property
    def unsampled(self) -> str | None:
        """The reason why the checkpoint cannot be sampled; None if it can."""
        external = self.kind is CheckpointKind.EXTERNAL_WEIGHTS
        return "external weights are for downloads, not for sampling" if external else None


@dataclass(frozen=True)
class ShareView:
    """A share of one checkpoint, without its token. It ends when it expires, is revoked, or the path is saved again."""

    id: str
    path: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True)
class Page(Generic[T]):
    """A page of a list, and the total length of the list. cut: the page is shorter because its texts are long."""

    rows: tuple[T, ...]
    total: int
    cut: bool = False

    def step(self, limit: int) -> int:
        """The offset from this page to the next. limit: the requested number of rows."""
        return len(self.rows) if self.cut else limit


@dataclass(frozen=True)
class BeforeSave:
    """Facts in the journal that a save needs before it writes a checkpoint.

    run_metadata: the training run's metadata. is_gone: an earlier checkpoint at this path was deleted or has expired,
    so the name may be used again.
    """

    run_metadata: Mapping[str, str]
    is_gone: bool


class SavedCheckpoints(Aggregate):
    """Saved checkpoints. NotFoundError in all methods: the checkpoint is deleted, expired or foreign."""

    def get(self, path: str, owner: str | None, *, access: str | None = None) -> CheckpointView:
        """The checkpoint at `path` if it is the owner's, public, or shared with the token that hashes to `access`.

        Each step of an owner's run with a history is also a checkpoint (`only_in_history`). If the run has repeated the
        step since its state was saved, the saved state no longer counts.
        """
        now = self._now()
        step = CheckpointPath.parse(path).step if path.startswith("tinker://") else None
        with self._read() as connection:
            try:
                found = _readable(connection, path, owner, access, now)
            except NotFoundError:
                if step is None:
                    raise
            else:
                if step is None or found.owner != owner or not _made_after(connection, found, step):
                    return found
            return _of_step(connection, path, step, owner, now)

    def get_for_download(self, path: str, owner: str | None, purpose: str, key_id: str = "") -> CheckpointView:
        """The checkpoint at `path`, as in `get`. Records the download in the audit log of the checkpoint's owner.

        key_id: the downloading key.
        """
        now = self._now()
        with self._write() as connection:
            found = _readable(connection, path, owner, None, now)
            event, actor = audit.AuditedEvent.CHECKPOINT_READ, audit.actor_of_key(key_id)
            audit.write_checkpoint_event(connection, now, event, found, actor=actor, purpose=purpose)
        return found

    def record_fork(self, saved: CheckpointSaved) -> None:
        """Record a checkpoint made from a history. FencedError if another engine has taken the lease.

        NotFoundError: its run was deleted. The caller must then delete the checkpoint from the store.
        """
        with self._write(fenced=True) as connection:
            get_owned(connection, Model, saved.run_id, None, lock="share")
            saved.apply(connection, self._now())

    def page(
        self, owner: str | None, *, run_id: str | None = None, limit: int = 100, offset: int = 0
    ) -> Page[CheckpointView]:
        """Checkpoints, newest first; of one run if run_id is given. At most three statements.

        If their metadata is long, a page contains fewer than `limit`.
        NotFoundError: unknown or foreign run.
        """
        where = [exists(self._now()), *owned_by(Checkpoint, owner)]
        newest = (col(Checkpoint.created_at).desc(), col(Checkpoint.path))
        with self._read() as connection:
            if run_id is not None:
                get_owned(connection, Model, run_id, owner)
                where.append(col(Checkpoint.run_id) == run_id)
            total = connection.execute(sa.select(sa.func.count()).select_from(Checkpoint).where(*where)).scalar_one()
            selected = sa.select(Checkpoint).where(*where).order_by(*newest)
            rows, cut = fetch_page(connection, selected.limit(limit).offset(offset))
            return Page(tuple(as_view(CheckpointView, row) for row in rows), total, cut)

    def owners(self) -> dict[str, str]:
        """The owner of every checkpoint by its path. One statement."""
        rows = sa.select(col(Checkpoint.path), col(Checkpoint.owner)).where(exists(self._now()))
        with self._read() as connection:
            return {row.path: row.owner for row in connection.execute(rows)}

    def before_save(self, path: str, run_id: str) -> BeforeSave:
        """Facts for a save of the run `run_id` under `path`. NotFoundError: unknown run.

        FencedError if another engine has taken the lease, because it may have saved later states under the path.
        """
        there = sa.select(exists(self._now())).where(col(Checkpoint.path) == path).scalar_subquery()
        with self._write(fenced=True, lasting=False) as connection:  # this only reads
            of_run = sa.select(col(Model.user_metadata), there).where(col(Model.id) == run_id)
            row = connection.execute(of_run).one_or_none()
        if row is None:
            raise missing(Model, run_id)
        return BeforeSave(row[0], is_gone=row[1] is not None and not row[1])

    def check_storage(self, owner: str, limits: Limits) -> None:
        """UserError if the project's quotas allow no further checkpoint with its own session and run."""
        with self._read() as connection:
            failure = storage_failure(connection, owner, limits)
            failure = failure or kept_failure(connection, owner, limits, "sessions", "training_runs")
        if failure is not None:
            raise UserError(failure[0])

    def delete(self, path: str, owner: str | None, key_id: str = "") -> CheckpointView:
        """Mark an owner's checkpoint as deleted, and return it. `upkeep.unpurged` lists it until its files are gone.

        key_id: the deleting key, for the audit log.
        """
        return self._change(path, owner, key_id, audit.AuditedEvent.CHECKPOINT_DELETED, {"deleted_at": self._now()})

    def publish(self, path: str, owner: str | None, public: bool = True, key_id: str = "") -> CheckpointView:
        """Let all keys read a checkpoint, or (public false) only its owner's keys. Repeating changes nothing.

        key_id: the key of the request, for the audit log.
        """
        event = audit.AuditedEvent.CHECKPOINT_PUBLISHED if public else audit.AuditedEvent.CHECKPOINT_UNPUBLISHED
        return self._change(path, owner, key_id, event, {"public": public, "noted": False})

    def set_ttl(self, path: str, owner: str | None, seconds: float | None, key_id: str = "") -> CheckpointView:
        """Let a checkpoint expire in `seconds`; None: never. key_id: the key of the request, for the audit log."""
        expires_at = None if seconds is None else add_seconds(self._now(), seconds)
        details = {"expires_at": None if expires_at is None else expires_at.isoformat()}
        values = {"expires_at": expires_at, "noted": False}
        return self._change(path, owner, key_id, audit.AuditedEvent.CHECKPOINT_TTL_SET, values, details)

    def _change(
        self,
        path: str,
        owner: str | None,
        key_id: str,
        event: audit.AuditedEvent,
        values: Mapping[str, object],
        details: Mapping[str, object] | None = None,
    ) -> CheckpointView:
        now = self._now()
        which = (col(Checkpoint.path) == path, exists(now), *owned_by(Checkpoint, owner))
        with self._write() as connection:
            changed = sa.update(Checkpoint).where(*which).values(**values).returning(*columns(Checkpoint))
            row = connection.execute(changed).one_or_none()
            if row is None:
                raise _missing(path)
            actor, details = audit.actor_of_key(key_id), {**(details or {}), "key_id": key_id}
            audit.write_checkpoint_event(connection, now, event, row, actor=actor, details=details)
        return as_view(CheckpointView, row)


def put_checkpoint(connection: sa.Connection, saved: CheckpointSaved, now: datetime, *, public: bool = False) -> None:
    """Write the row of a committed checkpoint. It replaces the path's earlier row, including its settings."""
    values = {
        **asdict(saved),
        "user_metadata": dict(saved.user_metadata),
        "created_at": saved.created_at or now,
        "public": public,
        "deleted_at": None,
        "purged_at": None,
        "noted": True,
    }
    if not insert_if_absent(connection, Checkpoint, values):
        connection.execute(sa.update(Checkpoint).where(col(Checkpoint.path) == saved.path).values(**values))


def mark_deleted(
    connection: sa.Connection,
    which: Sequence[sa.ColumnElement[bool]],
    now: datetime,
    event: audit.AuditedEvent,
    *,
    actor: str,
    details: Mapping[str, object] | None = None,
) -> Sequence[sa.Row[Any]]:
    """Mark `which` checkpoints as deleted, in the caller's transaction. Returns their rows. Locks in order of paths.

    Writes an event for each checkpoint; actor and details as in `audit.write_event`.
    """
    chosen = sa.update(Checkpoint).where(in_id_order(Checkpoint, *which))
    rows = connection.execute(chosen.values(deleted_at=now).returning(*columns(Checkpoint))).all()
    for row in rows:
        audit.write_checkpoint_event(connection, now, event, row, actor=actor, details=details)
    return rows


def exists(now: datetime) -> sa.ColumnElement[bool]:
    """The filter for checkpoints that are neither deleted nor expired. Clients see only these."""
    due = col(Checkpoint.expires_at)
    return sa.and_(col(Checkpoint.deleted_at).is_(None), sa.or_(due.is_(None), due > now))


def _readable(
    connection: sa.Connection, path: str, owner: str | None, access: str | None, now: datetime
) -> CheckpointView:
    """The checkpoint at `path` if the owner, or a holder of the token that hashes to `access`, may read it."""
    readable = [sa.and_(sa.true(), *owned_by(Checkpoint, owner)), col(Checkpoint.public).is_(True)]
    if access is not None:
        readable.append(sa.exists().where(col(WeightsShare.token_hash) == access, is_shared(now)))
    where = (col(Checkpoint.path) == path, exists(now), sa.or_(*readable))
    row = connection.execute(sa.select(Checkpoint).where(*where)).one_or_none()
    if row is None:
        raise _missing(path)
    return as_view(CheckpointView, row)


def _of_step(connection: sa.Connection, path: str, step: int, owner: str | None, now: datetime) -> CheckpointView:
    """The state of a run after an optimizer step, which its history can produce. NotFoundError if it cannot."""
    run = get_owned(connection, Model, CheckpointPath.parse(path).run_id, owner)
    if not has_history(connection, run):
        raise NotFoundError(f"checkpoint {path!r} does not exist: no history of its run was kept")
    # If the run has made the next step but not this one, it began with the state after this step, or loaded that state.
    made = sa.exists().where(
        col(TrainingStep.model_id) == run.id,
        col(TrainingStep.step).in_((step, step + 1)),
        col(TrainingStep.seq_id) != UNMADE,
    )
    if step and not connection.execute(sa.select(made)).scalar():
        raise NotFoundError(f"checkpoint {path!r} does not exist: its run is at step {run.step}")
    spec = {field.name: getattr(run, field.name) for field in fields(LoraSpec)}
    return CheckpointView(
        path=path,
        run_id=run.id,
        kind=CheckpointKind.WEIGHTS,
        name=f"@{step}",
        owner=run.owner,
        base_model=run.base_model,
        **spec,
        step=step,
        size_bytes=0,
        optimizer=run.optimizer,
        created_at=now,
        public=False,
    )


def _made_after(connection: sa.Connection, saved: CheckpointView, step: int) -> bool:
    """Whether the run made the step, or loaded its state and made the next step, after the state was saved."""
    of_run = (col(TrainingStep.model_id) == saved.run_id, col(TrainingStep.seq_id) != UNMADE)
    for made in (step, step + 1):
        last = sa.select(sa.func.max(col(TrainingStep.at))).where(*of_run, col(TrainingStep.step) == made)
        if (at := connection.execute(last).scalar()) is not None:
            return bool(at > saved.created_at)
    return False


def _owner_and_key(connection: sa.Connection, saved: CheckpointSaved) -> tuple[str, str]:
    """The project of a save's run, and the actor of the run's operations: the key that created its session."""
    of_run = sa.select(col(Model.owner), col(Session.key_id)).join(Session, col(Model.session_id) == col(Session.id))
    run = connection.execute(of_run.where(col(Model.id) == saved.run_id)).one_or_none()
    return (saved.owner, audit.SERVICE) if run is None else (run.owner, audit.actor_of_key(run.key_id))


def _missing(path: str) -> NotFoundError:
    return NotFoundError(f"checkpoint {path!r} does not exist{about_id(path)}")


# ------------------------------------------------------------------ tokens
class Shares(Aggregate):
    """Tokens of 256 random bits that let their holders read one checkpoint. The journal stores only SHA-256 hashes.

    Requests in the journal also contain the hash, never the token.
    """

    def create(
        self, path: str, owner: str | None, seconds: float | None = None, *, actor: str = audit.SERVICE
    ) -> tuple[ShareView, str]:
        """Create a token for a checkpoint. Returns its row and the token, which is never shown again.

        seconds: its lifetime; None: until revoked. actor: for the audit log. NotFoundError: there is no checkpoint at
        `path` that the owner may read.
        """
        now, token = self._now(), SHARE_PREFIX + secrets.token_urlsafe(32)
        with self._write() as connection:
            checkpoint = _readable(connection, path, owner, None, now)
            values = {"path": checkpoint.path, "attempt": checkpoint.attempt, "created_at": now}
            values |= {"id": new_id("share"), "token_hash": access_hash(token)}
            values["expires_at"] = None if seconds is None else add_seconds(now, seconds)
            made = sa.insert(WeightsShare).values(**values).returning(*columns(WeightsShare))
            row = connection.execute(made).one()
            _write_share_event(connection, row, checkpoint.owner, audit.AuditedEvent.CHECKPOINT_SHARED, now, actor)
        return as_view(ShareView, row), token

    def all(self, path: str | None = None) -> list[ShareView]:
        """The shares of one checkpoint or of all, including revoked and expired shares, oldest first."""
        where = [] if path is None else [col(WeightsShare.path) == path]
        oldest = (col(WeightsShare.created_at), col(WeightsShare.id))
        return self._views(ShareView, sa.select(WeightsShare).where(*where).order_by(*oldest))

    def revoke(self, share_id: str, *, actor: str = audit.SERVICE) -> ShareView:
        """Revoke a token. A token that is already revoked is left unchanged. NotFoundError: unknown id.

        actor: for the audit log.
        """
        revoked, now = col(WeightsShare.revoked_at), self._now()
        of_path = sa.select(col(Checkpoint.owner)).where(col(Checkpoint.path) == col(WeightsShare.path))
        usable = sa.select(of_path.scalar_subquery()).where(col(WeightsShare.id) == share_id, revoked.is_(None))
        with self._write() as connection:
            owner = connection.execute(usable).scalar()
            change = sa.update(WeightsShare).values(revoked_at=sa.case((revoked.is_(None), now), else_=revoked))
            changed = change.where(col(WeightsShare.id) == share_id).returning(*columns(WeightsShare))
            row = connection.execute(changed).one_or_none()
            if row is None:
                raise missing(WeightsShare, share_id)
            if owner is not None:
                _write_share_event(connection, row, owner, audit.AuditedEvent.CHECKPOINT_UNSHARED, now, actor)
        return as_view(ShareView, row)


def access_hash(token: str) -> str:
    """The SHA-256 of a token in hex, which the journal stores instead of the token."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_shared(now: datetime) -> sa.ColumnElement[bool]:
    """The filter for valid shares of the checkpoint in the enclosing query."""
    due = col(WeightsShare.expires_at)
    return sa.and_(
        col(WeightsShare.path) == col(Checkpoint.path),
        col(WeightsShare.attempt) == col(Checkpoint.attempt),
        col(WeightsShare.revoked_at).is_(None),
        sa.or_(due.is_(None), due > now),
    )


def _write_share_event(
    connection: sa.Connection, row: sa.Row[Any], owner: str, event: audit.AuditedEvent, now: datetime, actor: str
) -> None:
    due = row.expires_at
    details = {"share_id": row.id, "expires_at": None if due is None else due.isoformat()}
    named = {"owner": owner, "event": event, "actor": actor, "tinker_path": row.path}
    audit.write_event(connection, now, **named, details=details)
