"""Runs that people have archived. No earlier run is one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0016"
down_revision = "v0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here, in place. No row changes."""
    op.add_column("model", sa.Column("archived", sa.Boolean(), nullable=False, server_default=sa.false()))
