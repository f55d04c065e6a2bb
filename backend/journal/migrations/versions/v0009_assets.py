"""Images that projects uploaded. Earlier releases had none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0009"
down_revision = "v0008"


def upgrade() -> None:
    op.create_table(
        "asset",
        *(sa.Column(name, sa.String(), nullable=False) for name in ("id", "owner")),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("piece", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_asset"),
    )
    op.create_index("ix_asset_owner_size_bytes", "asset", ["owner", "size_bytes"])
