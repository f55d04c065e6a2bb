"""Events of runs, and the checkpoints that runs began with. Neither is known for older runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0017"
down_revision = "v0016"


def upgrade() -> None:
    op.create_table(
        "run_event",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_run_event"),
        sa.ForeignKeyConstraint(["model_id"], ["model.id"], name="fk_run_event_model_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_run_event_model_id_id", "run_event", ["model_id", "id"])
    for name in ("origin", "origin_run"):
        op.add_column("model", sa.Column(name, sa.String(), nullable=True))
    op.create_index(
        "ix_model_origin_run",
        "model",
        ["origin_run"],
        sqlite_where=sa.text("origin_run IS NOT NULL"),
        postgresql_where=sa.text("origin_run IS NOT NULL"),
    )
