"""Images that projects uploaded: their owners, and the pieces in the store that hold their bytes.

The id of an asset is a hash of its project and its bytes, so uploading a file again changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.database import Aggregate, as_view, get_owned
from tinkerflow.backend.journal.quotas import Limits, check_storage, count_kept, lock_project, uncount_kept
from tinkerflow.backend.journal.tables import AssetRow


@dataclass(frozen=True, kw_only=True)
class AssetView:
    """An image. piece: the name of its pieces in the store; "" until they have arrived."""

    id: str
    owner: str
    size_bytes: int
    piece: str
    created_at: datetime


class Assets(Aggregate):
    """Uploaded images. NotFoundError in all methods: another project's image does not exist."""

    def begin(self, asset_id: str, owner: str, size: int, limits: Limits) -> AssetView:
        """The row of an image, which is inserted if it is new. UserError: the project has reached a limit."""
        new = AssetView(id=asset_id, owner=owner, size_bytes=size, piece="", created_at=self._now())
        with self._write() as connection:
            lock_project(connection, owner)
            found = connection.execute(sa.select(AssetRow).where(col(AssetRow.id) == asset_id)).one_or_none()
            if found is not None:
                return as_view(AssetView, found)
            check_storage(connection, limits, owner, "the image has", size, reserved=0)
            connection.execute(sa.insert(AssetRow).values(**asdict(new)))
            count_kept(connection, owner, "images", 0, limits)
        return new

    def arrived(self, asset_id: str, owner: str, piece: str, key_id: str = "") -> str:
        """Record the image's pieces. Returns the recorded pieces, which may be those of a faster concurrent upload.

        key_id: the sender's key, for the audit log.
        """
        first = sa.and_(col(AssetRow.id) == asset_id, col(AssetRow.piece) == "")
        with self._write() as connection:
            connection.execute(sa.update(AssetRow).where(first).values(piece=piece))
            row = get_owned(connection, AssetRow, asset_id, owner)
            if row.piece == piece:
                self._note(connection, audit.AuditedEvent.ASSET_UPLOADED, row, key_id)
        return str(row.piece)

    def give_up(self, asset_id: str, owner: str) -> None:
        """Delete the row of an image whose pieces could not be stored, unless they arrived in another upload."""
        its = sa.delete(AssetRow).where(col(AssetRow.id) == asset_id, col(AssetRow.owner) == owner)
        with self._write() as connection:
            if connection.execute(its.where(col(AssetRow.piece) == "")).rowcount:
                uncount_kept(connection, owner, "images", 1, 0)

    def page(self, owner: str, *, limit: int, offset: int) -> list[AssetView]:
        """The owner's images that have arrived, newest first."""
        there = sa.select(AssetRow).where(col(AssetRow.owner) == owner, col(AssetRow.piece) != "")
        newest = (col(AssetRow.created_at).desc(), col(AssetRow.id))
        return self._views(AssetView, there.order_by(*newest).limit(limit).offset(offset))

    def found(self, asset_ids: Collection[str], owner: str) -> dict[str, AssetView]:
        """The images among these ids that belong to the owner and have arrived, by id."""
        wanted = sa.select(AssetRow).where(
            col(AssetRow.id).in_(asset_ids), col(AssetRow.owner) == owner, col(AssetRow.piece) != ""
        )
        return {asset.id: asset for asset in self._views(AssetView, wanted)}

    def withdraw(self, asset_id: str, owner: str, key_id: str = "") -> None:
        """Hide an image of the owner from requests. Uploading the image again stores it again.

        key_id: the deleting key, for the audit log.
        """
        with self._write() as connection:
            row = get_owned(connection, AssetRow, asset_id, owner, lock="change")
            if row.piece:  # otherwise an interrupted deletion has already written the event
                self._note(connection, audit.AuditedEvent.ASSET_DELETED, row, key_id)
            connection.execute(sa.update(AssetRow).where(col(AssetRow.id) == asset_id).values(piece=""))

    def forget(self, asset_id: str, owner: str) -> str:
        """Delete the row of an image. Returns the pieces that arrived after it was withdrawn, or ""."""
        its = sa.delete(AssetRow).where(col(AssetRow.id) == asset_id, col(AssetRow.owner) == owner)
        with self._write() as connection:
            pieces: str | None = connection.execute(its.returning(col(AssetRow.piece))).scalar_one_or_none()
            if pieces is not None:
                uncount_kept(connection, owner, "images", 1, 0)
        return pieces or ""

    def _note(self, connection: sa.Connection, event: audit.AuditedEvent, row: sa.Row[Any], key_id: str) -> None:
        details = {"asset_id": row.id, "size_bytes": row.size_bytes, "key_id": key_id}
        actor = audit.actor_of_key(key_id)
        audit.write_event(connection, self._now(), owner=row.owner, event=event, actor=actor, details=details)
