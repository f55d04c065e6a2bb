"""Uploads of adapters that were made elsewhere. Earlier releases had none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0007"
down_revision = "v0006"


def upgrade() -> None:
    op.create_table(
        "upload",
        *(sa.Column(name, sa.String(), nullable=False) for name in ("id", "owner", "key_id")),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.Boolean(), nullable=False) for name in ("train_attn", "train_mlp", "train_unembed")),
        sa.Column("max_bytes", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.DateTime(timezone=True), nullable=False) for name in ("expires_at", "created_at")),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("path", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_upload"),
    )
    op.create_index("ix_upload_owner_expires_at", "upload", ["owner", "expires_at"])
    op.create_index("ix_upload_expires_at", "upload", ["expires_at"])
