"""Metrics that clients store for their runs. Older runs have none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0014"
down_revision = "v0013"


def upgrade() -> None:
    op.create_table(
        "run_metric",
        *(sa.Column(name, sa.String(), nullable=False) for name in ("model_id", "name")),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("number", "last_step")),
        sa.PrimaryKeyConstraint("model_id", "name", name="pk_run_metric"),
        sa.ForeignKeyConstraint(["model_id"], ["model.id"], name="fk_run_metric_model_id"),
    )
    op.create_table(
        "run_metric_value",
        *(sa.Column(name, sa.String(), nullable=False) for name in ("model_id", "name")),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "name", "step", name="pk_run_metric_value"),
        sa.ForeignKeyConstraint(["model_id"], ["model.id"], name="fk_run_metric_value_model_id"),
    )
    op.add_column("project_total", sa.Column("metrics", sa.BigInteger(), nullable=False, server_default="0"))
