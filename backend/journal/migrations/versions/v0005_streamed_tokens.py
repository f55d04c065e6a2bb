"""Tokens of streamed samples. Older samples have none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0005"
down_revision = "v0004"


def upgrade() -> None:
    op.create_table(
        "streamed_tokens",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("written_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_streamed_tokens"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_streamed_tokens_written_at", "streamed_tokens", ["written_at"])
