"""The span in which each request was submitted. Older requests have none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0008"
down_revision = "v0007"


def upgrade() -> None:
    op.add_column("request", sa.Column("trace", sa.String(), nullable=True))
