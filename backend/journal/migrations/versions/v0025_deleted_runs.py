"""Training runs that a person has deleted. Their rows stay without texts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0025"
down_revision = "v0024"


def upgrade() -> None:
    op.add_column("model", sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True))
