"""The figures of each optimizer step, and the description of each worker group. Older steps have no figures."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0004"
down_revision = "v0003"


def upgrade() -> None:
    op.create_table(
        "training_step",
        sa.Column("model_id", sa.String(), sa.ForeignKey("model.id", name="fk_training_step_model_id"), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        *(sa.Column(name, sa.Float(), nullable=True) for name in ("loss", "kl", "grad_norm", "learning_rate")),
        sa.PrimaryKeyConstraint("model_id", "seq_id", name="pk_training_step"),
    )
    op.add_column("base_model", sa.Column("worker_group", sa.String(), nullable=True))
