"""The rank of an expert's matrices; NULL in rows from before: the rank of all matrices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0003"
down_revision = "v0002"


def upgrade() -> None:
    """Bring the schema here, in place. Neither database touches the rows."""
    for table in ("model", "checkpoint"):
        op.add_column(table, sa.Column("expert_rank", sa.Integer(), nullable=True))
