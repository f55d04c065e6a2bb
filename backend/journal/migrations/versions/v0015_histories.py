"""Histories: the requests of chosen runs are kept in the store. Older runs have no history."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0015"
down_revision = "v0014"


def upgrade() -> None:
    for table, name in (("model", "history"), ("request", "archives")):
        op.add_column(table, sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_index(
        "ix_request_archives",
        "request",
        ["model_id", "seq_id", "finished_at", "waiting_bytes"],
        sqlite_where=sa.text("archives = 1"),
        postgresql_where=sa.text("archives"),
    )
    op.create_table(
        "history_segment",
        *(sa.Column(name, sa.String(), nullable=False) for name in ("model_id", "name")),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("first", "last", "size_bytes")),
        sa.PrimaryKeyConstraint("model_id", "first", name="pk_history_segment"),
        sa.ForeignKeyConstraint(["model_id"], ["model.id"], name="fk_history_segment_model_id"),
    )
