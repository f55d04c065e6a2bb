"""Training runs that a person has deleted. Their rows stay without texts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0025"
down_revision = "v0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here, in place. No row changes."""
    op.add_column("model", sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True))
