"""An index that finds interactive samples before other samples. Older samples do not count as interactive."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0010"
down_revision = "v0009"


def upgrade() -> None:
    op.add_column("request", sa.Column("interactive", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_index(
        "ix_request_pending_interactive",
        "request",
        ["created_at", "sampler_id"],
        sqlite_where=sa.text("state = 'pending' AND interactive = 1"),
        postgresql_where=sa.text("state = 'pending' AND interactive"),
    )
