"""Images that projects uploaded: whose they are, and the pieces that hold their bytes in the store.

An asset's id follows from its project and its bytes, so sending a file again changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.errors import UserError
from tinkerflow.backend.journal.database import Aggregate, as_view, get_owned
from tinkerflow.backend.journal.requests import Limits, stored_bytes, take_owners_turn
from tinkerflow.backend.journal.tables import AssetRow


@dataclass(frozen=True, kw_only=True)
class AssetView:
    """An image. piece: the name of its pieces in the store; "" until they are there."""

    id: str
    owner: str
    size_bytes: int
    piece: str


class Assets(Aggregate):
    """Uploaded images. NotFoundError everywhere: foreign ones do not exist."""

    def begin(self, asset_id: str, owner: str, size: int, limits: Limits) -> AssetView:
        """The row of an image of so many bytes, made if there is none; UserError when the project has no room."""
        row = {"id": asset_id, "owner": owner, "size_bytes": size, "piece": "", "created_at": self._now()}
        with self._write() as connection:
            take_owners_turn(connection, owner)
            found = connection.execute(sa.select(AssetRow).where(col(AssetRow.id) == asset_id)).one_or_none()
            if found is not None:
                return as_view(AssetView, found)
            stored = stored_bytes(connection, owner)
            if limits.stored_bytes and stored + size > limits.stored_bytes:
                raise UserError(
                    f"the image has {size} bytes, this project's checkpoints and images {stored}: together they must "
                    f"be at most {limits.stored_bytes} (max_stored_bytes)"
                )
            connection.execute(sa.insert(AssetRow).values(**row))
        return AssetView(id=asset_id, owner=owner, size_bytes=size, piece="")

    def arrived(self, asset_id: str, owner: str, piece: str) -> str:
        """Note which pieces hold the image; those that do, maybe of somebody who was faster."""
        first = sa.and_(col(AssetRow.id) == asset_id, col(AssetRow.piece) == "")
        with self._write() as connection:
            connection.execute(sa.update(AssetRow).where(first).values(piece=piece))
            return str(get_owned(connection, AssetRow, asset_id, owner).piece)

    def found(self, asset_ids: Collection[str], owner: str) -> dict[str, AssetView]:
        """Those of these images that are the owner's and have arrived, by id."""
        wanted = sa.select(AssetRow).where(
            col(AssetRow.id).in_(asset_ids), col(AssetRow.owner) == owner, col(AssetRow.piece) != ""
        )
        return {asset.id: asset for asset in self._views(AssetView, wanted)}

    def withdraw(self, asset_id: str, owner: str) -> None:
        """Have no request find an image of the owner's any more. Sent again, it is written again."""
        with self._write() as connection:
            get_owned(connection, AssetRow, asset_id, owner)
            connection.execute(sa.update(AssetRow).where(col(AssetRow.id) == asset_id).values(piece=""))

    def forget(self, asset_id: str, owner: str) -> str:
        """Remove the row of an image; the pieces that have arrived since it was withdrawn, or ""."""
        its = sa.delete(AssetRow).where(col(AssetRow.id) == asset_id, col(AssetRow.owner) == owner)
        with self._write() as connection:
            return connection.execute(its.returning(col(AssetRow.piece))).scalar_one_or_none() or ""
