"""Uploads of adapters that were made elsewhere: their owners, arrived files and final checkpoints.

The store holds the bytes in pieces, until the upload is finished or expires. A finished upload becomes a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.errors import ConflictError, UserError
from tinkerflow.backend.journal.checkpoints import CheckpointSaved
from tinkerflow.backend.journal.database import Aggregate, as_view, get_owned
from tinkerflow.backend.journal.imports import record_import
from tinkerflow.backend.journal.quotas import Limits, check_kept, check_storage, lock_project
from tinkerflow.backend.journal.sessions import NewSession
from tinkerflow.backend.journal.tables import UploadRow

MOST_OPEN = 8  # of one project at a time
_GRACE = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class NewUpload:
    """A new upload by the key `key_id` of the project `owner`.

    project_id: the label of the future checkpoint's session. base_model, rank, train_attn, train_mlp, train_unembed:
    the adapter's. max_bytes: the limit for its weights. expires_at: the time after which no file is accepted.
    """

    id: str
    owner: str
    key_id: str
    project_id: str | None
    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    max_bytes: int
    expires_at: datetime


@dataclass(frozen=True, kw_only=True)
class UploadView(NewUpload):
    """An upload. path: the checkpoint that it became, or None.

    files: by file, the name and the number of its pieces; the number is 0 while the file is arriving.
    """

    files: Mapping[str, tuple[str, int]]
    path: str | None


class Uploads(Aggregate):
    """Uploads of adapters. NotFoundError in all methods: the upload is unknown or foreign."""

    def start(self, new: NewUpload, limits: Limits) -> None:
        """Begin an upload. UserError: a limit is reached. The bytes that open uploads may still add count as stored."""
        now = self._now()
        is_open = (col(UploadRow.owner) == new.owner, col(UploadRow.path).is_(None), col(UploadRow.expires_at) > now)
        counted = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(col(UploadRow.max_bytes)), 0)).where(*is_open)
        with self._write() as connection:
            lock_project(connection, new.owner)
            count, reserved = connection.execute(counted).one()
            if count >= MOST_OPEN:
                raise UserError(
                    f"this project has {count} uploads that are not finished: must be fewer than {MOST_OPEN}; "
                    "finish them, or wait until they expire"
                )
            check_kept(connection, new.owner, limits, "sessions", "training_runs")
            check_storage(connection, limits, new.owner, "the upload has up to", new.max_bytes, reserved)
            row = {**asdict(new), "created_at": now, "files": {}, "path": None}
            connection.execute(sa.insert(UploadRow).values(**row))

    def get(self, upload_id: str, owner: str | None) -> UploadView:
        """An upload of the owner. NotFoundError: the owner has no upload with this id."""
        with self._read() as connection:
            return as_view(UploadView, get_owned(connection, UploadRow, upload_id, owner))

    def begin_file(self, upload_id: str, file: str, name: str) -> str:
        """Record that a file is arriving in pieces called `name`. Returns the name of the pieces it replaces, or ""."""
        return self._note(upload_id, file, name, 0)

    def arrived(self, upload_id: str, file: str, name: str, pieces: int) -> None:
        """Record that a file is complete with `pieces` pieces. ConflictError: another upload of the file began."""
        self._note(upload_id, file, name, pieces)

    def _note(self, upload_id: str, file: str, name: str, pieces: int) -> str:
        with self._write() as connection:
            row = get_owned(connection, UploadRow, upload_id, None, lock="change")
            before = str(row.files.get(file, ("",))[0])
            if pieces and before != name:
                raise anew(file)
            files = {**row.files, file: (name, pieces)}
            connection.execute(sa.update(UploadRow).where(col(UploadRow.id) == upload_id).values(files=files))
        return before

    def finish(self, upload: UploadView, saved: CheckpointSaved) -> str:
        """Insert the rows of the upload's checkpoint unless they exist. Returns the checkpoint's path.

        saved: the commit in the store. ConflictError: the upload was removed meanwhile.
        """
        session = NewSession(upload.owner, "", key_id=upload.key_id, project_id=upload.project_id)
        is_it = col(UploadRow.id) == upload.id
        done = sa.update(UploadRow).where(is_it, col(UploadRow.path).is_(None)).values(path=saved.path)
        with self._write() as connection:
            if connection.execute(done.returning(col(UploadRow.id))).one_or_none() is not None:
                record_import(connection, self._now(), upload.id, session, saved)
                return saved.path
            if (path := connection.execute(sa.select(col(UploadRow.path)).where(is_it)).scalar()) is None:
                raise ConflictError(f"upload {upload.id!r} was removed during its completion; begin another upload")
        return str(path)

    def over(self) -> list[UploadView]:
        """At most 100 uploads, finished or not, that expired over an hour ago and are therefore no longer in use.

        The latest first; see upkeep.py.
        """
        expired = sa.select(UploadRow).where(col(UploadRow.expires_at) < self._now() - _GRACE)
        return self._views(UploadView, expired.order_by(col(UploadRow.expires_at).desc()).limit(100))

    def forget(self, upload_id: str) -> None:
        """Delete the row of an upload."""
        with self._write() as connection:
            connection.execute(sa.delete(UploadRow).where(col(UploadRow.id) == upload_id))


def anew(file: str) -> ConflictError:
    """The error for a file that is being sent twice at the same time."""
    return ConflictError(f"{file}: another PUT of this file has begun since; only the newest one counts")
