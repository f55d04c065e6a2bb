"""People's feedback on samples. Older samples have none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0006"
down_revision = "v0005"


def upgrade() -> None:
    op.create_table(
        "feedback",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        *(sa.Column(name, sa.String(), nullable=False) for name in ("owner", "key_id", "sample_id")),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reward", sa.Float(), nullable=True),
        *(sa.Column(name, sa.String(), nullable=True) for name in ("label", "text")),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("model_path", sa.String(), nullable=True),
        sa.Column("prompt", sa.JSON(), nullable=False),
        sa.Column("answer", sa.String(), nullable=False),
        *(sa.Column(name, sa.LargeBinary(), nullable=False) for name in ("tokens", "logprobs")),
        sa.PrimaryKeyConstraint("id", name="pk_feedback"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_feedback_owner_id", "feedback", ["owner", "id"])
