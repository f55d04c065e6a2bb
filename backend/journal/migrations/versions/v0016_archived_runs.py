"""Runs that people have archived. No older run is archived."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0016"
down_revision = "v0015"


def upgrade() -> None:
    op.add_column("model", sa.Column("archived", sa.Boolean(), nullable=False, server_default=sa.false()))
