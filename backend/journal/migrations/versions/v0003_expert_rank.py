"""The rank of an expert's matrices. It is NULL in older rows, where all matrices have the same rank."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0003"
down_revision = "v0002"


def upgrade() -> None:
    """Bring the schema here, in place. Neither database rewrites the rows."""
    for table in ("model", "checkpoint"):
        op.add_column(table, sa.Column("expert_rank", sa.Integer(), nullable=True))
