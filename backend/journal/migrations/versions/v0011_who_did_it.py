"""The audit log names the actor, and tokens can be signed out. Entries of earlier releases have the actor ""."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0011"
down_revision = "v0010"


def upgrade() -> None:
    op.add_column("audit_event", sa.Column("actor", sa.String(), nullable=False, server_default=""))
    op.create_table(
        "ended_token",
        sa.Column("token_hash", sa.String(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("token_hash", name="pk_ended_token"),
    )
    op.create_index("ix_ended_token_expires_at", "ended_token", ["expires_at"])
