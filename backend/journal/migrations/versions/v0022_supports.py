"""The supports of sampled tokens. None are known of earlier samples."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0022"
down_revision = "v0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here, in place. No row changes."""
    op.add_column("stability_info", sa.Column("supports", sa.LargeBinary(), nullable=True))
